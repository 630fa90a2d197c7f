"""What comes in with the core asks nothing of whoever uses it; and the bill of materials that a wheel gets."""

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("supply_chain", ROOT / "scripts" / "supply_chain.py")
assert SPEC is not None
assert SPEC.loader is not None
supply_chain = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(supply_chain)


def test_licences_of_the_core() -> None:
    packages, absent = supply_chain.needed(supply_chain.project()["dependencies"])
    # Those for CUDA, which come from one maker, and only where torch was installed with it.
    packages = {name: each for name, each in packages.items() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert {"torch", "numpy", "pillow", "tqdm"} <= packages.keys()
    assert [name for name in absent if not name.startswith(("nvidia-", "cuda-", "triton"))] == []
    licences = {name: supply_chain.licence_of(each) for name, each in packages.items()}
    assert {name: each for name, each in licences.items() if not supply_chain.is_allowed(each)} == {}


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MIT AND (Apache-2.0 WITH LLVM-exception)", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("unknown", False),
    ],
)
def test_which_licences_are_allowed(licence: str, allowed: bool) -> None:
    assert supply_chain.is_allowed(licence) == allowed


def test_the_bill_of_a_wheel(tmp_path: Path) -> None:
    """In place of Patchlight's a package that is surely installed from a wheel."""
    wheel = tmp_path / "rich-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x", "x")
    bill: dict[str, Any] = supply_chain.bill_of(wheel)
    assert bill == supply_chain.bill_of(wheel)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    refs = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {each["name"] for each in bill["components"]} >= {"pygments", "markdown-it-py", "mdurl"}
    for each in bill["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= refs
    assert supply_chain.sbom(wheel) == 0
    assert json.loads((tmp_path / "rich-0-py3-none-any.cdx.json").read_text()) == bill


def test_a_line_has_the_hash_of_its_file() -> None:
    """Of pip's report, which also has the project itself."""
    file = {"download_info": {"archive_info": {"hashes": {"sha256": "ab" * 32}}}}
    names = {"typing_extensions": "4.1", "Flask": "3", "patchlight": "0.2.0"}
    report = {"install": [file | {"metadata": {"name": name, "version": number}} for name, number in names.items()]}
    lines = list(supply_chain.hashed_lines(report))
    assert lines == [f"flask==3 --hash=sha256:{'ab' * 32}", f"typing-extensions==4.1 --hash=sha256:{'ab' * 32}"]


def test_the_hashed_versions_are_those_of_the_constraints() -> None:
    pins = dict(line.lower().replace("_", "-").split("==") for line in pinned(ROOT / "constraints.txt"))
    hashed = {}
    for line in pinned(ROOT / "requirements-tests.txt"):
        pin, digest = line.split(" --hash=sha256:")
        assert len(digest) == 64
        name, version = pin.split("==")
        hashed[name] = version
    missing = pins.keys() - hashed.keys()
    assert not missing, f"python scripts/supply_chain.py hashes (for {missing})"
    assert {name: hashed[name] for name in pins} == pins, "python scripts/supply_chain.py hashes"


def pinned(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_an_audit_that_cannot_ask_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Done:
        stdout, stderr = "", "Traceback\nConnectionError: no route to host\n"

    monkeypatch.setattr(supply_chain.subprocess, "run", lambda *given, **named: Done)
    assert supply_chain.audit() == 0
    assert "nothing is known: ConnectionError: no route to host" in capsys.readouterr().err
    known = {
        "dependencies": [{"name": "x", "version": "1", "vulns": [{"id": "PYSEC-1"}]}, {"name": "y", "version": "2"}]
    }
    Done.stdout = json.dumps(known)
    assert supply_chain.audit() == 1
    assert "x 1: PYSEC-1" in capsys.readouterr().out
    assert sys.modules.get("supply_chain") is None
