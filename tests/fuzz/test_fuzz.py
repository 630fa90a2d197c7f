"""A short look with a fixed seed at what fuzzing.py looks at for as long as one likes.

PATCHLIGHT_FUZZ=10 feeds ten times as many inputs, and PATCHLIGHT_FUZZ_SEED others.
"""

import gc
import os

import pytest
from fuzzing import Findings, by_chance
from hostile_inputs import TARGETS

# So that each takes about three seconds of a processor.
TIMES = {"photos": 1500, "checkpoint": 1500, "model_folder": 700, "run_folder": 500, "training_set": 1500, "http": 400}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_answered_or_refused(name: str) -> None:
    if name == "http":
        pytest.importorskip("fastapi")
        pytest.importorskip("starlette.testclient")
    if name == "training_set":
        pytest.importorskip("pyarrow")
    target, findings = TARGETS[name](), Findings()
    for seed in target.seeds:  # each is answered, and what is imported at first use is
        target.feed(seed)
    by_chance(
        target,
        findings,
        seed=int(os.environ.get("PATCHLIGHT_FUZZ_SEED", "0")),
        times=round(TIMES[name] * float(os.environ.get("PATCHLIGHT_FUZZ", "1"))),
    )
    gc.collect()  # what libraries left open is warned of here, and not in the next test
    assert not findings.kinds, "\n".join(f"{content[:200]!r}\n{said}" for content, said in findings.kinds.values())
