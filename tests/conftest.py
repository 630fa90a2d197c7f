import os

import pytest
import torch
from hypothesis import settings

# The same examples in every CI run; a developer's machine goes on looking for new ones.
settings.register_profile("patchlight", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("patchlight")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores already


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)
