"""Model folders: how to find them, and which of their files are read; files of strangers, JSON, and atomic writes."""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from groupax.core.settings.fields import nearest

PACKAGE = Path(__file__).parents[2]  # has the recipes' models
ADAPTER_NAME = "adapter_config.json"  # marks a folder as an adapter's
RECORDS = "groupax"  # folder with a run's records in a folder that other programs write to
# Files to download from a hub repository: models, adapters and tokenizers, but not a second copy of the weights in
# another layout (Meta's, Mistral's), nor those of checkpoints and exports. The hub's "*" also matches "/".
FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model*", "tiktoken.model", "merges.txt", "vocab.txt"]
FETCHED += ["README.md"]  # states the license
LEFT_OUT = ["consolidated*", "*/*.json", "*/*.safetensors"]

MAX_JSON_BYTES = 1 << 28  # tokenizers with large vocabularies take about 40 MB
MAX_LOG_BYTES = 1 << 32  # of metrics, diagnostics and items of evaluations
# Files of a folder that are read, or copied to folders derived from the model.
READ = re.compile(r".*\.(json|safetensors|jinja|model|txt|md)|additional_chat_templates")


_HUB_ID = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@(\w[\w./-]*))?")


def split_revision(name: str) -> tuple[str, str | None]:
    """Returns the id and the revision of a hub id like "owner/name@revision"; None without a revision."""
    match = _HUB_ID.fullmatch(name)
    return (match[1], match[2]) if match else (name, None)


def at_revision(name: str, revision: str | None) -> str:
    """Returns a hub id with a revision; the name of a folder, or one that has a revision, unchanged."""
    named = f"{name}@{revision}"
    return name if not revision or Path(name).expanduser().is_dir() or not _HUB_ID.fullmatch(named) else named


def run_folder_in(folder: Path) -> Path:
    """Returns the run folder in an output folder of TRL's layout; any other folder unchanged."""
    inside = folder / RECORDS
    is_outside = (inside / "metrics.jsonl").is_file() and not (folder / "metrics.jsonl").is_file()
    return inside if is_outside else folder


def resolve_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """Returns the local folder of a model: the path itself, or a download from the hub.

    A hub id may end in "@" and a branch, tag or commit.
    """
    folder = local_folder(name_or_path)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        name, revision = split_revision(str(name_or_path))
        return Path(snapshot_download(name, revision=revision, allow_patterns=FETCHED, ignore_patterns=LEFT_OUT))
    except (OSError, ValueError) as error:  # the hub client's errors for network, name and permissions
        raise ValueError(
            f"there is no folder {name_or_path}, and it cannot be downloaded from the hub: {error}"
        ) from error


def local_folder(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Returns the folder of a model on this machine; None for a hub id, which is not looked up.

    Raises a ValueError for other names, and for a folder with a link that leads out of it.
    """
    if "\0" in str(name_or_path):
        raise ValueError(f"{str(name_or_path)!r} is neither a model folder nor a hub id: it has a null character")
    path = Path(name_or_path).expanduser().absolute()
    if path.is_dir():
        if all((path / name).is_file() for name in ("run.json", "metrics.jsonl")):
            model = path / "model"
            later = f"it has none yet; groupax checkpoints {path} export --to FOLDER writes that of its last checkpoint"
            hint = f"its model is {model}" if model.is_dir() else later
            raise ValueError(f"{path} is the folder of a run, not of a model; {hint}")
        if not (path / "config.json").is_file() and not (path / ADAPTER_NAME).is_file():
            contents = list_names(entry.name for entry in path.iterdir()) or "nothing"
            raise ValueError(f"{path} is not a model folder: it has no config.json (it contains {contents})")
        check_links(path)
        return path
    if path.exists() or not _HUB_ID.fullmatch(str(name_or_path)):
        where = whereabouts(Path(name_or_path).expanduser())
        raise ValueError(f"{name_or_path} is neither a model folder nor a hub id of the form 'owner/name'{where}")
    return None


def whereabouts(path: Path) -> str:
    """Returns the end of an error about a path that is not a folder: where it was looked for, and which one is near."""
    if path.exists():
        return "; it is a file"
    packaged = PACKAGE.parent / path
    if path.parts[:1] == (PACKAGE.name,) and packaged.is_dir():
        near = f"; did you mean {packaged}?"
    else:
        near = nearest(path.name, [each.name for each in path.parent.glob("*/")], str(path)[: -len(path.name)])
    where = "" if path.is_absolute() else f" in the working directory, {Path.cwd()}"
    return f"; there is no such folder{where}{near}"


def list_names(names: Iterable[str]) -> str:
    """Returns the first few file names for an error message, without control characters."""
    return ", ".join(name if name.isprintable() else ascii(name) for name in sorted(names)[:8])


def check_links(folder: Path) -> None:
    """Raises a ValueError for a link to a file outside of a folder, whose contents could otherwise be shown or copied.

    The hub's cache consists of links to files in `blobs` of the same repository; those are allowed.
    """
    own = folder.resolve()
    allowed = [own, (own.parents[1] / "blobs").resolve()] if own.parent.name == "snapshots" else [own]
    for entry in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if READ.fullmatch(entry.name) and entry.is_symlink():
            target = Path(os.path.realpath(entry))  # of a loop of links one of them, which cannot be opened
            if not any(target.is_relative_to(each) for each in allowed):
                raise ValueError(
                    f"{folder / entry.name} is a link out of the model's folder (to {target}); replace it by a copy of "
                    "the file, or name the folder that contains the file"
                )


def open_file(path: Path) -> BinaryIO:
    """Opens a file of a folder that somebody else may have filled; raises an OSError for pipes and devices."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Returns the content of a file (see `open_file`); raises an OSError if it has more than `max_bytes`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(content)) > max_bytes:
        raise OSError(f"{path} has {size:,} bytes; at most {max_bytes:,} are read")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises a FileNotFoundError if there is none, and a ValueError if it is no JSON object or exceeds `MAX_JSON_BYTES`.
    """
    try:
        content = json.loads(read_file(path).decode())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # ValueError also for invalid UTF-8 and numbers that are too long
        raise ValueError(f"{path} is not valid JSON: {error}; download the file again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must contain a JSON object, it contains a {type(content).__name__}; download the file again"
        )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields a hidden file to write, which takes the place of another when the block ends, and none if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # of a killed process, or a link that leads elsewhere
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Flushes a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
