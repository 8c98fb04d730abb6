"""Where checkpoints lie: a local folder, or a bucket. Imports no jax.

A checkpoint is written aside, in a local folder. `publish` makes it one: by a rename, or, where there are no renames,
by uploading its checksums last. Without them it does not count.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupax.runs.checkpoints.files import CHECKSUMS, STATE, sync_to_disk
from groupax.storage.buckets import RemoteFolder

PREFIX = "step_"


@runtime_checkable
class Store(Protocol):
    """The checkpoints of a run, by step.

    Attributes:
        is_atomic: a checkpoint appears whole or not at all; otherwise one without checksums was never whole.
    """

    is_atomic: bool

    def steps(self) -> list[int]:
        """Of all checkpoints, damaged ones included, ascending."""
        ...

    def where(self, step: int) -> str:
        """What to call its place."""
        ...

    def state(self, step: int) -> Mapping[str, Any]:
        """Its `state.json`; empty if that cannot be read."""
        ...

    def aside(self, step: int) -> Path:
        """A new local folder to write it into."""
        ...

    def publish(self, step: int) -> None:
        """What was written aside becomes the checkpoint, in the place of one of that step that is there."""
        ...

    def local(self, step: int) -> Path:
        """A local folder with its files, to be read only."""
        ...

    def delete(self, step: int) -> None:
        """Remove it."""
        ...

    def set_aside(self, step: int) -> str:
        """Give it a name under which it does not count any more, and return that."""
        ...

    def free_bytes(self) -> int:
        """Room for what is written aside."""
        ...

    def beside(self, name: str) -> Path | None:
        """A local folder with the files of another folder of the run; None if there is none."""
        ...


def name_of(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"{PREFIX}{step:06d}"


def _step_of(name: str) -> int | None:
    number = name.removeprefix(PREFIX)
    return int(number) if name.startswith(PREFIX) and number.isdigit() else None


def _parsed(text: str | bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:  # also of bytes that are no text
        return {}
    return content if isinstance(content, dict) else {}


class LocalStore:
    """Checkpoints as folders in a folder, which is made when it is needed."""

    is_atomic = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def steps(self) -> list[int]:
        """Of all checkpoints, damaged ones included, ascending."""
        entries = self.folder.iterdir() if self.folder.is_dir() else []
        return sorted(step for entry in entries if (step := _step_of(entry.name)) is not None)

    def where(self, step: int) -> str:
        """The folder."""
        return str(self.folder / name_of(step))

    def state(self, step: int) -> Mapping[str, Any]:
        """Its `state.json`; empty if that cannot be read."""
        try:
            return _parsed((self.folder / name_of(step) / STATE).read_bytes())
        except OSError:
            return {}

    def aside(self, step: int) -> Path:
        """A new hidden folder beside the checkpoints; what an earlier process left there is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_hidden()
        aside = self._aside(step)
        aside.mkdir()
        return aside

    def publish(self, step: int) -> None:
        """Rename what was written aside."""
        place = self.folder / name_of(step)
        if place.exists():
            self.delete(step)
        self._aside(step).rename(place)
        sync_to_disk(self.folder)

    def local(self, step: int) -> Path:
        """The folder itself."""
        return self.folder / name_of(step)

    def delete(self, step: int) -> None:
        """Remove it; it stops to count before the first file is gone."""
        hidden = self.folder / f".{name_of(step)}.deleted"
        shutil.rmtree(hidden, ignore_errors=True)
        (self.folder / name_of(step)).rename(hidden)
        shutil.rmtree(hidden)

    def set_aside(self, step: int) -> str:
        """Rename it to `step_N.aside`, in the place of an earlier one of that name."""
        place = self.folder / f"{name_of(step)}.aside"
        shutil.rmtree(place, ignore_errors=True)
        return str((self.folder / name_of(step)).rename(place))

    def free_bytes(self) -> int:
        """Of the folder's disk."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def beside(self, name: str) -> Path | None:
        """The folder itself."""
        folder = self.folder.parent / name
        return folder if folder.is_dir() else None

    def _aside(self, step: int) -> Path:
        return self.folder / f".{name_of(step)}.partial"

    def _remove_hidden(self) -> None:
        for entry in self.folder.iterdir():
            if entry.name.startswith(f".{PREFIX}"):
                shutil.rmtree(entry)


class RemoteStore:
    """Checkpoints in a bucket; they pass through a local folder both ways.

    Args:
        remote: the run's place in the bucket; checkpoints lie in its `checkpoints/`.
        scratch: the local folder.
    """

    is_atomic = False

    def __init__(self, remote: RemoteFolder, scratch: Path) -> None:
        self.remote, self.scratch = remote, scratch

    def steps(self) -> list[int]:
        """Of all checkpoints, damaged ones included, ascending."""
        return sorted(step for name in self.remote.folders("checkpoints") if (step := _step_of(name)) is not None)

    def where(self, step: int) -> str:
        """The URL."""
        return self.remote.url_of(_path(step))

    def state(self, step: int) -> Mapping[str, Any]:
        """Its `state.json`; empty if that cannot be read."""
        try:
            return _parsed(self.remote.read(f"{_path(step)}/{STATE}"))
        except OSError:
            return {}

    def aside(self, step: int) -> Path:
        """A new folder in the scratch folder."""
        aside = self.scratch / name_of(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def publish(self, step: int) -> None:
        """Upload what was written aside, its checksums last, and remove it here."""
        aside = self.scratch / name_of(step)
        if self.remote.exists(_path(step)):
            self.delete(step)
        files = [str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()]
        for name in sorted(files, key=lambda name: name == CHECKSUMS):
            self.remote.upload(aside / name, f"{_path(step)}/{name}")
        shutil.rmtree(aside)

    def local(self, step: int) -> Path:
        """A download of it."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name_of(step)}.", dir=self._made_scratch()))
        self.remote.download(_path(step), folder)
        return folder

    def delete(self, step: int) -> None:
        """Remove it; it stops to count before anything else is gone."""
        if self.remote.exists(f"{_path(step)}/{CHECKSUMS}"):
            self.remote.delete(f"{_path(step)}/{CHECKSUMS}")
        self.remote.delete(_path(step))

    def set_aside(self, step: int) -> str:
        """Move it to `step_N.aside`, in the place of an earlier one of that name."""
        place = f"{_path(step)}.aside"
        if self.remote.exists(place):
            self.remote.delete(place)
        self.remote.move(_path(step), place)
        return self.remote.url_of(place)

    def free_bytes(self) -> int:
        """Of the scratch folder's disk."""
        return shutil.disk_usage(self._made_scratch()).free

    def beside(self, name: str) -> Path | None:
        """A download of it."""
        if not self.remote.exists(name):
            return None
        self.remote.download(name, self._made_scratch() / name)
        return self.scratch / name

    def _made_scratch(self) -> Path:
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self.scratch


def _path(step: int) -> str:
    return f"checkpoints/{name_of(step)}"
