"""Estimates of a run's evaluations, and the items in which two evaluations differ."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupax.evaluation.items import Item, compare, estimates, read_items
from groupax.view.evaluations import PAGE_ITEMS, shown_item

MAX_FILES = 6  # whose items stay in memory
FIRST_AND_LAST = {"before": -1, "after": 1 << 62}  # in the order of evaluations
KINDS = ("lost", "gained", "same")


class EvaluationTable:
    """The evaluations of runs, read when they are first asked for and again when their files change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[Path, int], list[Item]] = OrderedDict()
        self._rows: dict[tuple[Path, int], dict[str, Any]] = {}

    def rows(self, files: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Returns a record per evaluation, by set and in the order of training.

        Returns:
            name, set, when: Name of the evaluation, its set, and the step or `before` or `after`.
            num_items: Number of items.
            estimates: Mean and 95 % interval by name of the estimate.
            fault: Reason why there are no estimates; empty if there are.
        """
        found = []
        for name, path in files.items():
            when, _, of = name.partition(".")
            key = (path, path.stat().st_mtime_ns)
            with self._lock:
                row = self._rows.get(key)
            if row is None:
                row = self._row(path)
                with self._lock:
                    self._rows[key] = row
            found.append({"name": name, "set": of, "when": when, **row})
        return sorted(found, key=lambda row: (row["set"], _order(row["when"]), row["name"]))

    def differences(
        self, before: Path, after: Path, show: str, first: int, query: str, num_items: int = PAGE_ITEMS
    ) -> dict[str, Any]:
        """Compares two evaluations on their common items.

        Args:
            before: File of the first evaluation.
            after: File of the second one.
            show: Which items to return: `lost`, `gained`, `same` or `all`.
            first: Number of matching items to skip.
            query: Text that the prompt or a completion must contain.
            num_items: Maximum number of items to return.

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
        earlier, later = ({item.key: item for item in self.items(path)} for path in (before, after))
        found = compare(earlier.values(), later.values())
        pairs = [(kind_of(item, later[key]), item, later[key]) for key, item in earlier.items() if key in later]
        pairs.sort(key=lambda pair: KINDS.index(pair[0]))
        matching = [pair for pair in pairs if show in ("all", pair[0]) and _contains(pair[1:], query.casefold())]
        page = matching[first : first + num_items]
        return {
            "differences": {name: asdict(each) for name, each in found.differences.items()},
            "counts": {kind: sum(pair[0] == kind for pair in pairs) for kind in KINDS},
            "items": [
                {"kind": kind, "before": shown_item(asdict(old)), "after": shown_item(asdict(new))}
                for kind, old, new in page
            ],
            "num_shown": len(matching),
            "page": num_items,
        }

    def items(self, path: Path) -> list[Item]:
        """Returns the items of an evaluation.

        Raises:
            ValueError: The file cannot be read.
        """
        key = (path, path.stat().st_mtime_ns)
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        items = read_items(path)
        with self._lock:
            self._items[key] = items
            while len(self._items) > MAX_FILES:
                self._items.popitem(last=False)
        return items

    def _row(self, path: Path) -> dict[str, Any]:
        try:
            items = read_items(path)
        except ValueError as error:
            return {"num_items": 0, "estimates": {}, "fault": str(error)}
        means = {
            name: {"value": each.value, "low": each.low, "high": each.high} for name, each in estimates(items).items()
        }
        return {"num_items": len(items), "estimates": means, "fault": ""}


def kind_of(before: Item, after: Item) -> str:
    """Returns whether an item `lost`, `gained` or stayed the `same`: in solved completions, else in its mean reward."""
    old, new = _value(before), _value(after)
    if old is None or new is None or old == new:
        return "same"
    return "gained" if new > old else "lost"


def _value(item: Item) -> float | None:
    is_judged = item.is_scorable and bool(item.completions)
    values = [float(bool(each.solved)) if is_judged else each.reward for each in item.completions]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _contains(items: Sequence[Item], query: str) -> bool:
    texts = [str(items[0].prompt), *(each.text for item in items for each in item.completions)]
    return any(query in text.casefold() for text in texts)


def _order(when: str) -> int:
    digits = when.removeprefix("step_")
    return FIRST_AND_LAST.get(when, int(digits) if digits.isdecimal() else 0)
