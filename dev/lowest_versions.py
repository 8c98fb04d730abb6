"""Prints the lowest versions that pyproject.toml allows, for pip: python dev/lowest_versions.py EXTRA..."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [each for extra in sys.argv[1:] for each in project["optional-dependencies"][extra]]
for requirement in dict.fromkeys([*project["dependencies"], *extras]):
    name, lowest = re.match(r"([\w.-]+).*?>=([\d.]+)", requirement).groups()  # pyright: ignore
    print(f"{name}=={lowest}" + (".*" if lowest.count(".") < 2 else ""))  # the newest patch of the lowest release
