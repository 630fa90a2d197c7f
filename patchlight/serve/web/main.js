// The page: photos come in, one is on the stage, and the tabs look at it.

import * as api from "./api.js";
import {AttentionTab} from "./attention.js";
import {ClassesTab} from "./classes.js";
import {CompareTab} from "./compare.js";
import {byId, el, readable, short} from "./dom.js";
import {Gallery} from "./gallery.js";
import {PatchesTab} from "./patches.js";
import {Stage} from "./stage.js";
import {LearnTab} from "./strip.js";
import {SubjectTab} from "./subject.js";

const SAMPLES = [["chelsea", "A cat"], ["coffee", "A cup"], ["rocket", "A rocket"], ["astronaut", "A portrait"], ["dragonfly", "A dragonfly"]];
const AT_ONCE = 2;

class App {
  constructor() {
    this.photos = [];
    this.models = [];
    this.current = null;
    this.stage = new Stage("The photo", (row, column, fixed) => this.tab.pointed && this.tab.pointed(row, column, fixed));
    byId("stage").append(this.stage.element);
    this.gallery = new Gallery(this);
    this.tabs = {learn: new LearnTab(this), subject: new SubjectTab(this), attention: new AttentionTab(this), patches: new PatchesTab(this), classes: new ClassesTab(this), compare: new CompareTab(this)};
    this.tab = this.tabs.subject;
    this.waiting = [];
    this.running = 0;
    this.ready = this.start();
    this.welcome();
  }

  async start() {
    await api.ready();
    const {models} = await api.get("/models");
    this.models = models;
    this.model = models[0];
    byId("model").replaceChildren(...models.map((model) => el("option", {value: model.number, text: model.name})));
    byId("model-field").hidden = models.length < 2;
    this.tellReady();
  }

  // The first page: the strip, of a photo that comes with the page or of the one that a link names.
  async welcome({photo = SAMPLES[0][0], ...wanted} = {}) {
    const {strip} = this.tabs.learn, name = SAMPLES.some(([each]) => each === photo) ? photo : SAMPLES[0][0];
    byId("first").append(strip.element);
    try {
      const file = await sample(name), image = el("img", {src: URL.createObjectURL(file), alt: ""});
      await image.decode();
      if (this.photos.length) return;
      strip.photo = null;
      strip.begin(image);
      await this.ready;
      const sent = this.sample && this.sample.name === file.name ? this.sample : await api.send(file);
      this.sample = Object.assign(sent, {file});
      if (!this.photos.length && strip.image === image) await strip.show(sent, this.model, image, wanted);
    } catch (error) {
      this.fail(error);
    }
  }

  // A link such as #patches?size=16 opens a tab, on a photo that comes with the page where there is none yet.
  async follow(link) {
    const told = /^#(\w+)(?:\?(.*))?$/.exec(link), tab = told && this.tabs[told[1]];
    if (!tab) return;
    const values = Object.fromEntries(new URLSearchParams(told[2] || "")), whole = (name) => /^\d{1,9}$/.test(values[name] || "") ? Number(values[name]) : undefined;
    const wanted = {...values, size: whole("size"), image: whole("image"), layer: whole("layer"), head: whole("head"), seed: whole("shuffle"), positions: values.positions !== "off"};
    if (told[1] === "learn" && !this.photos.length) {
      await this.welcome(wanted);
      return;
    }
    tab.wanted = wanted;
    await this.ready;
    const known = SAMPLES.some(([each]) => each === values.photo), name = known ? values.photo : SAMPLES[0][0];
    const other = this.photos.find((photo) => photo.name === name + ".jpg" && photo.id);
    if (!this.photos.length || (known && !other)) {
      this.open(told[1]);
      this.take([await sample(name)], true);
    } else if (known && other !== this.current) {
      this.open(told[1]);
      await this.choose(other);
    } else if (this.tab === tab) await tab.open();
    else await this.open(told[1]);
  }

  // How long a photo takes is known better after each.
  async refresh() {
    const {models} = await api.get("/models");
    models.forEach((model, i) => Object.assign(this.models[i], model));
    this.tellReady();
  }

  tellReady() {
    const {name, parameters, latency_ms: took, device} = this.model;
    byId("ready").className = "ok";
    byId("ready").lastChild.textContent = `Ready: ${name}, ${short(parameters)} weights, ${Math.max(1, Math.round(took))} ms a photo on ${device}`;
  }

  say(text) {
    byId("caption").textContent = text;
  }

  // The server lets go of photos that were not used lately; it gets this one again.
  async sendAgain(photo) {
    photo.id = (await api.send(photo.file)).id;
    if (this.current === photo) await this.tab.open();
  }

  fail(error) {
    if (error.reason === "unknown-photo" && this.current && !this.current.again) {
      this.current.again = true;
      this.sendAgain(this.current).catch((other) => this.fail(other)).finally(() => this.current.again = false);
      return;
    }
    const note = byId("note");
    note.textContent = error instanceof api.ApiError ? error.message : "The server does not answer. Is it still running?";
    if (!(error instanceof api.ApiError)) console.error(error);
    note.hidden = false;
    clearTimeout(this.noteTimer);
    this.noteTimer = setTimeout(() => note.hidden = true, 8000);
  }

  // Photos that come in

  take(files, shown = false) {
    for (const file of files) {
      const photo = {name: file.name || "pasted photo", file, margin: 0.03, aspect: "free", chosen: 0, shown};
      this.photos.push(photo);
      this.gallery.add(photo);
      this.waiting.push(photo);
    }
    if (!files.length) return;
    byId("welcome").classList.add("small");
    byId("work").hidden = false;
    this.next();
  }

  next() {
    while (this.running < AT_ONCE && this.waiting.length) {
      this.running++;
      this.process(this.waiting.shift()).finally(() => {
        this.running--;
        this.next();
      });
    }
  }

  async process(photo) {
    try {
      await this.ready;
      Object.assign(photo, await api.send(photo.file));
      photo.name = readable(photo.name);
      const whole = this.preview(photo), found = SubjectTab.find(photo, this.model.number);
      if (!this.current || photo.shown) this.choose(photo);
      await found;
      this.gallery.draw(photo);
      await whole;
      photo.thumb = photo.url;
    } catch (error) {
      photo.error = error instanceof api.ApiError ? `${error.reason}: ${error.message}` : "could not be sent";
      if (!(error instanceof api.ApiError)) this.fail(error);
    }
    if (this.photos.includes(photo)) this.gallery.draw(photo);
    if (!this.waiting.length) this.refresh().catch(() => {});
    if (photo.error && this.photos.every((each) => each.error)) this.fail(new api.ApiError(422, "", photo.error));
  }

  preview(photo) {
    const side = this.photos.length > 12 ? 960 : 1440;
    photo.previewing = photo.previewing || api.blob(`/photos/${photo.id}/preview`, {side}).then((made) => photo.url = URL.createObjectURL(made));
    return photo.previewing;
  }

  async choose(photo) {
    if (!photo.id) return;
    const before = this.current;
    this.current = photo;
    byId("work").classList.add("loading");
    try {
      this.stage.show(photo, null);
      const [url] = await Promise.all([this.preview(photo), SubjectTab.find(photo, this.model.number, this.tabs.subject.subjects)]);
      if (this.current !== photo) return;
      this.stage.show(photo, url);
      this.stage.element.setAttribute("aria-label", "The photo " + photo.name);
      await this.stage.image.decode().catch(() => {});
      await this.tab.open();
      document.body.dataset.shown = photo.id;
    } catch (error) {
      this.fail(error);
    } finally {
      byId("work").classList.remove("loading");
    }
    for (const each of [before, photo]) if (each && each.card.isConnected) this.gallery.draw(each);
  }

  remove(photo) {
    this.photos = this.photos.filter((each) => each !== photo);
    this.waiting = this.waiting.filter((each) => each !== photo);
    photo.card.remove();
    if (photo.url) URL.revokeObjectURL(photo.url);
    if (photo.id) api.remove(photo.id).catch(() => {});
    this.gallery.count();
    if (this.current === photo) {
      this.current = null;
      const next = this.photos.find((each) => each.found);
      if (next) this.choose(next);
    }
    if (!this.photos.length) {
      byId("work").hidden = true;
      byId("welcome").classList.remove("small");
      byId("drop").focus();
      this.welcome();
    }
  }

  async open(name) {
    const tab = this.tabs[name];
    if (tab === this.tab) return;
    this.tab.close();
    this.tab = tab;
    for (const each of Object.keys(this.tabs)) {
      const on = each === name, button = byId("tab-" + each);
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
      byId("panel-" + each).hidden = !on;
    }
    document.querySelector(".bench").hidden = name === "compare" || name === "learn";
    try {
      if (this.current) await tab.open();
    } catch (error) {
      this.fail(error);
    }
  }
}

async function sample(name) {
  const content = await (await fetch(`/web/photos/${name}.jpg`)).blob();
  return new File([content], name + ".jpg", {type: "image/jpeg"});
}

const app = new App();
app.ready.catch((error) => app.fail(error));
window.addEventListener("hashchange", () => app.follow(location.hash).catch((error) => app.fail(error)));
app.follow(location.hash).catch((error) => app.fail(error));

// The ways in: choosing, dropping, pasting, the photos that come with the page

for (const id of ["drop", "add"]) byId(id).addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", (event) => {
  app.take([...event.target.files]);
  event.target.value = "";
});
const images = (list) => [...list].filter((file) => file.type.startsWith("image/") || !file.type);
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  app.take([...event.dataTransfer.files]);
});
document.addEventListener("paste", (event) => {
  const files = images(event.clipboardData.files);
  if (files.length) app.take(files);
});
byId("samples").append(...SAMPLES.map(([name, what]) => el("button", {type: "button", data: {name}, onclick: async () => app.take([await sample(name)])}, el("img", {src: `/web/photos/${name}.jpg`, alt: "", loading: "lazy"}), el("span", {text: what}))));

// The tabs and the model

const names = Object.keys(app.tabs);
for (const name of names) {
  const button = byId("tab-" + name);
  button.addEventListener("click", () => app.open(name));
  button.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = names[(names.indexOf(name) + step + names.length) % names.length];
    byId("tab-" + next).focus();
    app.open(next);
  });
}
byId("model").addEventListener("change", async (event) => {
  app.model = app.models.find((model) => model.number === Number(event.target.value));
  app.tellReady();
  if (!app.photos.length) app.welcome();
  if (!app.current) return;
  try {
    await SubjectTab.find(app.current, app.model.number, app.tabs.subject.subjects);
    await app.tab.open();
    app.gallery.draw(app.current);
  } catch (error) {
    app.fail(error);
  }
});
window.addEventListener("resize", () => app.current && app.tab === app.tabs.patches && app.tabs.patches.drawGrid());
document.documentElement.classList.add("alive");
