"""Take review.jpg: the page of `patchlight review` on the demo photos, in Chromium.

python docs/pictures/review.py
"""

import io
import os
import shutil
import tempfile
import threading
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

import patchlight as pl
from patchlight.batch.again import FinishedRun
from patchlight.serve.review import Review, make_review_app
from patchlight.serve.running import Address, access_policy, listen

HERE = Path(__file__).absolute().parent
DEMO = HERE.parents[1] / "demo"


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        shutil.copytree(DEMO, "photos")
        pl.crop_photos("photos", "shop", how=pl.CropRunSettings(workers=0, device="cpu"), reporter=pl.Reporter())
        review = Review(FinishedRun(Path("shop")))
        listening = listen(Address(port=0))
        port = listening.getsockname()[1]
        app = make_review_app(review, access_policy(Address(port=port), port), lambda facts: None)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        with sync_playwright() as running:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1200, "height": 700})
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("#over .box")
            page.select_option("#show", "all")
            while "coffee" not in page.inner_text("#name"):
                page.keyboard.press("ArrowRight")
            while not page.evaluate("document.getElementById('image').naturalWidth") > 500:
                page.wait_for_timeout(50)
            page.focus("#over .box")
            shot = page.screenshot()
            browser.close()
        server.should_exit = True
        thread.join(30)
        Image.open(io.BytesIO(shot)).convert("RGB").save(HERE / "review.jpg", quality=80, optimize=True)


if __name__ == "__main__":
    main()
