"""The folder of a run: who may write to it, its metrics, and what a resumed run finds there.

RUN/run.json           the settings
RUN/metrics.jsonl      a line for every few steps, and for every evaluation
RUN/checkpoints/       the two newest (see checkpoint.py)
RUN/trained_on.hashes  by which the training photos are known again (see trained_on.py)
RUN/config.json, model.safetensors, README.md    the model, for `patchlight.load("RUN")`
RUN/curves.png         where matplotlib is installed
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from patchlight.errors import PatchlightError
from patchlight.files import held_alone, replacing
from patchlight.json_config import parse_json
from patchlight.remote import on_disk
from patchlight.training.config import TrainConfig


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = on_disk(path)
        self.checkpoints = self.path / "checkpoints"
        self.settings = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self._board: Any = None

    def held(self) -> contextlib.AbstractContextManager[None]:
        """For this process alone."""
        return held_alone(self.path, self.path / ".lock", begun=self.settings)

    def check(self, config: TrainConfig, *, resume: bool) -> None:
        """Refuse a folder that holds other things, or a run that this one would not go on with."""
        if not self.settings.exists():
            others = [each.name for each in self.path.iterdir() if not each.name.startswith((".lock", ".run.json."))]
            if others:
                raise PatchlightError(f"{self.path}: holds {others[0]}, but no run; name an empty or a new folder")
        elif not resume:
            raise PatchlightError(f"{self.path}: holds a run already; go on with resume=True, or name another folder")
        else:
            self.rows()  # which refuses what cannot be read
            begun, asked = _flat(self.config()), _flat(config)
            # What cannot change the result may change.
            fixed = (asked.keys() | begun.keys()) - {"data.workers", "checkpoint_every", "log_every"}
            changed = sorted(name for name in fixed if begun.get(name) != asked.get(name))
            if "epochs" in changed:
                finished = (self.path / "model.safetensors").exists()
                raise PatchlightError(
                    f"{self.path}: was started with epochs={begun.get('epochs')}, not {asked['epochs']}, by which the "
                    f"rate of every step goes; {'' if finished else 'finish it with these, and '}learn on from its "
                    f"model in another folder: set start={self.path}, or for `finetune` --model {self.path}"
                )
            if changed:
                name = changed[0]
                raise PatchlightError(
                    f"{self.path}: was started with {name}={begun.get(name)!r}, not {asked.get(name)!r}; resume "
                    "with the same settings, or name another folder"
                )

    def begin(self, config: TrainConfig) -> None:
        """From here on the folder is this run's."""
        if not self.settings.exists():
            self.replace("run.json", config.to_json().encode())

    def config(self) -> TrainConfig:
        try:
            return TrainConfig.from_json(self.settings.read_text(errors="replace"))
        except OSError as error:
            raise PatchlightError(f"{self.settings}: cannot be read ({error.strerror})") from None
        except PatchlightError as error:
            raise PatchlightError(f"{self.settings}: {error}") from None

    def log(self, **values: Any) -> None:
        """One line; numbers that are none are written as null, which JSON has."""
        clean = {name: value if value == value else None for name, value in values.items()}
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise PatchlightError(
                f"{self.metrics}: cannot be written ({error.strerror}); free some space and resume"
            ) from None
        if self._board is None:
            self._board = _open_board(self.path / "tensorboard")
        if self._board:
            for name in values.keys() - {"step", "epoch", "seconds"}:
                self._board.add_scalar(name, values[name], values["step"])
            self._board.flush()

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics; what a kill cut off, and whatever else is not ours, is left out."""
        try:
            lines = self.metrics.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PatchlightError(
                f"{self.metrics}: cannot be read ({error.strerror}); move it away, and resume"
            ) from None
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(parse_json(line))
        return [row for row in rows if _is_row(row)]

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps that are going to be done again."""
        rows = [row for row in self.rows() if row["step"] <= step]
        self.replace("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def replace(self, name: str, content: bytes) -> None:
        """A file whole or not at all."""
        try:
            with replacing(self.path / name) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise PatchlightError(
                f"{self.path / name}: could not be written ({error.strerror}); free some space and resume"
            ) from None


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("step"), int)
        and all(value is None or isinstance(value, int | float) for value in row.values())
    )


def _open_board(path: Path) -> Any:
    """For tensorboard, where it is installed; False where it is not."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(path)


def _flat(config: TrainConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat
