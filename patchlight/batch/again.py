"""A run once more, as it was asked for: with the corrections that were made since, its files follow them."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchlight.batch.results import ResultFolder, read_json
from patchlight.batch.runner import crop_photos
from patchlight.batch.settings import CropRunSettings, CropSettings
from patchlight.batch.summary import CropSummary
from patchlight.deploy.engines import load_engine
from patchlight.errors import PatchlightError
from patchlight.remote import on_disk
from patchlight.reporting import Reporter
from patchlight.weights.load import Loaded, Runs, load

QUIET_SECONDS = 1.5
"""Without another correction, until files are written: one by one they would be written all the time."""

BUSY_SECONDS = 5.0
"""Until it is tried again where another run has the folder, or something failed."""


class FinishedRun:
    """A folder that a run has written. From here on this process works where that run was started from."""

    def __init__(self, folder: Path, model: str | None = None) -> None:
        self.folder = on_disk(folder).absolute()
        results = ResultFolder(self.folder)
        made_with, given = read_json(results.settings), read_json(results.given)
        if made_with is None or given is None or not results.results.exists():
            raise PatchlightError(f"{folder}: holds no finished run; name the folder of `patchlight crop --out`")
        try:
            self.settings = CropSettings.of_run(made_with)
        except KeyError:
            raise PatchlightError(
                f"{folder}: was written by another version of this program; run `patchlight crop` anew, --overwrite"
            ) from None
        self.photos: list[str] = given["photos"]
        self.part: str | None = made_with["part"]
        self.engine: str | None = made_with["engine"]
        self.is_exported = given.get("engine") is not None
        self.model: str | Loaded | Runs = model or given["engine" if self.is_exported else "model"]
        self.results, self.report = results.results, self.folder / "report.html"
        self.thumbs, self.overlays = results.thumbs, results.overlays
        try:
            os.chdir(given["cwd"])  # rows name photos as they were given
        except OSError as error:
            raise PatchlightError(
                f"{given['cwd']}: the run was started there, and it is gone ({error.strerror}); run it anew from here"
            ) from None

    def follow(self) -> CropSummary:
        """Let crops, rows, tables and exports say what the corrections do."""
        if isinstance(self.model, str) and self.is_exported:
            self.model = load_engine(self.model)
        elif isinstance(self.model, str) and self.engine is None:
            self.model = load(self.model, device="cpu")  # once; by its name alone a run takes the engine it began with
        how = CropRunSettings(
            device="cpu",
            workers=0,
            report=self.report.exists(),
            thumbs=self.thumbs.exists(),
            part=self.part,
            overlay=self.overlays.exists(),
        )
        return crop_photos(self.photos, self.folder, self.settings, how, model=self.model, reporter=Reporter())


class Follower:
    """A thread in which files follow corrections, a moment after the last one of them."""

    def __init__(self, follow: Callable[[], Any]) -> None:
        self._follow = follow
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self.behind = 0
        """Corrections that files do not say yet."""
        self.trouble: str | None = None
        """Why they could not be written."""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def note(self) -> None:
        """There is another correction."""
        with self._changed:
            self.behind += 1
            self._wanted = True
            self._changed.notify_all()

    def close(self) -> None:
        """What is still to be written is written first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if not self._wanted:
                    return
                quiet = False
                while not self._closed and not quiet:
                    quiet = not self._changed.wait(QUIET_SECONDS)
                taken, self._wanted = self.behind, False
            try:
                self._follow()
                trouble = None
            except PatchlightError as error:
                trouble = str(error)
            with self._changed:
                self.trouble = trouble
                if trouble is None:
                    self.behind -= taken
                elif self._closed:
                    return
                else:
                    self._wanted = True
                    self._changed.wait_for(lambda: self._closed, BUSY_SECONDS)
