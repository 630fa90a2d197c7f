"""Take page.jpg and strip.jpg: the page of `patchlight serve`, in Chromium.

python docs/pictures/page.py
"""

import io
import shutil
import threading
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

from patchlight.serve.app import make_app
from patchlight.serve.engine import Engine
from patchlight.serve.running import Address, access_policy, listen

HERE = Path(__file__).absolute().parent


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

        def visit(link: str, until: str, height: int) -> Any:
            page = browser.new_page(viewport={"width": 1280, "height": height}, reduced_motion="reduce")
            page.goto(f"http://127.0.0.1:{port}/{link}")
            while not page.evaluate(until):
                page.wait_for_timeout(50)
            # How long a photo takes is a figure of this machine at this moment.
            page.evaluate("document.getElementById('ready').lastChild.textContent = 'Ready: default'")
            return page

        strip = visit("#learn?size=16&image=224", "document.getElementById('strip')?.dataset.ended", 900)
        box = strip.locator(".photo-slot").bounding_box()
        strip.mouse.move(box["x"] + 4.5 / 14 * box["width"], box["y"] + 5.5 / 14 * box["height"])
        strip.wait_for_timeout(500)
        save(strip.locator("#strip").screenshot(), "strip.jpg")
        page = visit(
            "#attention?photo=coffee&layer=6&query=12,10",
            "document.querySelector('#stage .heat')?.dataset.query?.startsWith('patch 12,10 6')",
            800,
        )
        page.wait_for_timeout(500)
        save(page.screenshot(), "page.jpg")
        browser.close()
    server.should_exit = True
    thread.join(30)


def save(shot: bytes, name: str) -> None:
    Image.open(io.BytesIO(shot)).convert("RGB").save(HERE / name, quality=80, optimize=True)


if __name__ == "__main__":
    main()
