"""A file is the old one or the new one, never a part of either."""

from pathlib import Path

import pytest

from patchlight.files import replacing


def test_the_new_content_takes_the_place_of_the_old(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with replacing(tmp_path / "a.txt") as temporary:
            assert temporary.parent == tmp_path  # a rename is atomic within one file system alone
            temporary.write_text(content)
        assert (tmp_path / "a.txt").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a.txt").write_text("old")

    def write_half() -> None:
        with replacing(tmp_path / "a.txt") as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises(error):
        write_half()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "old")]
