"""Evaluations: items one page at a time, estimates, and the items in which two evaluations differ."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from groupax.evaluation.items import Item, compare, estimates, read_items
from groupax.runs.outcome import evaluations_by_set, held_out
from groupax.satellites.view.groups import parts_of
from groupax.satellites.view.rollouts import SHOWN_CHARACTERS, shown_prompt

PAGE_ITEMS = 25
KINDS = ("lost", "gained", "same")
SHOWN: Mapping[str, Callable[[Item], bool]] = {
    "all": lambda _: True,
    "solved": lambda item: all(each.solved for each in item.completions),
    "unsolved": lambda item: not all(each.solved for each in item.completions),
}


def item_page(path: Path, first: int, show: str, query: str) -> dict[str, Any]:
    """Returns a page of the matching items of an evaluation.

    Args:
        path: Path of the JSON Lines file.
        first: Number of matching items to skip.
        show: Which items match: `all`, `solved` (by every completion) or `unsolved`.
        query: Text that the prompt or a completion must contain.

    Raises:
        ValueError: The file cannot be read, or `show` is unknown.
    """
    if show not in SHOWN:
        raise ValueError(f"show={show!r} is none of {', '.join(SHOWN)}")
    items = _items(path)
    matching = [item for item in items if SHOWN[show](item) and query.casefold() in _searched(item)]
    shown = [shown_item(item) for item in matching[first : first + PAGE_ITEMS]]
    return {"items": shown, "num_items": len(items), "num_shown": len(matching), "page": PAGE_ITEMS}


def shown_item(item: Item) -> dict[str, Any]:
    """Returns an item as the page shows it: its prompt, columns and completions, with long texts cut."""
    prompt = item.prompt if isinstance(item.prompt, str) else shown_prompt(json.dumps(item.prompt))
    completions = [
        {
            "text": each.text[:SHOWN_CHARACTERS],
            **{name: getattr(each, name) for name in ("num_tokens", "finish_reason", "solved", "reward", "rewards")},
            "episode": parts_of(each.turns, each.messages),
        }
        for each in item.completions
    ]
    columns = {name: str(value)[:SHOWN_CHARACTERS] for name, value in item.columns.items()}
    return {"prompt": prompt[:SHOWN_CHARACTERS], "columns": columns, "completions": completions}


def estimate_rows(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Returns a record per evaluation, by set and in the order of training.

    Returns:
        name, set, when: Name of the evaluation, its set, and the step or `before` or `after`.
        num_items: Number of items.
        estimates: Mean and 95 % interval by name of the estimate.
        fault: Reason why there are no estimates; empty if there are.
    """
    return [
        {"name": path.stem, "set": of, "when": when, **_row(path, path.stat().st_mtime_ns)}
        for of, order in evaluations_by_set(files).items()
        for when, path in order
    ]


def sentences(files: Mapping[str, Path]) -> list[str]:
    """Returns the sentences on the evaluations in files, kept until one of these changes."""
    return _sentences(tuple((name, path, path.stat().st_mtime_ns) for name, path in files.items()))


@lru_cache(maxsize=100)
def _sentences(versions: tuple[tuple[str, Path, int], ...]) -> list[str]:
    return held_out({name: path for name, path, _ in versions})


@lru_cache(maxsize=1000)
def _row(path: Path, version: int) -> dict[str, Any]:
    try:
        items = _items_of_version(path, version)
    except ValueError as error:
        return {"num_items": 0, "estimates": {}, "fault": str(error)}
    found = estimates(items).items()
    means = {name: {"value": each.value, "low": each.low, "high": each.high} for name, each in found}
    return {"num_items": len(items), "estimates": means, "fault": ""}


def _items(path: Path) -> list[Item]:
    """Returns the items of a file, which are kept until it changes.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        version = path.stat().st_mtime_ns
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    return _items_of_version(path, version)


@lru_cache(maxsize=6)
def _items_of_version(path: Path, version: int) -> list[Item]:  # noqa: ARG001
    return read_items(path)


def differences(before: Path, after: Path, show: str, first: int, query: str) -> dict[str, Any]:
    """Compares two evaluations on their common items.

    Args:
        before: File of the first evaluation.
        after: File of the second one.
        show: Which items to return: `lost`, `gained`, `same` or `all`.
        first: Number of matching items to skip.
        query: Text that the prompt or a completion must contain.

    Returns:
        differences: Means, difference with its interval, and p-value by name of the estimate.
        counts: Number of items by kind.
        items: Records with `kind`, `before` and `after`, those that lost first.
        num_shown: Number of matching items.

    Raises:
        ValueError: A file cannot be read, the evaluations have no item in common, or `show` is unknown.
    """
    if show not in (*KINDS, "all"):
        raise ValueError(f"show={show!r} is none of {', '.join(KINDS)}, all")
    earlier, later = ({item.key: item for item in _items(path)} for path in (before, after))
    found = compare(earlier.values(), later.values())
    pairs = [(kind_of(item, later[key]), item, later[key]) for key, item in earlier.items() if key in later]
    pairs.sort(key=lambda pair: KINDS.index(pair[0]))
    matching = [pair for pair in pairs if show in ("all", pair[0]) and query.casefold() in _searched(*pair[1:])]
    return {
        "differences": {name: asdict(each) for name, each in found.differences.items()},
        "counts": {kind: sum(pair[0] == kind for pair in pairs) for kind in KINDS},
        "items": [
            {"kind": kind, "before": shown_item(old), "after": shown_item(new)}
            for kind, old, new in matching[first : first + PAGE_ITEMS]
        ],
        "num_shown": len(matching),
        "page": PAGE_ITEMS,
    }


def kind_of(before: Item, after: Item) -> str:
    """Returns whether an item `lost`, `gained` or stayed the `same`: in solved completions, else in its mean reward."""
    old, new = _value(before), _value(after)
    if old is None or new is None or old == new:
        return "same"
    return "gained" if new > old else "lost"


def _value(item: Item) -> float | None:
    values = [float(bool(each.solved)) if item.is_scorable else each.reward for each in item.completions]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _searched(*items: Item) -> str:
    texts = [text for item in items for text in (str(item.prompt), *(each.text for each in item.completions))]
    return "\0".join(texts).casefold()
