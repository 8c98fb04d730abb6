"""Search in the rollouts of all steps, and an index of their prompts."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from groupax.evaluation.items import ACCURACY_REWARDS
from groupax.satellites.view.rollouts import (
    PREVIEW_CHARACTERS,
    Step,
    prompt_key,
    read_step,
    read_texts,
    searched_text,
    shown_prompt,
)
from groupax.satellites.view.runs import NotFoundError, Run

BUDGET_S = 0.5  # time limit of a call; the page shows the hits and continues the search
MAX_HITS = 50
CONTEXT_CHARACTERS = 60  # before a hit
MAX_CHARACTERS = 1000  # of the text to search for
ENDS = ("", "truncated", "complete")
Read = Callable[[Path, Sequence[float] | None], Step]
ANYTHING = (-math.inf, math.inf)
MAX_ENTRIES = 2_000_000  # groups in an index; 48 bytes each
MAX_TEXTS = 50_000
TEXT_CHARACTERS = 160
ORDERS = ("frequent", "unsolved", "gained", "lost")
GROUP = np.dtype(
    [
        *(("key", "u8"), ("step", "i8"), ("prompt_index", "i4"), ("size", "i4"), ("truncated", "i4")),
        *(("mean", "f4"), ("low", "f4"), ("high", "f4")),
        ("solved", "i4"),  # number of completions that are right; -1 if nothing says so
    ]
)


@dataclass(frozen=True)
class Query:
    """The completions to search for: those that match all of it.

    Attributes:
        text: Text that the prompt or the completion must contain, case-insensitive; empty for any.
        is_regex: Whether `text` is a regular expression.
        reward: Lowest and highest sum of the rewards.
        length: Lowest and highest number of sampled tokens.
        advantage: Lowest and highest advantage.
        step: First and last step.
        end: `truncated` or `complete`; empty for either.

    Raises:
        ValueError: The regular expression is malformed, `end` is unknown, or everything would match.
    """

    text: str = ""
    is_regex: bool = False
    reward: tuple[float, float] = ANYTHING
    length: tuple[float, float] = ANYTHING
    advantage: tuple[float, float] = ANYTHING
    step: tuple[float, float] = ANYTHING
    end: str = ""

    def __post_init__(self) -> None:
        if self.end not in ENDS:
            raise ValueError(f"end={self.end!r} is none of truncated, complete")
        if not self.text and not self.end and {self.reward, self.length, self.advantage, self.step} == {ANYTHING}:
            raise ValueError("q is empty; it must be the text to search for, unless there is another condition")
        if len(self.text) > MAX_CHARACTERS:
            raise ValueError(f"the text to search for has more than {MAX_CHARACTERS} characters")
        try:
            self._places(pyarrow.array([""]))
        except pyarrow.ArrowException as error:
            raise ValueError(f"{self.text!r} is not a regular expression: {error}") from error

    def steps_of(self, run: Run) -> list[int]:
        """Returns the logged steps that may match, in order."""
        first, last = self.step
        return [step for step in run.rollout_steps() if first <= step <= last]

    def rows(self, step: Step, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yields the matching rows of a step from row `first` on, with the position of the match in the completion.

        The position is 0 for rows of which only the prompt matches.
        """
        rows = first + np.flatnonzero(self._fits(step)[first:])
        if not rows.size:
            return
        _, first_rows, group_of = np.unique(step.prompt_index[rows], return_index=True, return_inverse=True)
        texts = [searched_text(step.text("prompt", int(rows[index]))[0]) for index in first_rows]
        in_prompt = self._places(pyarrow.array(texts, pyarrow.large_string()))[group_of] >= 0
        places = self._places(step.table.column("completion"))[rows]
        is_hit = in_prompt | (places >= 0)
        for row, place in zip(rows[is_hit].tolist(), places[is_hit].tolist(), strict=True):
            yield row, len(step.text("completion", row, place)[0]) if place > 0 else 0

    def may_match(self, path: Path) -> bool:
        """Returns whether a step's texts match, whatever else is asked for.

        Raises:
            ValueError: The file is damaged or is not a rollout log.
        """
        if not self.text:
            return True
        prompts, completions = read_texts(path)
        searched = pyarrow.array(map(searched_text, prompts), pyarrow.large_string())
        return bool((self._places(completions) >= 0).any() or (self._places(searched) >= 0).any())

    def _places(self, texts: Any) -> np.ndarray:
        """Returns [N] the byte at which the first match begins in each text, -1 without one.

        Regular expressions are those of RE2, whose time is linear in the text. Texts that a dictionary has are searched
        once.
        """
        if isinstance(texts, pyarrow.ChunkedArray):
            return np.concatenate([np.zeros(0, int), *map(self._places, texts.chunks)])
        if pyarrow.types.is_dictionary(texts.type):
            found = self._places(texts.dictionary)
            indices = texts.indices.fill_null(len(found)).to_numpy(zero_copy_only=False)
            return np.append(found, -1)[indices]
        if not (pyarrow.types.is_string(texts.type) or pyarrow.types.is_large_string(texts.type)):
            texts = texts.cast(pyarrow.large_string(), safe=False)
        function = "find_substring_regex" if self.is_regex else "find_substring"
        options = pyarrow.compute.MatchSubstringOptions(self.text, ignore_case=True)
        found = pyarrow.compute.call_function(function, [texts], options)
        return found.fill_null(-1).to_numpy(zero_copy_only=False)

    def _fits(self, step: Step) -> np.ndarray:
        fits = np.ones(len(step.prompt_index), bool)
        ranges = ((self.reward, step.total), (self.length, step.num_tokens), (self.advantage, step.advantage))
        for (low, high), values in ranges:
            if (low, high) != ANYTHING:
                fits &= (values >= low) & (values <= high)
        return fits & (step.truncated == (self.end == "truncated")) if self.end else fits


def search_steps(run: Run, query: Query, before: float, first: int, read: Read) -> dict[str, Any]:
    """Searches for completions that match a query, newest steps first.

    Args:
        run: Run to search.
        query: Completions to search for.
        before: Step to start below.
        first: Row of the first of these steps to start with.
        read: Reads a step.

    Returns:
        hits: Records with `step`, `prompt_index`, `sample_index`, `excerpt`, `total`, `advantage` and `num_tokens`, at
            most `MAX_HITS`.
        next: Values of `before` and `first` that continue the search; None if it is complete.
        num_searched: Number of steps searched to their end.
    """
    started_s = time.monotonic()
    hits: list[dict[str, Any]] = []
    weights, is_likely = run.reward_weights(), True
    steps = [step for step in query.steps_of(run) if step < before]
    for num_searched, number in enumerate(reversed(steps)):
        if num_searched and time.monotonic() - started_s > BUDGET_S:
            return {"hits": hits, "next": {"before": number + 1, "first": 0}, "num_searched": num_searched}
        step = _matching(run, number, query, read, weights, is_likely)
        is_likely, start, first = False, first, 0
        if step is None:
            continue
        for row, place in query.rows(step, start):
            if len(hits) == MAX_HITS:
                return {"hits": hits, "next": {"before": number + 1, "first": row}, "num_searched": num_searched}
            excerpt_from = max(place - CONTEXT_CHARACTERS, 0)
            text = step.text("completion", row)[0][excerpt_from : excerpt_from + PREVIEW_CHARACTERS]
            known = {"excerpt": ("…" if excerpt_from else "") + text, "total": step.total[row]}
            hits.append({**_place(step, number, row), **known, "advantage": step.advantage[row]})
            is_likely = True
    return {"hits": hits, "next": None, "num_searched": len(steps)}


def _matching(
    run: Run, number: int, query: Query, read: Read, weights: Sequence[float] | None, is_likely: bool
) -> Step | None:
    """Returns a step; None if its texts do not match, or if the file is damaged or was removed in the meantime.

    A step that is likely to match, because the one before did, is read at once, without looking at its texts first.
    """
    try:
        path = run.rollout_file(number)
        return read(path, weights) if is_likely or query.may_match(path) else None
    except (OSError, ValueError):
        return None


def _place(step: Step, number: int, row: int) -> dict[str, Any]:
    return {
        "step": number,
        "prompt_index": int(step.prompt_index[row]),
        "sample_index": step.value("sample_index", row),
        "num_tokens": int(step.num_tokens[row]),
    }


def _right(run: Run, step: Step) -> np.ndarray | None:
    """Returns which completions [B] are right by the reward that says so, None if none does."""
    try:
        named = run.config().get("correctness_reward")
    except ValueError:
        named = None
    name = next((each for each in (named, *ACCURACY_REWARDS) if each in step.rewards), None)
    return None if name is None else step.rewards[name] == 1.0


class PromptIndex:
    """The groups of all steps of a run by prompt, read as they are asked for.

    Memory is bounded: of a larger run only the first `MAX_ENTRIES` groups are indexed.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._forget()

    def update(self) -> dict[str, Any]:
        """Reads steps that are not indexed, for a limited time, and returns the progress."""
        with self._lock:
            if self._generation != self._run.generation:
                self._forget()
            todo = [step for step in self._run.rollout_steps() if step not in self._done]
            num_steps, weights = len(self._done) + len(todo), self._run.reward_weights()
            until_s = time.monotonic() + BUDGET_S
            for step in todo:
                if self._is_full() or time.monotonic() > until_s:
                    break
                self._read(step, weights)
            known = {"num_unreadable": self._num_unreadable, "is_full": self._is_full()}
            return {"num_done": len(self._done), "num_steps": num_steps, **known}

    def history(self, key: str) -> dict[str, Any]:
        """Returns the groups of a prompt in the order of steps; none if it is not in the steps indexed so far.

        Raises:
            NotFoundError: The key is malformed.
        """
        try:
            number = int(key, 16) & (2**64 - 1)
        except ValueError:
            raise NotFoundError(f"{key!r} is not a prompt key") from None
        groups = self._all_groups()
        groups = np.sort(groups[groups["key"] == np.uint64(number)], order="step", kind="stable")
        found = {name: groups[name].tolist() for name in GROUP.names or () if name != "key"}
        return {"text": self._texts.get(number, ""), **found}

    def prompts(self, query: str, limit: int, order: str = "frequent", only_unsolved: bool = False) -> dict[str, Any]:
        """Returns prompts that contain a text, with their mean reward the first and the last time, and their best one.

        Args:
            query: Text that a prompt must contain.
            limit: Maximum number of prompts.
            order: `frequent`, `unsolved` (lowest best reward first), `gained` or `lost` (largest change first).
            only_unsolved: Whether to leave out prompts with a completion that is right.

        Returns:
            prompts: The prompts.
            num_prompts: Number of prompts with or without the text.
            num_unsolved: Number of them of which no completion was right; None if nothing says what is right.

        Raises:
            ValueError: The order is unknown.
        """
        if order not in ORDERS:
            raise ValueError(f"order={order!r} is none of {', '.join(ORDERS)}")
        groups = self._all_groups()
        groups = groups[np.argsort(groups["step"], kind="stable")]
        keys, first, group_of, counts = np.unique(
            groups["key"], return_index=True, return_inverse=True, return_counts=True
        )
        last = len(groups) - 1 - np.unique(groups["key"][::-1], return_index=True)[1]
        means = groups["mean"].astype(np.float64)
        best = np.full(len(keys), np.nan)
        np.fmax.at(best, group_of, groups["high"])
        found = {"first": means[first], "last": means[last], "best": best}
        solved = np.full(len(keys), -1)
        np.maximum.at(solved, group_of, groups["solved"])
        gains = found["last"] - found["first"]
        wanted = {"frequent": np.zeros(len(keys)), "unsolved": best, "gained": -gains, "lost": gains}[order]
        query = query.casefold()
        rows: list[dict[str, Any]] = []
        for index in np.lexsort((-counts, np.nan_to_num(wanted, nan=np.inf))).tolist():
            text = self._texts.get(int(keys[index]), "")
            if query in text.casefold() and not (only_unsolved and solved[index] > 0):
                values = {name: float(column[index]) for name, column in found.items()}
                rows.append({"key": f"{int(keys[index]):016x}", "text": text, "count": int(counts[index]), **values})
            if len(rows) == limit:
                break
        num_unsolved = int((solved == 0).sum()) if (solved >= 0).any() else None
        return {"prompts": rows, "num_prompts": len(keys), "num_unsolved": num_unsolved}

    def _forget(self) -> None:
        self._generation = self._run.generation
        self._groups: list[np.ndarray] = []  # of each step
        self._texts: dict[int, str] = {}
        self._done: set[int] = set()
        self._num_unreadable = 0

    def _is_full(self) -> bool:
        return sum(map(len, self._groups)) >= MAX_ENTRIES

    def _all_groups(self) -> np.ndarray:
        with self._lock:
            return np.concatenate([np.zeros(0, GROUP), *self._groups])

    def _read(self, step: int, weights: Sequence[float] | None) -> None:
        self._done.add(step)
        try:
            self._groups.append(self._groups_of(step, read_step(self._run.rollout_file(step), weights)))
        except (ValueError, OverflowError):  # damaged, or removed in the meantime
            self._num_unreadable += 1

    def _groups_of(self, number: int, step: Step) -> np.ndarray:
        groups, right = [], _right(self._run, step)
        for prompt_index in dict.fromkeys(step.prompt_index.tolist()):
            rows = step.rows_of(prompt_index)
            key = int(prompt_key(step.table.column("prompt")[int(rows[0])]), 16)
            totals = step.total[rows]
            totals = totals[~np.isnan(totals)]
            mean, low, high = (totals.mean(), totals.min(), totals.max()) if totals.size else (np.nan,) * 3
            solved = -1 if right is None else right[rows].sum()
            groups.append((key, number, prompt_index, len(rows), step.truncated[rows].sum(), mean, low, high, solved))
            if key not in self._texts and len(self._texts) < MAX_TEXTS:
                self._texts[key] = shown_prompt(step.text("prompt", int(rows[0]))[0])[:TEXT_CHARACTERS]
        return np.array(groups, GROUP)
