"""Frame times of the strip on the page of `patchlight serve`, in Chromium without a GPU.

python benchmarks/page.py

For each width, three times: the milliseconds from frame to frame (requestAnimationFrame) while the strip plays and
while its patches change places, beside those of the same page at rest, which say what else the machine was doing; and
the milliseconds of a frame that the strip's own script takes.
"""

import shutil
import statistics
import threading
import time
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright

from patchlight.serve.app import make_app
from patchlight.serve.engine import Engine
from patchlight.serve.running import Address, access_policy, listen

PAGES = {
    "1440 px": (1440, 900, ""),
    "390 px": (390, 844, ""),
    "1440 px, 784 patches": (1440, 900, "#learn?size=8&image=224"),
}
RECORD = """async (milliseconds) => {
    const {Strip} = await import("/web/strip.js"), draw = Strip.prototype.draw, drawn = [], between = [];
    Strip.prototype.draw = function () {
        const start = performance.now();
        draw.call(this);
        drawn.push(performance.now() - start);
    };
    let last = null, going = true;
    const frame = (now) => {
        if (last !== null) between.push(now - last);
        last = now;
        if (going) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
    if (BUTTON) document.querySelector(BUTTON).click();
    await new Promise((resolve) => setTimeout(resolve, milliseconds));
    going = false;
    Strip.prototype.draw = draw;
    return {drawn, between};
}"""
STATES = {"at rest": ("null", 2000), "playing": ("'#strip-play'", 7500), "changing places": ("'#strip-shuffle'", 1500)}


def main() -> None:
    engine, listening = Engine(("default",)), listen(Address(port=0))
    port = listening.getsockname()[1]
    app = make_app(engine, access_policy(Address(port=port), port), lambda facts: None)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    with sync_playwright() as running:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (width, height, link) in PAGES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(f"http://127.0.0.1:{port}/{link}")
            wait_for_the_end(page)
            page.click("#strip-shuffle")  # once, so that no pass of the model is timed
            wait_for_the_end(page, "true 1")
            for what, (button, milliseconds) in STATES.items():
                found = [page.evaluate(RECORD.replace("BUTTON", button), milliseconds) for _ in range(3)]
                between, drawn = (
                    sorted(value for each in found for value in each[key]) for key in ("between", "drawn")
                )
                print(f"{name}, {what}: {told(between)} between frames; {told(drawn)} of script")
            page.close()
        browser.close()
    server.should_exit = True
    thread.join(30)


def wait_for_the_end(page: Any, state: str = "true null") -> None:
    deadline = time.monotonic() + 120
    while page.evaluate("document.getElementById('strip')?.dataset.ended") != state:
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)


def told(values: list[float]) -> str:
    if not values:
        return "none"
    return f"median {statistics.median(values):.1f} ms, 95 % within {values[int(0.95 * len(values))]:.1f} ms"


if __name__ == "__main__":
    main()
