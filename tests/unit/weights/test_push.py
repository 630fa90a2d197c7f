"""Models on their way to the hub, by a client that only notes what it is told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

import patchlight as pl
from command_line import patchlight


class Hub:
    """What a repository holds once it was uploaded to."""

    failure: Exception | None = None
    repositories: dict[str, Path] = {}  # noqa: RUF012

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        if self.failure is not None:
            raise self.failure
        return f"https://hub/{name}{' (private)' if private else ''}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        target = self.repositories[repo_id]
        for file in folder_path.iterdir():
            (target / file.name).write_bytes(file.read_bytes())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vit = pl.ViT(pl.variant("Ti/16", depth=1, width=24, num_heads=2, image_size=32, num_classes=2)).eval()
    pl.save(vit, tmp_path / "run", labels=["cat", "dog"])
    (tmp_path / "run" / "README.md").write_text("The card of this run.")
    return tmp_path / "run"


@pytest.mark.parametrize("layout", ["patchlight", "timm"])
def test_what_was_pushed_loads_as_the_same_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "repositories", {"me/mine": tmp_path / "hub"})
    (tmp_path / "hub").mkdir()
    done = patchlight("push-to-hub", "run", "me/mine", "--private", "--layout", layout, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "https://hub/me/mine (private)\n", "")
    there, here = pl.load(tmp_path / "hub"), pl.load(model)
    image_BCHW = torch.randn(1, 3, 32, 32)
    assert torch.equal(there.model(image_BCHW), here.model(image_BCHW))
    assert there.labels == ("cat", "dog")
    assert (tmp_path / "hub" / "README.md").read_text() == "The card of this run."


def refused(status: int) -> Any:
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    ("name", "failure", "said"),
    [
        ("mine", None, "mine: not a name on the hub; write OWNER/NAME"),
        ("me/mine", LocalTokenNotFoundError(), "`hf auth login` first"),
        ("me/mine", refused(403), "with a token that may write"),
        ("me/mine", RuntimeError("no route to host"), "could not be uploaded (no route to host)"),
    ],
)
def test_what_goes_wrong_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: Exception | None, said: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "failure", failure)
    done = patchlight("push-to-hub", str(model), name, cwd=model.parent)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
