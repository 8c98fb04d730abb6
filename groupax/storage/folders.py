"""Folders of models: where they are, and the JSON files in them."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ADAPTER_NAME = "adapter_config.json"  # of a folder with an adapter
# Of a repository on the hub: models, adapters and tokenizers, but not the same weights again in another layout (as
# Meta's and Mistral's) or those of checkpoints and exports. The hub's "*" goes over "/" too.
FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model*", "tiktoken.model", "merges.txt", "vocab.txt"]
FETCHED += ["README.md"]  # for its licence
LEFT_OUT = ["consolidated*", "*/*.json", "*/*.safetensors"]

MAX_JSON_BYTES = 1 << 28  # tokenizers of large vocabularies have some 40 MB
# The files of a folder that are read, or copied to what is made of the model.
READ = re.compile(r".*\.(json|safetensors|jinja|model|txt|md)|additional_chat_templates")


def resolve_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the path itself, or a download from the hub.

    Raises:
        ValueError: it is neither a model folder nor can it be had from the hub, or links lead out of it.
    """
    if "\0" in str(name_or_path):
        raise ValueError(f"{str(name_or_path)!r} is neither a model folder nor a hub id: it has a null character")
    path = Path(name_or_path).expanduser().absolute()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / ADAPTER_NAME).is_file():
            inside = list_names(entry.name for entry in path.iterdir()) or "nothing"
            raise ValueError(f"{path} is no model folder: it has no config.json (it holds {inside})")
        check_links(path)
        return path
    if path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name_or_path)):
        raise ValueError(f"{name_or_path} is neither a model folder nor a hub id of the form 'owner/name'")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=FETCHED, ignore_patterns=LEFT_OUT))
    except (OSError, ValueError) as error:  # what the hub's client raises for network, name and permission faults
        raise ValueError(f"there is no folder {name_or_path}, and the hub does not give it: {error}") from error


def list_names(names: Iterable[str]) -> str:
    """The first names of files, as an error shows them: without control characters."""
    return ", ".join(name if name.isprintable() else ascii(name) for name in sorted(names)[:8])


def check_links(folder: Path) -> None:
    """Refuses a folder in which a link stands for a file outside of it, of which parts could be told or copied.

    The hub's cache consists of links to files in the same repository's `blobs`, which may stay.

    Raises:
        ValueError: a link leads out of the folder.
    """
    own = folder.resolve()
    allowed = [own, (own.parents[1] / "blobs").resolve()] if own.parent.name == "snapshots" else [own]
    for entry in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if READ.fullmatch(entry.name) and entry.is_symlink():
            target = entry.resolve()
            if not any(target.is_relative_to(each) for each in allowed):
                raise ValueError(
                    f"{folder / entry.name} is a link out of the model's folder (to {target}); put a copy of the file "
                    "in its place, or name the folder that holds it"
                )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file holds something else, or is larger than any file of a model's settings.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, settings at most {MAX_JSON_BYTES:,}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError also where it is not UTF-8, or a number too long
        raise ValueError(
            f"{path} is not valid JSON: {error}; get the file anew from where the model is from"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold a JSON object, it holds a {type(content).__name__}; get the file anew from where the "
            "model is from"
        )
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object, sorted."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
