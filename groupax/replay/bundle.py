"""Bundles: one step of a run with all that a replay of it needs, as a file that can be sent.

    bundle.json            what this is, and what is not in it
    rows.jsonl             the rows of the dataset that the step visited, and the one with the longest prompt; images
                           are PNG files in data: URLs
    run/                   of the run's folder: settings, machine, metrics, digests, completions, answers of tools
    state/                 weights and optimizer state before the step's rollout, if included
    after.safetensors      weights after the step, if the state is included
    model/                 the model that the run started from, if included
    sha256.json            digests of all of these, as a file may be damaged on its way

The file is a tar archive, compressed with zstandard. Arrays are safetensors, everything else is JSON or Parquet: a
bundle contains no code. It comes from somebody else, so only regular files with these names are unpacked, into a new
folder and up to a number of bytes, and their content must have the types that are declared here. Imports no jax.
"""

import dataclasses
import hashlib
import io
import json
import math
import re
import tarfile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from groupax.objective.entropy import EntropyState
from groupax.rollouts.state import Cursor
from groupax.runs.checkpoints import choose
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.runs.checkpoints.store import STATE
from groupax.runs.files import parsed_record
from groupax.settings.compute import Checkpointing
from groupax.storage.folders import read_file
from groupax.training.packing import Shape

FORMAT = 2
MAX_FILES = 10_000
MAX_DEPTH = 64  # of JSON; messages with tools' schemas have about ten levels
CHUNK_BYTES = 2**20
TREES = ("params", "optimizer", "reference", "policies")  # arrays of a state
SUMS = "sha256.json"
# Names in an archive, in the order in which they are packed. They fit in a header, which holds 100 characters.
NAMES = (
    r"bundle\.json",
    r"rows\.jsonl",
    r"after\.safetensors",
    r"run/(config|run|command)\.json",
    r"run/(record|metrics|diagnostics)\.jsonl",
    r"run/rollouts/step_\d{6,12}\.parquet",
    r"run/calls/rollout_\d{6,12}\.\d{1,6}\.jsonl",
    r"state/state\.json",
    rf"state/({'|'.join(TREES)})\.safetensors",
    r"(run/tokenizer|model)/\w[\w.-]{0,71}\.(json|safetensors|txt|model|jinja)",
    r"sha256\.json",
)
_KNOWN = re.compile("|".join(f"(?:{name})" for name in NAMES), re.ASCII)


class RecordedTool(TypedDict):
    """A tool of the run: its schema, its time limit, and its kind."""

    schema: dict[str, Any]
    is_async: bool
    parallel: bool
    timeout_s: float | None
    opens: bool


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `bundle.json`.

    Attributes:
        format: Version of bundles.
        groupax: Version of groupax.
        step: The step.
        start: Number of steps before the state that a replay starts from.
        run: Path of the run folder on the machine that made the bundle, or its URL.
        model: Folder or hub id of the model that the run started from; empty for one made in memory.
        num_steps: Number of optimizer steps of the run.
        num_examples: Number of rows of its dataset.
        visits: Index in `rows.jsonl` by the position in the run's order of prompts.
        rewards: Names of the reward functions.
        tools: The tools.
        identity: Everything that identifies the run (see `fingerprint`).
        includes: Parts that are in the bundle.
        plays: Whether completions can be sampled without code of the run: no environments, programs or functions that
            sample.
    """

    format: int
    groupax: str
    step: int
    start: int
    run: str
    model: str
    num_steps: int
    num_examples: int
    visits: dict[str, int]
    rewards: list[str]
    tools: list[RecordedTool]
    identity: Identity
    includes: list[str]
    plays: bool

    @property
    def origin(self) -> str:
        """The name of the model that the run started from, in quotes."""
        return f"{self.model!r:.200}" if self.model else "one made in memory"


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of an unpacked bundle.

    Raises:
        ValueError: It is not one of this version, or is damaged.
    """
    content = plain_json(read_file(folder / "bundle.json"), "bundle.json")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        version = content.get("groupax") if isinstance(content, dict) else None
        raise ValueError(f"the bundle was written by groupax {version!r:.40}, and this groupax reads format {FORMAT}")
    _check("bundle.json", content, get_type_hints(Manifest) | {"identity": dict[str, Any]})
    meanings = {
        "visits": all(map(str.isdecimal, content["visits"])),
        "tools": all(map(_is_tool, content["tools"])),
        "identity": isinstance(content["identity"].get("adapter"), dict | None),
    }
    for name, is_right in meanings.items():
        if not is_right:
            raise ValueError(f"bundle.json is damaged: {name} is {content[name]!r:.60}")
    return Manifest(**{each.name: content[each.name] for each in dataclasses.fields(Manifest)})


def _is_tool(tool: RecordedTool) -> bool:
    function, limit = tool["schema"].get("function"), tool["timeout_s"]
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and name != "" and (limit is None or (math.isfinite(limit) and limit > 0))


class _Learner(TypedDict):
    num_updates: int
    entropy: EntropyState
    shapes: list[Shape]
    shapes_of: list[Any]
    checkpointing: Checkpointing


class _Learners(TypedDict):
    adapters: dict[str, _Learner]


class _PolicyVersion(TypedDict):
    rollout: int
    version: int


class _Log(TypedDict):
    history: list[dict[str, float]]
    diagnosed: list[str]
    window: list[dict[str, float]]
    last: dict[str, float]
    evaluated: dict[str, float]
    num_sampled_tokens: float
    rollout_s: float
    train_seconds: float


class _State(TypedDict):
    """The content of `state.json` between two rollouts, besides its identity and its format."""

    step: int
    cursor: Cursor
    learner: _Learner | _Learners
    rollout: None
    policies: list[_PolicyVersion]
    versions: dict[str, Any]
    devices: dict[str, Any]
    model: dict[str, Any]
    metrics: dict[str, float]
    metrics_bytes: int
    log: _Log


def check_state(folder: Path, manifest: Manifest) -> None:
    """Checks that a folder has the `state.json` of the run that a manifest describes, between two rollouts.

    Raises:
        ValueError: It has another one, or a damaged one.
    """
    name = f"{folder.name}/{STATE}"
    content = plain_json(read_file(folder / STATE), name)
    if not isinstance(content, dict) or content.get("identity") != manifest.identity:
        raise ValueError(f"{name} of the bundle is damaged: it is not of the run that bundle.json describes")
    if content.get("format") != choose.FORMAT:
        raise ValueError(
            f"{name} of the bundle has format {content.get('format')!r:.40}, and this groupax reads {choose.FORMAT}"
        )
    _check(f"{name} of the bundle", content, get_type_hints(_State))
    steps = content["step"], content["cursor"]["step"]
    if steps != (manifest.start, manifest.start):
        raise ValueError(
            f"{name} of the bundle is damaged: it is of steps {steps}, and bundle.json says {manifest.start}"
        )


def _check(name: str, content: dict[str, Any], kinds: dict[str, Any]) -> None:
    for entry, kind in kinds.items():
        if not fits(content.get(entry), kind):
            raise ValueError(f"{name} is damaged: {entry} is {content.get(entry)!r:.60}")


def fits(value: Any, kind: Any) -> bool:
    """Returns whether a value of JSON has a type.

    An `int` is a count that floats hold exactly, and tuples are lists, none of them empty. Dataclasses and typed dicts
    are mappings with exactly their fields.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if kind is int:
        return type(value) is int and 0 <= value < 2**53
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) < 2**53)
    if kind in (str, bool, NoneType):
        return type(value) is kind
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is tuple:
        kinds = [inner[0]] * max(1, len(value)) if isinstance(value, list) and inner[-1] is ... else inner
        return isinstance(value, list) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if inner:  # a union
        return any(fits(value, each) for each in inner)
    hints = get_type_hints(kind)
    return (
        isinstance(value, dict)
        and value.keys() == hints.keys()
        and all(fits(value[name], hint) for name, hint in hints.items())
    )


def plain_json(text: bytes, name: str) -> Any:
    """Returns the content of JSON.

    Args:
        text: The JSON.
        name: Name of the file in errors.

    Raises:
        ValueError: It is none, or is nested too deeply.
    """
    try:
        content = json.loads(text)
        level, depth = [content], -1
        while level and depth <= MAX_DEPTH:
            values = (
                each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
            )
            level, depth = [value for each in values for value in each], depth + 1
    except RecursionError:
        depth = MAX_DEPTH + 1
    except ValueError as error:
        raise ValueError(f"{name} of the bundle cannot be read: {error}") from error
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} of the bundle is nested more than {MAX_DEPTH} levels deep")
    return content


# -- archives


def pack(folder: Path, archive: Path) -> int:
    """Packs the files of a folder, and returns the size of the archive in bytes. What has no known name is left out.

    Raises:
        OSError: The archive cannot be written.
    """
    import pyarrow as pa

    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    partial = archive.with_name(f".{archive.name}.partial")
    try:
        with (
            pa.CompressedOutputStream(str(partial), "zstd") as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar,
        ):
            sums: dict[str, str] = {}
            for name in sorted(filter(_KNOWN.fullmatch, names), key=_place):
                with (folder / name).open("rb") as file:
                    sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
                    member = tarfile.TarInfo(name)
                    member.size = file.tell()
                    file.seek(0)
                    tar.addfile(member, file)
            content = json.dumps(sums).encode()
            member = tarfile.TarInfo(SUMS)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        partial.rename(archive)
    except BaseException:  # also at an interrupt
        partial.unlink(missing_ok=True)
        raise
    return archive.stat().st_size


def _place(name: str) -> tuple[int, str]:
    return next(index for index, each in enumerate(NAMES) if re.fullmatch(each, name)), name


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Unpacks an archive into a folder, which must be new.

    Args:
        archive: The archive.
        folder: The folder, which is created.
        max_bytes: Most bytes of its files.

    Raises:
        ValueError: It is no bundle, is damaged, has a file of another name or kind, or has more bytes.
    """
    import pyarrow as pa

    folder.mkdir(parents=True)
    left, seen = max_bytes, dict[str, str]()
    try:
        with pa.input_stream(str(archive), compression="zstd") as stream:
            # Headers are read here, as those of other kinds than files' may be longer than memory holds.
            while any(header := _read(stream, tarfile.BLOCKSIZE)):
                member = tarfile.TarInfo.frombuf(header, "ascii", "strict")
                if not member.isreg() or not _KNOWN.fullmatch(member.name) or member.name in seen:
                    raise ValueError(f"{archive} is no bundle of groupax: it has {member.name!r:.120}")
                left -= member.size
                if member.size < 0 or left < 0 or len(seen) >= MAX_FILES:
                    raise ValueError(
                        f"{archive} unpacks to more than {max_bytes / 1e9:g} GB or {MAX_FILES:,} files; raise --max_gb "
                        "if you expect that"
                    )
                seen[member.name] = _write(stream, folder / member.name, member.size)
                _read(stream, -member.size % tarfile.BLOCKSIZE)
    except (tarfile.TarError, pa.ArrowException, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{archive} is no bundle of groupax, or is damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"{archive} cannot be unpacked, or is no bundle of groupax: {error}") from error
    if "bundle.json" not in seen:
        raise ValueError(f"{archive} is no bundle of groupax: it has no bundle.json")
    seen.pop(SUMS, None)
    sums = parsed_record((folder / SUMS).read_bytes()) if (folder / SUMS).is_file() else {}
    damaged = [name for name in {**seen, **sums} if seen.get(name) != sums.get(name)]
    if damaged:
        raise ValueError(f"{archive} is damaged: {damaged[0]!r:.120} is not what was packed; send or copy it again")
    (folder / SUMS).unlink()


def _read(stream: Any, num_bytes: int) -> bytes:
    data = stream.read(num_bytes) if num_bytes else b""
    if len(data) < num_bytes:
        raise EOFError("it ends too early")
    return data


def _write(stream: Any, path: Path, num_bytes: int) -> str:
    """Writes a file, and returns its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        while num_bytes:
            data = _read(stream, min(CHUNK_BYTES, num_bytes))
            file.write(data)
            digest.update(data)
            num_bytes -= len(data)
    return digest.hexdigest()
