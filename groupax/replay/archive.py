"""Archives of bundles: a tar file, compressed with zstandard, of few kinds of files. Imports no jax.

A bundle comes from somebody else. Only regular files of known names are unpacked, into a new folder, up to a number of
bytes, and none of them is a program or a pickle. pyarrow, which reads and writes Parquet here, compresses.
"""

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from groupax.runs.files import parsed_record

MAX_FILES = 10_000
CHUNK_BYTES = 2**20
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
    r"state/(params|optimizer|reference|policies)\.safetensors",
    r"(run/tokenizer|model)/\w[\w.-]{0,71}\.(json|safetensors|txt|model|jinja)",
    r"sha256\.json",
)
SUMS = "sha256.json"  # the last file: the digests of all others, as a file may be damaged on its way
_KNOWN = re.compile("|".join(f"(?:{name})" for name in NAMES), re.ASCII)


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
                member = tarfile.TarInfo(name)
                member.size = (folder / name).stat().st_size
                with (folder / name).open("rb") as file:
                    sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
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
            while (member := _next_member(stream)) is not None:
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


def _next_member(stream: Any) -> tarfile.TarInfo | None:
    """Returns the next header; None at the end. Headers of other kinds than files', which may be long, are not read."""
    header = _read(stream, tarfile.BLOCKSIZE)
    return None if not any(header) else tarfile.TarInfo.frombuf(header, "ascii", "strict")


def _read(stream: Any, num_bytes: int) -> bytes:
    data = stream.read(num_bytes) if num_bytes else b""
    if len(data) < num_bytes:
        raise EOFError("it ends too early")
    return data


def _place(name: str) -> tuple[int, str]:
    return next(index for index, each in enumerate(NAMES) if re.fullmatch(each, name)), name


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
