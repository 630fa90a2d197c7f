"""What ten million photos cost, on paper: docs/scale.md says what the rates come to that other pages have."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_ten_million", ROOT / "benchmarks" / "ten_million.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def flat(text: str) -> str:
    return " ".join(text.split())


def test_every_rate_is_on_the_page_that_it_names(paper: ModuleType) -> None:
    for rate in paper.RATES.values():
        assert flat(rate.words) in flat((ROOT / rate.page).read_text())
        assert f"{rate.value:,g}" in rate.words


def test_the_table_of_the_docs_is_what_the_rates_come_to(paper: ModuleType) -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    for line in paper.table(10_000_000, 16):
        assert line in page


def test_sums_by_hand(paper: ModuleType) -> None:
    row = paper.rows(16)[0]
    assert row.fast == pytest.approx(16 / 0.0857, rel=1e-3)  # 55 and 30.7 ms of a core each
    assert paper.hours(10_000_000, row.fast) == pytest.approx(10_000_000 * 0.0857 / 16 / 3600, rel=1e-3)
    assert paper.terabytes(10_000_000, row) == pytest.approx(28)
    assert paper.gigabits(row, 100) == pytest.approx(100 * 2.8 * 8 / 1000)
    # Ten hours at 2 each, 20 million requests at 0.4 a million, and 28,000 GB at 0.01.
    assert paper.dollars(10_000_000, row, 10_000_000 / 36_000, 2, 0.4, 0.01) == pytest.approx(20 + 8 + 280)
