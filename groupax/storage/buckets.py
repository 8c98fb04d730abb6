"""A run's place in a bucket (`s3://`, `gs://`), through fsspec. Imports nothing of groupax and no jax."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}  # what to install, by protocol


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL rather than a local folder."""
    return "://" in str(path)


class Remote:
    """Files below a URL. Names are relative to it.

    Credentials and endpoint come from where the cloud's own tools take them (`AWS_*`,
    `GOOGLE_APPLICATION_CREDENTIALS`).

    Args:
        url: e.g. "s3://bucket/runs/one".

    Raises:
        ValueError: the URL's protocol is unknown, or what speaks it is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        protocol = url.partition("://")[0]
        self.url = url.rstrip("/")
        try:
            files, self.root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = f"pip install 'groupax[{EXTRAS[protocol]}]'" if protocol in EXTRAS else str(error)
            raise ValueError(f"{url} needs a package that is not installed: {extra}") from error
        except ValueError as error:
            raise ValueError(f"{url}: {error}; use a folder, s3:// or gs://") from error
        self.files: Any = files

    def url_of(self, name: str) -> str:
        """The URL of a name."""
        return f"{self.url}/{name}"

    def check(self) -> None:
        """See whether it can be written to.

        Raises:
            OSError: it cannot.
        """
        with _as_os_error(self.url):
            self.files.pipe_file(self._path(".writable"), b"")
            self.files.rm_file(self._path(".writable"))

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""
        with _as_os_error(self.url_of(name)):
            return self.files.exists(self._path(name))

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder; none if it is not there."""
        with _as_os_error(self.url_of(name)):
            try:
                entries = self.files.ls(self._path(name), detail=True)
            except FileNotFoundError:
                return []
        return [Path(entry["name"]).name for entry in entries if entry["type"] == "directory"]

    def read(self, name: str) -> bytes:
        """A file's content."""
        with _as_os_error(self.url_of(name)):
            return self.files.cat_file(self._path(name))

    def upload(self, file: Path, name: str) -> None:
        """Put a local file there."""
        with _as_os_error(self.url_of(name)):
            self.files.put_file(str(file), self._path(name))

    def download(self, name: str, folder: Path) -> None:
        """Put the files of a folder into a local one."""
        path = self._path(name)
        with _as_os_error(self.url_of(name)):
            for found in self.files.find(path):
                place = folder / str(found)[len(path) + 1 :]
                place.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(found, str(place))

    def delete(self, name: str) -> None:
        """Remove a file or a folder with all that is in it."""
        with _as_os_error(self.url_of(name)):
            self.files.rm(self._path(name), recursive=True)

    def move(self, name: str, new_name: str) -> None:
        """Copy a folder's files and remove the old ones."""
        self._move(self._path(name), self._path(new_name))

    def move_all_aside(self) -> str:
        """Move everything that is here to the first free one of `URL.1`, `URL.2`, ..., and return that."""
        with _as_os_error(self.url):
            number = 1
            while self.files.exists(f"{self.root}.{number}"):
                number += 1
        self._move(self.root, f"{self.root}.{number}")
        return f"{self.url}.{number}"

    def _move(self, old: str, new: str) -> None:
        with _as_os_error(old):
            for found in self.files.find(old):
                self.files.cp_file(found, new + str(found)[len(old) :])
            self.files.rm(old, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


@contextlib.contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Clients of clouds raise classes of their own where a disk would raise an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {type(error).__name__}: {error}") from error
