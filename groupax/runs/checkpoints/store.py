"""The storage of checkpoints, in a local folder or a bucket, and the checksums of their files. Imports no jax.

A checkpoint is first written into a local folder aside. `publish` then makes it visible: by a rename, or, where there
are not renames, by uploading its checksums last; a folder without them is not a checkpoint.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.core.storage.buckets import RemoteFolder
from groupax.core.storage.folders import RECORDS, sync_to_disk
from groupax.runs.files import parsed_record

CHECKSUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
STATE = "state.json"


@dataclass(frozen=True)
class Layout:
    """The names of checkpoints."""

    prefix: str = "step_"  # start of a checkpoint's name, before its step
    num_digits: int = 6  # least number of digits of the step
    inside: str = ""  # folder within a checkpoint that has its files, if other programs' files are next to them

    def name_of(self, step: int) -> str:
        """Returns the name of a step's checkpoint folder."""
        return f"{self.prefix}{step:0{self.num_digits}d}"

    def step_of(self, name: str) -> int | None:
        """Returns the step of a checkpoint folder; None if the name is another's."""
        number = name.removeprefix(self.prefix)
        return int(number) if name.startswith(self.prefix) and number.isdigit() else None


OWN = Layout()
# Folders of transformers, each with a model and in it what a run continues from.
HF = Layout("checkpoint-", 1, RECORDS)


class LocalStore:
    """Stores checkpoints as folders in a local folder, which is created when needed.

    A folder with a name of the layout, but without the folder inside, is not a checkpoint.
    """

    is_atomic = True  # checkpoints appear at once; otherwise one without checksums was never complete

    def __init__(self, folder: Path, layout: Layout = OWN) -> None:
        self.folder, self.layout = folder.resolve(), layout

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, including damaged ones, in ascending order."""
        entries = self.folder.iterdir() if self.folder.is_dir() else []
        found = ((self.layout.step_of(entry.name), entry) for entry in entries)
        return sorted(step for step, entry in found if step is not None and (entry / self.layout.inside).is_dir())

    def where(self, step: int) -> str:
        """Returns the path of a checkpoint."""
        return str(self._place(step))

    def state(self, step: int) -> Mapping[str, Any]:
        """Returns its `state.json`; empty if that cannot be read."""
        try:
            return parsed_record((self.local(step) / STATE).read_bytes())
        except OSError:
            return {}

    def aside(self, step: int) -> Path:
        """Creates a local folder to write it into, and removes leftovers of earlier processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.iterdir():
            if entry.name.startswith(f".{self.layout.prefix}"):
                shutil.rmtree(entry)
        aside = self._aside(step) / self.layout.inside
        aside.mkdir(parents=True)
        return aside

    def publish(self, step: int) -> None:
        """Publishes the folder aside as the checkpoint, replacing one of the same step."""
        place = self._place(step)
        if place.exists():
            self.delete(step)
        self._aside(step).rename(place)
        sync_to_disk(self.folder)

    def local(self, step: int) -> Path:
        """Returns a local folder with its files, which must not be changed."""
        return self._place(step) / self.layout.inside

    def delete(self, step: int) -> None:
        """Deletes it; it is no checkpoint any more before its first file is gone."""
        hidden = self.folder / f".{self.layout.name_of(step)}.deleted"
        shutil.rmtree(hidden, ignore_errors=True)
        self._place(step).rename(hidden)
        shutil.rmtree(hidden)

    def set_aside(self, step: int) -> str:
        """Renames it to `step_N.aside`, which is not a checkpoint, and returns the new path."""
        place = self.folder / self.layout.inside / f"{self.layout.name_of(step)}.aside"
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        return str(self._place(step).rename(place))

    def sibling_folder(self, name: str) -> Path | None:
        """Returns a local folder with the files of another folder of the run; None if there is none."""
        folder = (self.folder / self.layout.inside if self.layout.inside else self.folder.parent) / name
        return folder if folder.is_dir() else None

    def _place(self, step: int) -> Path:
        return self.folder / self.layout.name_of(step)

    def _aside(self, step: int) -> Path:
        return self.folder / f".{self.layout.name_of(step)}.partial"


class RemoteStore:
    """Stores checkpoints in `checkpoints/` of a run's bucket, through a local folder, with `LocalStore`'s methods."""

    is_atomic = False

    def __init__(self, remote: RemoteFolder, scratch: Path) -> None:
        self.remote, self.scratch = remote, scratch

    def steps(self) -> list[int]:
        return sorted(step for name in self.remote.folders("checkpoints") if (step := OWN.step_of(name)) is not None)

    def where(self, step: int) -> str:
        return self.remote.url_of(_path(step))

    def state(self, step: int) -> Mapping[str, Any]:
        try:
            return parsed_record(self.remote.read(f"{_path(step)}/{STATE}"))
        except OSError:
            return {}

    def aside(self, step: int) -> Path:
        aside = self.scratch / OWN.name_of(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def publish(self, step: int) -> None:
        aside = self.scratch / OWN.name_of(step)
        if self.remote.exists(_path(step)):
            self.delete(step)
        files = [str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()]
        for name in sorted(files, key=lambda name: name == CHECKSUMS):
            self.remote.upload(aside / name, f"{_path(step)}/{name}")
        shutil.rmtree(aside)

    def local(self, step: int) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=f"{OWN.name_of(step)}.", dir=self._create_scratch()))
        self.remote.download(_path(step), folder)
        return folder

    def delete(self, step: int) -> None:
        if self.remote.exists(f"{_path(step)}/{CHECKSUMS}"):
            self.remote.delete(f"{_path(step)}/{CHECKSUMS}")
        self.remote.delete(_path(step))

    def set_aside(self, step: int) -> str:
        place = f"{_path(step)}.aside"
        if self.remote.exists(place):
            self.remote.delete(place)
        self.remote.move(_path(step), place)
        return self.remote.url_of(place)

    def sibling_folder(self, name: str) -> Path | None:
        if not self.remote.exists(name):
            return None
        self.remote.download(name, self._create_scratch() / name)
        return self.scratch / name

    def _create_scratch(self) -> Path:
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self.scratch


Store = LocalStore | RemoteStore


def _path(step: int) -> str:
    return f"checkpoints/{OWN.name_of(step)}"


def seal(folder: Path) -> None:
    """Writes the checksums of all files in the folder, and flushes everything to the disk."""
    files = _files(folder)
    sums = folder / CHECKSUMS
    sums.write_text("".join(f"{_sha256(folder / name)}  {name}\n" for name in files), encoding="utf-8")
    for name in (*files, CHECKSUMS):
        sync_to_disk(folder / name)
    for parent in {(folder / name).parent for name in files} | {folder}:
        sync_to_disk(parent)


def damage(folder: Path) -> str | None:
    """Returns what is wrong with a checkpoint: a file is missing, differs, or has no checksum. None if it is intact."""
    if not (folder / CHECKSUMS).is_file():
        return f"{CHECKSUMS} is missing: the folder was not written or copied to its end"
    expected = {}
    for line in (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        expected[name] = digest
    if STATE not in expected:
        return f"{CHECKSUMS} does not list {STATE}: it is damaged"
    found = _files(folder)
    for name, digest in expected.items():
        if name not in found:
            return f"{name} is missing"
        if _sha256(folder / name) != digest:
            return f"{name} ({(folder / name).stat().st_size} bytes) is not what was written: its checksum differs"
    unlisted = [name for name in found if name not in expected]
    return f"{CHECKSUMS} does not list {unlisted[0]}: it is damaged" if unlisted else None


def _files(folder: Path) -> list[str]:
    """Returns all files below the folder except the checksums and hidden files."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if str(path) != CHECKSUMS and not path.name.startswith("."))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
