// A page that was opened from a folder on disk may start no worker, and the search runs in one. This stands in for it: a hidden
// frame that runs the worker's script and passes messages both ways. The theme asks whether `IFrameWorker` is there.
class FolderWorker extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source !== inside) return;
      this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      if (this.onmessage) this.onmessage(event);
    });
    this.ready = new Promise((resolve) => {
      inside.document.open();
      inside.document.write("<!doctype html><html><body></body></html>");
      inside.document.close();
      // Messages have to come from the frame, so they are sent by a script of its own.
      const speaks = inside.document.createElement("script");
      speaks.textContent =
        "postMessage = (data) => parent.postMessage(data, '*');" +
        "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {" +
        "const script = document.createElement('script'); script.src = url; script.onload = done;" +
        "document.body.appendChild(script); })), Promise.resolve());";
      const works = inside.document.createElement("script");
      works.src = url;
      works.onload = resolve;
      inside.document.body.append(works, speaks);
    });
  }

  postMessage(data) {
    this.ready.then(() => {
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) }));
    });
  }

  terminate() {
    this.frame.remove();
  }
}

window.IFrameWorker = FolderWorker;
if (location.protocol === "file:") window.Worker = FolderWorker;
