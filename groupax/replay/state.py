"""The check of the state in a bundle that somebody else has written."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from groupax.replay.foreign import (
    is_count,
    is_number,
    is_text,
    list_of,
    mapping_of,
    optional,
    plain_json,
    record_of,
)
from groupax.replay.manifest import Manifest
from groupax.rollouts.state import Cursor
from groupax.runs.checkpoints.choose import FORMAT
from groupax.runs.checkpoints.store import STATE
from groupax.settings.compute import Checkpointing
from groupax.storage.folders import read_file


def check_state(folder: Path, manifest: Manifest) -> None:
    """Checks that a folder has the `state.json` of the run that a manifest describes, between two rollouts.

    Raises:
        ValueError: It has another one, or a damaged one.
    """
    name = f"{folder.name}/{STATE}"
    content = plain_json(read_file(folder / STATE), name)
    if not isinstance(content, dict) or content.get("identity") != manifest.identity:
        raise ValueError(f"{name} of the bundle is damaged: it is not of the run that bundle.json describes")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{name} of the bundle has format {content.get('format')!r:.40}, and this groupax reads {FORMAT}"
        )
    for entry, is_right in _CHECKS.items():
        if not is_right(content.get(entry)):
            raise ValueError(f"{name} of the bundle is damaged: {entry} is {content.get(entry)!r:.60}")
    steps = content["step"], content["cursor"]["step"]
    if steps != (manifest.start, manifest.start):
        raise ValueError(
            f"{name} of the bundle is damaged: it is of steps {steps}, and bundle.json says {manifest.start}"
        )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_size(value: Any) -> bool:
    return list_of(is_count)(value) and len(value) == 2


def _are_tiles(value: Any) -> bool:
    return list_of(_is_size)(value) and len(value) > 0


def _is_checkpointing(value: Any) -> bool:
    return value in get_args(Checkpointing)


def _is_learner(value: Any) -> bool:
    return _is_one_learner(value) or record_of({"adapters": mapping_of(_is_one_learner)})(value)


_are_metrics = mapping_of(is_number)
_is_one_learner = record_of(
    {
        "num_updates": is_count,
        "entropy": record_of({"coef": is_number, "last_entropy": optional(is_number)}),
        "shapes": list_of(
            record_of({"tokens": is_count, "row_tokens": is_count, "prompts": _is_size, "tiles": _are_tiles})
        ),
        "shapes_of": lambda value: isinstance(value, list),
        "checkpointing": _is_checkpointing,
    }
)
_CHECKS = {
    "step": is_count,
    "cursor": record_of({each.name: is_count for each in fields(Cursor)}),
    "learner": _is_learner,
    "rollout": lambda value: value is None,
    "policies": list_of(record_of({"rollout": is_count, "version": is_count})),
    "versions": _is_mapping,
    "devices": _is_mapping,
    "model": _is_mapping,
    "metrics": _are_metrics,
    "metrics_bytes": is_count,
    "log": record_of(
        {
            "history": list_of(_are_metrics),
            "diagnosed": list_of(is_text),
            "window": list_of(_are_metrics),
            "last": _are_metrics,
            "evaluated": _are_metrics,
            "num_sampled_tokens": is_number,
            "rollout_s": is_number,
            "train_seconds": is_number,
        }
    ),
}
