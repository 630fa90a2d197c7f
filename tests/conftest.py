import os

import pytest
import torch
from hypothesis import settings

# The same examples in every CI run; a developer's machine goes on looking for new ones.
settings.register_profile("patchlight", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("patchlight")

# Test processes share the cores already; and how a sum is divided among threads changes its last digits.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)
