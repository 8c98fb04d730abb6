"""Evaluation sets by name, and records of evaluated items, from which all estimates follow. Imports no jax."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from groupax.core.settings.fields import check_type
from groupax.core.storage.folders import MAX_LOG_BYTES, read_file, replacing_file
from groupax.core.types import Rollout
from groupax.data.images import named
from groupax.episodes.as_json import messages_as_json, turns_as_json
from groupax.evaluation.paired import PairedDifference, paired_difference
from groupax.rewards.answers import final_number, number_text
from groupax.rewards.maths import last_boxed
from groupax.rewards.text import final_part
from groupax.rollouts.estimates import Estimate, mean_share, mean_value, pass_at_k, powers_up_to

ONLY_SET = "eval"  # name of a single evaluation set without a name


def named_sets(dataset: Any) -> dict[str, Any]:
    """Returns evaluation sets by name, given a mapping, such as a `datasets.DatasetDict`, or a single set.

    Raises:
        ValueError: The mapping is empty, or a name is not usable as a file name.
    """
    if not isinstance(dataset, Mapping):
        return {ONLY_SET: dataset}
    if not dataset:
        raise ValueError("eval_dataset is an empty mapping; pass a dataset or a dict of datasets by name")
    for name in dataset:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
            raise ValueError(f"the name of an evaluation set may have letters, digits, '_', '-' and '.', got {name!r}")
    return dict(dataset)


def sources_by_name(texts: Sequence[str], only: str | None = None) -> dict[str, str]:
    """Parses NAME=SOURCE, one per evaluation set; a source without a name is named after its last path component.

    Args:
        texts: One text per set.
        only: Name of a single source without a name.

    Raises:
        ValueError: Two sets have the same name.

    Example:
        >>> sources_by_name(["data/gsm8k", "hard=data/math500/test.jsonl"])
        {'gsm8k': 'data/gsm8k', 'hard': 'data/math500/test.jsonl'}
    """
    sources: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or "/" in name:
            name, source = (only if only and len(texts) == 1 else Path(text).stem), text
        if name in sources:
            raise ValueError(
                f"two evaluation sets have the name {name!r}: {sources[name]} and {source}; name them as NAME=SOURCE"
            )
        sources[name] = source
    return named_sets(sources)


def number_answer(text: str) -> str | None:
    """Returns the final number of a completion, as `gsm8k_accuracy` reads it."""
    number = final_number(text)
    return None if number is None else number_text(number)


def tagged_answer(text: str) -> str | None:
    """Returns the content of the last `<answer>...</answer>`."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def math_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`, else of the last `<answer>`, else the last number.

    Spacing and the size of LaTeX's brackets and fractions are ignored. Two notations of one value are two answers here;
    those that the reward calls correct still count as one (see `majority`).
    """
    text = final_part(text)
    boxed = last_boxed(text)
    answer = boxed if boxed is not None else tagged_answer(text)
    if answer is None:
        return number_answer(text)
    answer = re.sub(r"\\(?:left|right|,|!|;|:| )|\s|\$", "", answer)
    return re.sub(r"\\[dt]frac", r"\\frac", answer).rstrip(".") or None


# Rewards whose 1 means that a completion is correct, with what reads its answer for votes; None where answers cannot be
# compared with each other, so that there is no vote.
ACCURACY_REWARDS: dict[str, Callable[[str], str | None] | None] = {
    "gsm8k_accuracy": number_answer,
    "math_accuracy": math_answer,
    "think_answer_correct": tagged_answer,
    "code_tests": None,
}


@dataclass(frozen=True)
class Completion:
    """One completion of an item.

    Attributes:
        text: Text without special tokens.
        num_tokens: Number of tokens, including the stop token.
        finish_reason: Reason of its end, as in `groupax.core.types.Rollout`.
        rewards: Reward by function; None where one does not apply or failed.
        reward: Weighted sum of the rewards; None if none applies.
        solved: Whether it is correct; None if that is unknown.
        answer: Answer that it votes for; None if it gives no answer, or votes are not counted.
        turns: Turns of an episode with their calls, as in the rollout log; None for a plain completion.
        messages: Messages of an episode after the prompt of a conversation.
    """

    text: str
    num_tokens: int
    finish_reason: str
    rewards: Mapping[str, float | None]
    reward: float | None
    solved: bool | None = None
    answer: str | None = None
    turns: Sequence[Mapping[str, Any]] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Item:
    """One prompt of an evaluation set with its completions.

    Attributes:
        key: Hash of the dataset's row, the same in every evaluation of it.
        index: Index of the row in the set.
        prompt: Prompt as in the dataset.
        columns: Other columns of the row.
        completions: The n completions.
        counts_votes: Whether maj@n is computed.
    """

    key: str
    index: int
    prompt: Any
    columns: Mapping[str, Any]
    completions: Sequence[Completion]
    counts_votes: bool = False

    @property
    def is_scorable(self) -> bool:
        """Returns whether it is known for every completion if it is correct."""
        return all(completion.solved is not None for completion in self.completions)


def make_items(
    groups: Sequence[Sequence[Rollout]], names: Sequence[str], weights: np.ndarray, correctness_reward: str | None
) -> list[Item]:
    """Creates the items of scored groups.

    Args:
        groups: One group per prompt.
        names: Names of the K rewards.
        weights: [K] weights of the sum.
        correctness_reward: Reward whose 1 means that a completion is correct.
    """
    answer_of = ACCURACY_REWARDS.get(correctness_reward or "")
    seen: Counter[str] = Counter()
    items = []
    for index, group in enumerate(groups):
        row = named(group[0].example)
        prompt, columns = _plain(row["prompt"]), {name: _plain(row[name]) for name in row if name != "prompt"}
        digest = hashlib.sha256(json.dumps([prompt, columns], sort_keys=True).encode()).hexdigest()[:16]
        seen[digest] += 1
        key = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        completions = [_completion(member, names, weights, correctness_reward, answer_of) for member in group]
        items.append(Item(key, index, prompt, columns, completions, answer_of is not None))
    return items


def _completion(
    rollout: Rollout,
    names: Sequence[str],
    weights: np.ndarray,
    correctness_reward: str | None,
    answer_of: Callable[[str], str | None] | None,
) -> Completion:
    rewards = {name: rollout.rewards[name] for name in names}
    known = [weight * value for weight, value in zip(weights, rewards.values(), strict=True) if value is not None]
    verdict = rewards[correctness_reward] if correctness_reward else None
    return Completion(
        text=rollout.text,
        num_tokens=rollout.num_sampled_tokens,
        finish_reason=rollout.finish_reason,
        rewards=rewards,
        reward=float(sum(known)) if known else None,
        solved=None if verdict is None else verdict == 1.0,
        answer=answer_of(rollout.text) if answer_of else None,
        turns=json.loads(turns_as_json(rollout.turns)) if rollout.has_turns else None,
        messages=json.loads(messages_as_json(rollout.messages) or "null"),
    )


def item_values(item: Item) -> dict[str, float]:
    """Returns an item's value for each estimate for which at least one of its completions has a value."""
    values: dict[str, float] = {}
    n = len(item.completions)
    if item.is_scorable:
        num_right = sum(bool(completion.solved) for completion in item.completions)
        values = {f"pass@{k}": pass_at_k(n, num_right, k) for k in powers_up_to(n)}
        if item.counts_votes and n > 1:
            values[f"maj@{n}"] = majority(item)
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


def majority(item: Item) -> float:
    """Returns the probability that the most frequent answer of an item's completions is correct.

    An answer is correct if a completion that gives it is; all correct answers count as one. Ties are broken at random,
    and completions without an answer do not vote.
    """
    right_answers = {completion.answer for completion in item.completions if completion.solved}
    votes: Counter[str | None] = Counter()  # those for a correct answer by None
    for completion in item.completions:
        if completion.solved or (completion.answer is not None and completion.answer in right_answers):
            votes[None] += 1
        elif completion.answer is not None:
            votes[completion.answer] += 1
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return 1 / len(winners) if None in winners else 0.0


def estimates(items: Sequence[Item]) -> dict[str, Estimate]:
    """Computes means over items with their intervals: pass@k, maj@n, the reward and each reward function."""
    by_name = _by_name([item_values(item) for item in items])
    n = max((len(item.completions) for item in items), default=1)
    return {
        name: mean_share(values, n) if name.startswith(("pass@", "maj@")) else mean_value(values)
        for name, values in by_name.items()
    }


@dataclass(frozen=True)
class Comparison:
    """A comparison of two evaluations on their common items."""

    differences: Mapping[str, PairedDifference]  # differences by name of the estimate
    num_items: int  # number of common items
    num_only_before: int  # number of items in the first evaluation only
    num_only_after: int  # number of items in the second evaluation only
    metrics_before: tuple[str, ...] = ()  # names that only the first evaluation has
    metrics_after: tuple[str, ...] = ()  # names that only the second evaluation has
    # whether they have different reward functions, so that their totals are not compared
    has_other_rewards: bool = False


def compare(before: Iterable[Item], after: Iterable[Item]) -> Comparison:
    """Compares two evaluations on their common items.

    Raises:
        ValueError: They have no item in common.
    """
    first, second = ({item.key: item for item in items} for items in (before, after))
    common = [key for key in first if key in second]
    if not common:
        raise ValueError(
            f"the two evaluations have no item in common ({len(first)} and {len(second)} items); evaluate "
            "both on the same data and prompts"
        )
    values = [(item_values(first[key]), item_values(second[key])) for key in common]
    names = dict.fromkeys(name for pair in values for name in pair[0] if name in pair[1])
    differences = {}
    for name in names:
        pairs = [(a[name], b[name]) for a, b in values if name in a and name in b]
        differences[name] = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    sides = [dict.fromkeys(name for pair in values for name in pair[side]) for side in (0, 1)]
    alone = [tuple(name for name in side if name not in differences) for side in sides]
    has_other_rewards = any(name.startswith("rewards/") for names in alone for name in names)
    if has_other_rewards:
        differences.pop("reward", None)
    num_alone = len(first) - len(common), len(second) - len(common)
    return Comparison(differences, len(common), *num_alone, alone[0], alone[1], has_other_rewards)


def binary_rewards(items: Iterable[Item]) -> list[str]:
    """Returns the names of the rewards whose values are 0 and 1 only."""
    values: dict[str, set[float]] = {}
    for completion in (completion for item in items for completion in item.completions):
        for name, value in completion.rewards.items():
            if value is not None:
                values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if found <= {0.0, 1.0}]


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Writes the items as JSON Lines, atomically."""
    with replacing_file(path) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)  # lone surrogates too


def read_items(path: Path) -> list[Item]:
    """Reads the items of a file that an evaluation has written.

    Raises:
        ValueError: There is no such file, or a line is not an item.
    """
    try:
        lines = read_file(path, MAX_LOG_BYTES).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            items.append(_item(json.loads(line)))
        except (OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is not an item of an evaluation: {error}") from error
    return items


CHECKED = {kind: get_type_hints(kind) for kind in (Item, Completion)}
UNCHECKED = ("prompt", "completions", "turns", "messages")  # by their types


def _item(record: Any) -> Item:
    """Returns the item of a record in JSON types.

    Raises:
        OverflowError, TypeError, ValueError: It is none.
    """
    if not isinstance(record, dict) or set(record) != CHECKED[Item].keys():
        raise ValueError(f"an item has {', '.join(sorted(CHECKED[Item]))}")
    completions = record["completions"]
    if not isinstance(completions, list) or not all(isinstance(each, dict) for each in completions):
        raise ValueError("each of its completions must be a mapping")
    for kind, own in ((Item, record), *((Completion, each) for each in completions)):
        for name, hint in CHECKED[kind].items():
            if name in own and name not in UNCHECKED:
                check_type(name, own[name], hint)
    rewards = [each.get("rewards", {}) for each in completions]
    if not rewards or any(each.keys() != rewards[0].keys() for each in rewards):
        raise ValueError("it has no completions with the same rewards")
    for value in (
        *(value for each in rewards for value in each.values()),
        *(each.get("reward") for each in completions),
    ):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"its reward {value} is not finite")
    return Item(**{**record, "completions": [Completion(**each) for each in completions]})


def _by_name(values: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for each in values for name in each)
    return {name: [each[name] for each in values if name in each] for name in names}


def _plain(value: Any) -> Any:
    """Returns the value in JSON types; one without such a form becomes text."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)
