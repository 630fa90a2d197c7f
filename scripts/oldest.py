"""Constraints for the oldest versions that pyproject.toml allows, of the core and the extras named: for matrix.sh."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [name for word in sys.argv[1:] for name in word.split(",")]
needs = project["dependencies"] + [need for name in extras for need in project["optional-dependencies"][name]]
for need in sorted(set(needs)):
    print(re.sub(r"\[.*?\]", "", need).replace(">=", "=="))
