import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples in every CI run; a developer's machine goes on looking for new ones.
settings.register_profile("patchlight", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("patchlight")

# Test processes share the cores already; and how a sum is divided among threads changes its last digits.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and in the processes that tests start


SLOW = Path(__file__).with_name("slow.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="Leave out what tests/slow.txt names.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        slow = tuple(line for line in SLOW.read_text().splitlines() if not line.startswith("#"))
        left_out = [item for item in items if item.nodeid.partition("[")[0].startswith(slow)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.nodeid.partition("[")[0].startswith(slow)]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)
