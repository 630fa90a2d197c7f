"""Tables in a terminal."""

from collections.abc import Sequence
from typing import Literal


def print_rows(
    rows: Sequence[tuple[str, ...]], headings: Sequence[str] = (), justify: Literal["left", "right"] = "left"
) -> None:
    """A table as wide as it needs to be: a narrow terminal wraps its lines, and no number is cut off."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=bool(headings), padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings or rows[0]):
        table.add_column(heading, justify=justify if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # a name in brackets is a name, not markup
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(width=max(console.width, needed)).print(table)
