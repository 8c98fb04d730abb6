"""Folders of runs in buckets (`s3://`, `gs://`), through fsspec. Imports nothing of groupax and no jax."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupax.core.errors import require

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}  # groupax's extra to install, by protocol


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL rather than a local folder."""
    return "://" in str(path)


class RemoteFolder:
    """A folder at a URL such as "s3://bucket/runs/one". Names of its files are relative to it.

    Credentials and endpoint are those of the cloud's own tools (`AWS_*`, `GOOGLE_APPLICATION_CREDENTIALS`). Raises a
    ValueError if the URL's protocol is unknown, or its client not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        protocol = url.partition("://")[0]
        self.url = url.rstrip("/")
        try:
            files, self.root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            if protocol in EXTRAS:
                require(EXTRAS[protocol], url)
            raise ValueError(f"{url} needs a package that is not installed: {error}") from error
        except ValueError as error:
            raise ValueError(f"{url}: {error}; use a folder, s3:// or gs://") from error
        self.files: Any = files

    def url_of(self, name: str) -> str:
        """Returns the URL of a file or folder."""
        return f"{self.url}/{name}"

    def check(self) -> None:
        """Raises an OSError if the folder is not writable."""
        self._call("pipe_file", ".writable", b"")
        self._call("rm_file", ".writable")

    def exists(self, name: str) -> bool:
        """Returns whether there is a file or folder of that name."""
        return self._call("exists", name)

    def folders(self, name: str) -> list[str]:
        """Returns the names of a folder's subfolders; none if there is no such folder."""
        try:
            entries = self._call("ls", name, detail=True)
        except FileNotFoundError:
            return []
        return [Path(entry["name"]).name for entry in entries if entry["type"] == "directory"]

    def read(self, name: str) -> bytes:
        """Returns the contents of a file."""
        return self._call("cat_file", name)

    def upload(self, file: Path, name: str) -> None:
        """Uploads a local file."""
        with _as_os_error(self.url_of(name)):
            self.files.put_file(str(file), f"{self.root}/{name}")

    def download(self, name: str, folder: Path) -> None:
        """Downloads the files of a folder into a local one."""
        with _as_os_error(self.url_of(name)):
            for found in self.files.find(f"{self.root}/{name}"):
                target = folder / str(found)[len(f"{self.root}/{name}/") :]
                target.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(found, str(target))

    def delete(self, name: str) -> None:
        """Removes a file, or a folder with its contents."""
        self._call("rm", name, recursive=True)

    def move(self, name: str, new_name: str) -> None:
        """Moves a folder, by copying its files and removing the old ones."""
        self._move(f"{self.root}/{name}", f"{self.root}/{new_name}")

    def move_all_aside(self) -> str:
        """Moves the folder to the first free URL of `URL.1`, `URL.2`, ..., and returns that URL."""
        with _as_os_error(self.url):
            number = next(each for each in itertools.count(1) if not self.files.exists(f"{self.root}.{each}"))
        self._move(self.root, f"{self.root}.{number}")
        return f"{self.url}.{number}"

    def _move(self, old: str, new: str) -> None:
        with _as_os_error(old):
            for found in self.files.find(old):
                self.files.cp_file(found, new + str(found)[len(old) :])
            self.files.rm(old, recursive=True)

    def _call(self, method: str, name: str, *args: Any, **options: Any) -> Any:
        with _as_os_error(self.url_of(name)):
            return getattr(self.files, method)(f"{self.root}/{name}", *args, **options)


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Turns the exceptions of cloud clients into OSError, which a disk would raise."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error
