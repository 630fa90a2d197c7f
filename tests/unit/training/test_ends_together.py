"""Two processes of a run: whatever happens to one of them, they end at the same place, and say why."""

from pathlib import Path

import pytest

from coloured_photos import write_coloured_photos
from models_at_random import tiny_vit
from patchlight.config import PreprocessConfig
from patchlight.training.checkpoint import read_newest
from patchlight.training.config import TrainConfig
from patchlight.training.finetune import choose_recipe
from patchlight.training.sources import open_dataset
from patchlight.weights.load import load
from patchlight.weights.save import save
from warm_python import run_two

SCRIPT = """
import os, signal, sys, time, torch
torch.set_num_threads(1)
from pathlib import Path
from patchlight.errors import PatchlightError
from patchlight.signals import Stopped
from patchlight.training import loop
from patchlight.training.config import TrainConfig
from patchlight.training.objective import Classification
from patchlight.training.processes import FailedElsewhereError

what, rank = sys.argv[1], int(os.environ["RANK"])
Path(f"{rank}.pid").write_text(str(os.getpid()))
prepare, save, shown, check = Classification.prepare, loop.save_finished, loop._shown, loop.check_photos
calls = 0

def prepare_otherwise(self, batch, *, cropped):
    global calls
    calls += 1
    if calls == 3 and what == "stop one" and rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if calls == 3 and what == "unreadable" and rank == 1:
        raise PatchlightError("gone.png: missing")
    return prepare(self, batch, cropped=cropped)

def save_otherwise(*given):
    for other in "10":  # the own one last, since it ends this
        os.kill(int(Path(f"{other}.pid").read_text()), signal.SIGINT)
    return save(*given)

def shown_late(run):
    if rank == 1:  # the other is ahead of it, and saves
        time.sleep(3)
    return shown(run)

def check_otherwise(*given):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return check(*given)

Classification.prepare = prepare_otherwise
if what == "stop one at the beginning":
    loop.check_photos = check_otherwise
if what == "stop all at the end":
    loop.save_finished, loop._shown = save_otherwise, shown_late
try:
    loop.train(TrainConfig.from_json(Path("config.json").read_text()), "run")
    end = "done"
except Stopped as stopped:
    end = f"{stopped.signal}: {stopped}"
except FailedElsewhereError:
    end = "quiet"
except PatchlightError as error:
    end = str(error)
print(f"{rank} {end}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coloured_photos(tmp_path_factory.mktemp("photos"), 40, 36)


def settings(photos: Path, folder: Path) -> TrainConfig:
    """The head alone learns, as `finetune` chooses it for few photos."""
    model = tiny_vit()
    start = save(model, folder / "start", preprocess=PreprocessConfig(image_size=model.config.image_size))
    config = choose_recipe(load(start), str(photos), open_dataset(photos))
    return config.changed({"epochs": 4.0, "augment.variations": 3, "data.workers": 0, "batch_size": 8})


def run(config: TrainConfig, what: str, folder: Path) -> set[str]:
    """What each of two processes came to."""
    (folder / "config.json").write_text(config.to_json())
    (folder / "script.py").write_text(SCRIPT)
    done = run_two(["script.py", what], cwd=folder)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


@pytest.mark.parametrize(("learning", "step"), [(0, 0), (1, 2)], ids=["looking", "learning"])
def test_a_stop_that_one_of_them_hears_stops_both(learning: int, step: int, photos: Path, tmp_path: Path) -> None:
    config = settings(photos, tmp_path).changed({"trainable_blocks": learning})
    line = f"15: run: stopped after step {step}; run it again with resume=True to continue"
    assert run(config, "stop one", tmp_path) == {f"0 {line}", f"1 {line}"}
    newest = read_newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest[0] == step


@pytest.mark.parametrize("learning", [0, 1], ids=["looking", "learning"])
def test_a_photo_that_one_of_them_cannot_read_ends_both(learning: int, photos: Path, tmp_path: Path) -> None:
    config = settings(photos, tmp_path).changed({"trainable_blocks": learning})
    assert run(config, "unreadable", tmp_path) == {"0 quiet", "1 gone.png: missing"}


def test_a_stop_while_the_first_of_them_saves_stops_both(photos: Path, tmp_path: Path) -> None:
    line = "2: run: stopped after the last step; run it again with resume=True to evaluate and save the model"
    found = run(settings(photos, tmp_path), "stop all at the end", tmp_path)
    assert found == {f"0 {line}", f"1 {line}"}


def test_a_stop_that_one_of_them_hears_before_the_first_step_ends_both(photos: Path, tmp_path: Path) -> None:
    line = "2: run: stopped before its first step; run the same command again"
    assert run(settings(photos, tmp_path), "stop one at the beginning", tmp_path) == {f"0 {line}", f"1 {line}"}


def test_a_model_in_parts_learns_its_head_alone(photos: Path, tmp_path: Path) -> None:
    config = settings(photos, tmp_path).changed({"sharded": True})
    assert run(config, "nothing", tmp_path) == {"0 done", "1 done"}
    assert load(tmp_path / "run").labels is not None
