"""One message for two readers: arguments in Python, options on the command line."""

import pytest

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
