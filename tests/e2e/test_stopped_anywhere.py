"""A few tries of benchmarks/signals.py: signals at random moments end a command quietly, and nothing is lost."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "signals.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("signals_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses are looked for
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux says how long a thread has computed")
@pytest.mark.parametrize(("name", "tries"), [("models", 4), ("crop", 2)])
def test_signals_at_random_moments(script: ModuleType, tmp_path: Path, name: str, tries: int) -> None:
    script.make_place(tmp_path / "place", script.COMMANDS[name].words)
    _, outcome = script.attack(name, tmp_path / "place", tries=tries, seed=7, jobs=1)
    assert (outcome.aloud, outcome.torn, outcome.orphans) == ([], [], [])
    assert sum(outcome.codes.values()) == tries
    assert set(outcome.codes) <= {"own", "130", "143"}
