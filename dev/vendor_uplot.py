"""Fetch the chart library of `groupax view` from the npm registry: `python dev/vendor_uplot.py VERSION`.

Its built files and its licence come to groupax/satellites/view/static/vendor, with their version and hashes in
uPlot.json. Without a version, the recorded one is fetched again, and it is an error if it is not what was recorded.
Needs npm.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from hashlib import sha256
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "groupax" / "satellites" / "view" / "static" / "vendor"
RECORD = VENDOR / "uPlot.json"
FILES = {  # in the package: here
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "uPlot.LICENSE",
}


def fetched(version: str) -> dict[str, bytes]:
    """The files of a version, by their names here."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"uplot@{version}"], cwd=folder, check=True)
        [package] = Path(folder).glob("*.tgz")
        with tarfile.open(package) as archive:
            members = {name: archive.extractfile(path) for path, name in FILES.items()}
            return {name: member.read() for name, member in members.items() if member is not None}


def main() -> None:
    """Fetch the version that is asked for, or check the one that is recorded."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    version = sys.argv[1] if len(sys.argv) > 1 else recorded["version"]
    files = fetched(version)
    hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
    if version == recorded.get("version") and hashes != recorded["sha256"]:
        raise SystemExit(f"uplot {version} is not what was recorded: {hashes} instead of {recorded['sha256']}")
    for name, content in files.items():
        (VENDOR / name).write_bytes(content)
    RECORD.write_text(json.dumps({"package": "uplot", "version": version, "sha256": hashes}, indent=2) + "\n")
    print(f"uplot {version}: {', '.join(files)}")


if __name__ == "__main__":
    main()
