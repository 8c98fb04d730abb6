"""Prints the lowest versions that pyproject.toml allows, for pip, or with --digest a hash of what it requires.

python dev/lowest_versions.py [--digest] EXTRA...
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
names = [name for name in sys.argv[1:] if name != "--digest"]
extras = [each for extra in names for each in project["optional-dependencies"][extra]]
requirements = list(dict.fromkeys([*project["dependencies"], *extras]))
if "--digest" in sys.argv:
    print(hashlib.sha256("\n".join([project["requires-python"], *requirements]).encode()).hexdigest())
    sys.exit()
for requirement in requirements:
    name, lowest = re.match(r"([\w.-]+).*?>=([\d.]+)", requirement).groups()  # pyright: ignore
    print(f"{name}=={lowest}" + (".*" if lowest.count(".") < 2 else ""))  # the newest patch of the lowest release
