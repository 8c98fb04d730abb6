"""The manifest of a bundle, and the check of one that somebody else has written."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from groupax.replay.foreign import is_count, is_flag, is_text, list_of, plain_json
from groupax.runs.checkpoints.fingerprint import Identity
from groupax.storage.folders import read_file

FORMAT = 2
# Entries of a tool that are true or false.
TOOL_FLAGS = ("is_async", "parallel", "opens")


@dataclass(frozen=True)
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
        tools: Schema, time limit and kind of each tool.
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
    visits: Mapping[str, int]
    rewards: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    identity: Identity
    includes: Sequence[str]
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
    for name, is_right in _CHECKS.items():
        if not is_right(content.get(name)):
            raise ValueError(f"bundle.json is damaged: {name} is {content.get(name)!r:.60}")
    return Manifest(**{each.name: content[each.name] for each in fields(Manifest)})


def _are_visits(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and is_count(row) for key, row in value.items())


def _is_tool(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), bool) for name in TOOL_FLAGS):
        return False
    function = schema.get("function") if isinstance(schema := value.get("schema"), dict) else None
    named = isinstance(function, dict) and is_text(function.get("name")) and function["name"] != ""
    limit = value.get("timeout_s")
    return named and (limit is None or (type(limit) in (int, float) and math.isfinite(limit) and limit > 0))


def _is_identity(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("adapter"), dict | None)


_CHECKS = {
    "groupax": is_text,
    "step": is_count,
    "start": is_count,
    "run": is_text,
    "model": is_text,
    "num_steps": is_count,
    "num_examples": is_count,
    "visits": _are_visits,
    "rewards": list_of(is_text),
    "tools": list_of(_is_tool),
    "identity": _is_identity,
    "includes": list_of(is_text),
    "plays": is_flag,
}
