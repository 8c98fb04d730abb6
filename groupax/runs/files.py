"""Operations on the files of run folders. Imports no jax."""

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from groupax.runs.metrics_file import NAME
from groupax.storage.buckets import RemoteFolder


def has_results(folder: Path) -> bool:
    """Returns whether the run in a folder completed a step or saved anything."""
    metrics = folder / NAME
    if not metrics.is_file():
        return False
    return metrics.stat().st_size > 0 or (folder / "model").exists() or any((folder / "checkpoints").glob("step_*"))


def complete_run(uri: str, num_steps: int) -> str:
    """Returns a text that the run in a folder is complete, with what to do to train on."""
    return (
        f"the run in {uri} is complete, with {num_steps} steps; to train on, set a larger max_steps (groupax resume "
        f"{uri} --max_steps {2 * num_steps}); for a new run, set resume='never' or another output_dir"
    )


def free_name(path: Path) -> Path:
    """Returns the first of `path.1`, `path.2`, ... that does not exist."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")


@contextlib.contextmanager
def refusing_unwritable(output_dir: str) -> Iterator[None]:
    """Turns an OSError of its block into a ValueError that refuses `output_dir`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"output_dir {output_dir} cannot be written to ({error}); choose another") from error


def check_writable(folder: Path) -> None:
    """Checks that files can be written in the folder, or in the one that would be created. Leaves nothing behind.

    Raises:
        OSError: They cannot be written.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # another run has started in it
                path.rmdir()


def parsed_record(text: bytes) -> Mapping[str, Any]:
    """Returns a record of an earlier process; empty if it is damaged."""
    try:
        content = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def append_text(path: Path, text: str) -> None:
    """Appends to a file, which is as it was if that fails.

    Raises:
        OSError: It cannot be written.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        size, num_written = file.tell(), 0
        try:
            while num_written < len(data):
                num_written += file.write(data[num_written:])
        except OSError:
            file.truncate(size)
            raise


def upload_changes(folder: Path, remote: RemoteFolder, uploaded: dict[str, tuple[int, int]]) -> None:
    """Uploads new and changed files except checkpoints, and deletes removed rollouts.

    Args:
        folder: The local folder.
        remote: The folder in the bucket.
        uploaded: Size and time of each uploaded file by name; updated.

    Raises:
        OSError: The bucket cannot be written to.
    """
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if not file.is_file() or name.startswith(("checkpoints/", "states/", "calls/", ".")) or "/." in name:
            continue
        stat = file.stat()
        version = (stat.st_size, stat.st_mtime_ns)
        if uploaded.get(name) != version:
            remote.upload(file, name)
            uploaded[name] = version
    for name in [name for name in uploaded if name.startswith("rollouts/") and not (folder / name).exists()]:
        remote.delete(name)
        del uploaded[name]
