"""Folders of models: where they are, and how new ones appear whole or not at all."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupax.models.peft_format import CONFIG_NAME

# Of a repository on the hub: models, adapters and tokenizers, but not the same weights again in another layout (as
# Meta's and Mistral's) or those of checkpoints and exports. The hub's "*" goes over "/" too.
FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model*", "tiktoken.model", "merges.txt", "vocab.txt"]
LEFT_OUT = ["consolidated*", "*/*.json", "*/*.safetensors"]

# What tells the folder of a run, which has a config.json too, from one of a model.
RUN_FILES = {"metrics.jsonl", "checkpoints"}


def resolve_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the path itself, or a download from the hub.

    Raises:
        ValueError: it is neither a model folder nor can it be had from the hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / CONFIG_NAME).is_file():
            inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
            raise ValueError(f"{path} is no model folder: it has no config.json (it holds {inside})")
        return path
    if path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name_or_path)):
        raise ValueError(f"{name_or_path} is neither a model folder nor a hub id of the form 'owner/name'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=FETCHED, ignore_patterns=LEFT_OUT))
    except (OSError, ValueError) as error:  # what the hub's client raises for network, name and permission faults
        raise ValueError(f"there is no folder {name_or_path}, and the hub does not give it: {error}") from error


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give a new folder to write into, and put it in the place of `folder` when the block ends without an error.

    Raises:
        ValueError: there is something there that is no model, which would be lost.
    """
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            folder.replace(replaced / folder.name)
            partial.replace(folder)
            shutil.rmtree(replaced)
        else:
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else {folder.name}
    is_model = bool(names & {"config.json", CONFIG_NAME}) and not names & RUN_FILES
    if names and not is_model:
        raise ValueError(
            f"{folder} would be replaced by a model, but it is none: it holds {', '.join(sorted(names)[:8])}; choose "
            "another folder, which need not exist"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object, sorted."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
