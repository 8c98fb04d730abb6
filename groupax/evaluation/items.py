"""What an evaluation keeps of each item: its completions with their rewards. All estimates follow from it. Imports
no jax."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from groupax.evaluation.answers import ACCURACY_REWARDS, ANSWERS
from groupax.evaluation.paired import PairedDifference, paired_difference
from groupax.metrics.estimates import Estimate, majority_at_k, mean_share, mean_value, pass_at_k, powers_up_to
from groupax.types import Rollout


@dataclass(frozen=True)
class Completion:
    """One completion of an item.

    Attributes:
        text: without special tokens.
        num_tokens: its stop token included.
        finish_reason: "stop", or "length" if it was cut off.
        rewards: by reward function, None where one does not apply or failed.
        reward: their weighted sum; None if none applies.
        solved: whether it is right; None where nothing tells.
        answer: what it votes for; None if it gives no answer, or votes are not counted.
    """

    text: str
    num_tokens: int
    finish_reason: str
    rewards: Mapping[str, float | None]
    reward: float | None
    solved: bool | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Item:
    """One prompt of an evaluation set with its completions.

    Attributes:
        key: a hash of the dataset's row, the same in every evaluation of it.
        index: of the row in the set.
        prompt: as the dataset has it.
        columns: the row's other columns.
        completions: n of them.
        counts_votes: whether there is a maj@k.
    """

    key: str
    index: int
    prompt: Any
    columns: Mapping[str, Any]
    completions: Sequence[Completion]
    counts_votes: bool = False

    @property
    def is_scorable(self) -> bool:
        """Whether of every completion it is known if it is right."""
        return all(completion.solved is not None for completion in self.completions)


def make_items(
    groups: Sequence[Sequence[Rollout]], names: Sequence[str], weights: np.ndarray, correctness_reward: str | None
) -> list[Item]:
    """The items of scored groups.

    Args:
        groups: one per prompt.
        names: of the K rewards.
        weights: [K], of the weighted sum.
        correctness_reward: the reward whose 1 means that a completion is right.
    """
    kind = ACCURACY_REWARDS.get(correctness_reward) if correctness_reward else None
    answer_of = ANSWERS[kind] if kind else None
    seen: Counter[str] = Counter()
    items = []
    for index, group in enumerate(groups):
        row = group[0].example
        columns = {name: _plain(value) for name, value in row.items() if name != "prompt"}
        digest = hashlib.sha256(json.dumps([_plain(row["prompt"]), columns], sort_keys=True).encode()).hexdigest()[:16]
        seen[digest] += 1
        key = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        completions = []
        for member in group:
            rewards = {name: member.rewards[name] for name in names}
            known = [w * value for w, value in zip(weights, rewards.values(), strict=True) if value is not None]
            verdict = rewards[correctness_reward] if correctness_reward else None
            completions.append(
                Completion(
                    text=member.text,
                    num_tokens=len(member.completion_ids),
                    finish_reason=member.finish_reason,
                    rewards=rewards,
                    reward=float(sum(known)) if known else None,
                    solved=None if verdict is None else verdict == 1.0,
                    answer=answer_of(member.text) if answer_of else None,
                )
            )
        items.append(Item(key, index, _plain(row["prompt"]), columns, completions, answer_of is not None))
    return items


def item_values(item: Item) -> dict[str, float]:
    """What an item contributes to each estimate; nothing where none of its completions has a value."""
    values: dict[str, float] = {}
    n = len(item.completions)
    if item.is_scorable:
        num_right = sum(bool(completion.solved) for completion in item.completions)
        values = {f"pass@{k}": pass_at_k(n, num_right, k) for k in powers_up_to(n)}
        if item.counts_votes and n > 1:
            ks = [k for k in powers_up_to(n) if k > 1]
            counts, right, num_silent = votes(item)
            chances = majority_at_k(counts, right, num_silent, ks)
            values |= {f"maj@{k}": chance for k, chance in zip(ks, chances, strict=True)}
    totals = [completion.reward for completion in item.completions]
    series = {"reward": totals}
    series |= {
        f"rewards/{name}/mean": [completion.rewards[name] for completion in item.completions]
        for name in item.completions[0].rewards
    }
    for name, column in series.items():
        known = [value for value in column if value is not None]
        if known:
            values[name] = sum(known) / len(known)
    return values


def votes(item: Item) -> tuple[list[int], int | None, int]:
    """Completions per answer, which answer is right, and how many completions give none.

    An answer is right if a completion that gives it is; all right answers are one.
    """
    right_answers = {completion.answer for completion in item.completions if completion.solved}
    counted: Counter[str | None] = Counter()
    num_right = num_silent = 0
    for completion in item.completions:
        if completion.solved or (completion.answer is not None and completion.answer in right_answers):
            num_right += 1
        elif completion.answer is None:
            num_silent += 1
        else:
            counted[completion.answer] += 1
    counts = sorted(counted.values(), reverse=True)
    return ([num_right, *counts], 0, num_silent) if num_right else (counts, None, num_silent)


def estimates(items: Sequence[Item]) -> dict[str, Estimate]:
    """Means over items with their intervals: pass@k, maj@k, the reward and each reward function."""
    by_name = _by_name([item_values(item) for item in items])
    n = max((len(item.completions) for item in items), default=1)
    return {
        name: mean_share(values, n) if name.startswith(("pass@", "maj@")) else mean_value(values)
        for name, values in by_name.items()
    }


@dataclass(frozen=True)
class Comparison:
    """Two evaluations on the items that both have.

    Attributes:
        differences: by name of the estimate.
        num_items: that both have.
        num_only_before, num_only_after: items of one of them.
    """

    differences: Mapping[str, PairedDifference]
    num_items: int
    num_only_before: int
    num_only_after: int


def compare(before: Iterable[Item], after: Iterable[Item]) -> Comparison:
    """What changed from one evaluation to the other, over the items that both have.

    Raises:
        ValueError: they have no item in common.
    """
    first, second = ({item.key: item for item in items} for items in (before, after))
    common = [key for key in first if key in second]
    if not common:
        raise ValueError(
            f"the two evaluations have no item in common ({len(first)} and {len(second)} items): they are of "
            "different data or prompts"
        )
    values = [(item_values(first[key]), item_values(second[key])) for key in common]
    names = dict.fromkeys(name for pair in values for name in pair[0] if name in pair[1])
    differences = {}
    for name in names:
        pairs = [(a[name], b[name]) for a, b in values if name in a and name in b]
        differences[name] = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    return Comparison(differences, len(common), len(first) - len(common), len(second) - len(common))


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write the items as JSON Lines; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:  # halves of surrogate pairs
            file.writelines(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_items(path: Path) -> list[Item]:
    """The items of a file that an evaluation wrote.

    Raises:
        ValueError: there is no such file, or a line is no item.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    known = {each.name for each in fields(Item)}
    items = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or set(record) != known:
                raise ValueError(f"an item has {', '.join(sorted(known))}")
            items.append(Item(**{**record, "completions": [Completion(**each) for each in record["completions"]]}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no item of an evaluation: {error}") from error
    return items


def _by_name(values: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for each in values for name in each)
    return {name: [each[name] for each in values if name in each] for name in names}


def _plain(value: Any) -> Any:
    """The value as JSON has it; what it has not becomes text."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)
