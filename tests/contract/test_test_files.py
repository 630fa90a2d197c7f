"""Files of tests have names of their own: pytest imports them by name alone. What is left out as slow is there."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_of_tests_have_one_name() -> None:
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_what_is_listed_as_slow_is_there() -> None:
    listed = [line for line in (TESTS / "slow.txt").read_text().splitlines() if not line.startswith("#")]
    for name in listed:
        file, _, test = name.partition("::")
        path = TESTS.parent / file
        assert path.exists(), name
        assert not test or f"def {test.rpartition('::')[2]}(" in path.read_text(), name
