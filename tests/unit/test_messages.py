"""One message for two readers: arguments in Python, options on the command line."""

from pathlib import Path

import pytest

from command_line import patchlight
from crop_runs import photo
from patchlight.cli import in_options


@pytest.mark.parametrize(
    ("command", "message", "said"),
    [
        ("crop", "use overwrite=True to start over", "use --overwrite to start over"),
        ("crop", "leave out `second_look`, or use device='cpu'", "leave out --second-look, or use --device cpu"),
        ("inspect", "say num_heads=3, or like=NAME", "say num_heads=3, or --like NAME"),
        ("inspect", "use overwrite=True", "use overwrite=True"),  # which is none of its options
        ("costs", "set data.device='cpu', `models` and load_device=True", None),
        ("nothing", "use overwrite=True", None),
    ],
)
def test_arguments_are_written_as_options_where_the_command_has_them(
    command: str, message: str, said: str | None
) -> None:
    assert in_options(message, command) == (message if said is None else said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("crop a --out o --video all", "'--video': 'all' is not a number. Try"),
        ("crop a --out o --workers x", "'--workers': 'x' is not a whole number. Try"),
        ("classify a --top x", "is not a"),
        ("serve --port 99999", "65535"),
        ("export default --out o --to nope", "'--to': 'nope' is not one of 'onnx', 'openvino',"),
    ],
)
def test_a_wrong_value_is_said_in_our_words(words: str, said: str, tmp_path: Path) -> None:
    run = patchlight(*words.split(), cwd=tmp_path)
    assert run.returncode == 2
    assert said in run.stderr
    for theirs in ("Value error", "Input should", "literal", "convert string"):
        assert theirs not in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "crop . --out s3://b",
        "crop . --out o --engine s3://b",
        "embed . --out s3://b.npz",
        "classify . --out s3://b.csv",
        "similar a.jpg --in s3://b.npz",
        "dedupe s3://b.npz",
        "merge s3://b --out o",
        "review s3://b --no-open",
        "finetune --from s3://b --out o",
        "look a.jpg --out s3://b",
        "install-default s3://b",
        "recipes --copy s3://b",
    ],
)
def test_what_has_to_be_on_a_disk_is_named_as_it_was_given(words: str, tmp_path: Path) -> None:
    photo(0).save(tmp_path / "a.jpg")
    run = patchlight(*words.split(), cwd=tmp_path)
    assert run.returncode == 2
    url = next(word for word in words.split() if word.startswith("s3:"))
    assert f"patchlight: {url}: has to be on a disk of this machine" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]
