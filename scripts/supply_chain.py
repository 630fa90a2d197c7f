"""What comes with Patchlight: licences, an SBOM, known vulnerabilities, and hashes of what the tests install.

python scripts/supply_chain.py licences            of all that the core and each extra bring, as installed here
python scripts/supply_chain.py sbom WHEEL          CycloneDX beside the wheel, of the environment that runs this
python scripts/supply_chain.py audit               constraints.txt by pip-audit, which asks a service for it
python scripts/supply_chain.py hashes              writes requirements-tests.txt from constraints.txt, by pip
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
HASHED = ROOT / "requirements-tests.txt"
SERVICE_SECONDS = 300

ALLOWED = frozenset(
    (
        *("0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "HPND", "ISC"),
        *("LLVM-exception", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
    )
)
"""What may come in with the core: it asks nothing of whoever uses it, or (MPL) of changes to its own files alone."""

_SPELT = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "3-clause bsd license": "BSD-3-Clause",
    "apache software license": "Apache-2.0",
    "bsd license": "BSD",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}


def licence_of(package: Distribution) -> str:
    """As SPDX spells it, where the package says it in a form that is known; else what it says, or "unknown"."""
    about = package.metadata
    said = about.get("License-Expression")
    if said is None:
        classified = [
            line.split("::")[-1].strip() for line in about.get_all("Classifier") or [] if "License ::" in line
        ]
        free = (about.get("License") or "").strip().partition("\n")[0]
        said = " AND ".join(_SPELT.get(each.lower(), each) for each in classified) or free or "unknown"
    return _SPELT.get(said.lower(), said)


def is_allowed(licence: str) -> bool:
    """Whether all parts of it are; of alternatives, whether one is."""
    if " OR " in licence and " AND " not in licence:
        return any(is_allowed(each.strip(" ()")) for each in licence.split(" OR "))
    return all(
        word in ALLOWED for word in re.split(r"\s+(?:AND|OR|WITH)\s+", licence.replace("(", "").replace(")", ""))
    )


def needed(names: Iterable[str]) -> tuple[dict[str, Distribution], list[str]]:
    """All that these requirements bring in, by name, as installed here; and what is not."""
    found: dict[str, Distribution] = {}
    absent: list[str] = []
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found[name] = package = distribution(name)
            except PackageNotFoundError:
                absent.append(name)
                break
            for line in package.requires or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)
    return found, absent


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


def licences() -> int:
    about = project()
    core, absent = needed(about["dependencies"])
    wrong = _print_licences("core", core, absent)
    for extra, names in about["optional-dependencies"].items():
        more, absent = needed(names)
        _print_licences(extra, {name: each for name, each in more.items() if name not in core}, absent)
    for name in wrong:
        print(f"{name} comes in with the core, and its licence is not among those allowed", file=sys.stderr)
    return 1 if wrong else 0


def _print_licences(part: str, packages: dict[str, Distribution], absent: list[str]) -> list[str]:
    """Those that the core may not bring."""
    print(f"{part}: {len(packages)} packages")
    for name, package in sorted(packages.items()):
        print(f"  {name} {package.version}: {licence_of(package)}")
    if absent:
        print(f"  not installed here: {', '.join(sorted(set(absent)))}")
    return [name for name, package in packages.items() if not is_allowed(licence_of(package))]


def bill_of(wheel: Path) -> dict[str, Any]:
    """The SBOM of a wheel that is installed here with what its core brings, in CycloneDX 1.6.

    Nothing in it is of this hour: the same wheel and packages make the same bill.
    """
    content = wheel.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    name, version = wheel.name.split("-")[:2]
    packages, _ = needed([name])
    own = packages.pop(canonicalize_name(name))

    def component(key: str, package: Distribution) -> dict[str, Any]:
        purl, licence = f"pkg:pypi/{key}@{package.version}", licence_of(package)
        kind = {"expression": licence} if is_allowed(licence) and licence != "BSD" else {"license": {"name": licence}}
        about = {"type": "library", "bom-ref": purl, "name": key, "version": package.version, "purl": purl}
        return about | {"licenses": [kind]}

    def below(package: Distribution) -> Iterator[str]:
        for line in package.requires or ():
            inner = Requirement(line)
            key = canonicalize_name(inner.name)
            if key in packages and (inner.marker is None or inner.marker.evaluate({"extra": ""})):
                yield f"pkg:pypi/{key}@{packages[key].version}"

    everything = [(canonicalize_name(name), own), *sorted(packages.items())]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "component": component(canonicalize_name(name), own)
            | {"version": version, "hashes": [{"alg": "SHA-256", "content": digest}]}
        },
        "components": [component(key, package) for key, package in sorted(packages.items())],
        "dependencies": [
            {"ref": f"pkg:pypi/{key}@{package.version}", "dependsOn": sorted(set(below(package)))}
            for key, package in everything
        ],
    }


def sbom(wheel: Path) -> int:
    out = wheel.with_suffix(".cdx.json")
    out.write_text(json.dumps(bill_of(wheel), indent=2) + "\n")
    print(out)
    return 0


def audit() -> int:
    """1 where something is known to be vulnerable; 0 where nothing is, or the service cannot be asked."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text(CONSTRAINTS.read_text())
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        try:
            done = subprocess.run(
                [*command, "--format", "json", "-r", str(pins)],
                capture_output=True,
                text=True,
                timeout=SERVICE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            print("audit: nothing is known: the service did not answer", file=sys.stderr)
            return 0
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError):
        reason = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1][:200]
        print(f"audit: nothing is known: {reason}", file=sys.stderr)
        return 0
    known = [(each["name"], each["version"], hole["id"]) for each in found for hole in each.get("vulns", ())]
    for name, version, number in known:
        print(f"{name} {version}: {number}")
    skipped = sum("skip_reason" in each for each in found)
    print(f"{len(found)} packages, {skipped} of them not known to the service, {len(known)} known vulnerabilities")
    return 1 if known else 0


def hashed_lines(report: dict[str, Any]) -> Iterator[str]:
    """What pip would install, a line each, with the hash of the very file."""
    for each in sorted(report["install"], key=lambda each: canonicalize_name(each["metadata"]["name"])):
        name, version = canonicalize_name(each["metadata"]["name"]), each["metadata"]["version"]
        if name != "patchlight":
            yield f"{name}=={version} --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}"


def _resolved(*what: str) -> dict[str, Any]:
    """What pip would install, and from which files."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", "--isolated", *options, *what], check=True)
        return json.loads(report.read_text())  # type: ignore[no-any-return]


def hashes() -> int:
    """From PyPI alone, whatever else this machine's pip looks into. The pins are taken as they are; what torch and the
    build need besides, such as CUDA's libraries, pip finds."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text("".join(line for line in CONSTRAINTS.open() if not line.startswith("torch==")))
        lines = sorted(
            {
                *hashed_lines(_resolved("--no-deps", "-r", str(pins))),
                *hashed_lines(_resolved("-c", str(CONSTRAINTS), "torch", "hatchling")),
            }
        )
    platform = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}"
    HASHED.write_text(
        f"# What the tests install, by the hash of each file: for {platform}, x86-64.\n"
        "# pip install --require-hashes --no-deps -r requirements-tests.txt && pip install --no-deps "
        "--no-build-isolation -e .\n"
        "# Written by `python scripts/supply_chain.py hashes` from constraints.txt.\n" + "\n".join(lines) + "\n"
    )
    print(f"{HASHED.name}: {len(lines)} packages")
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["licences"]:
            return licences()
        case ["sbom", wheel]:
            return sbom(Path(wheel))
        case ["audit"]:
            return audit()
        case ["hashes"]:
            return hashes()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
