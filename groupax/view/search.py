"""Search in the rollouts of all steps: texts, regular expressions, and ranges of rewards, lengths and advantages."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from groupax.view.arrow import as_text
from groupax.view.rollouts import Step, read_step, read_texts
from groupax.view.runs import Run
from groupax.view.texts import PREVIEW_CHARACTERS, searched_text

BUDGET_S = 0.5  # time limit of a call; the page shows the hits and continues the search
MAX_HITS = 50
CONTEXT_CHARACTERS = 60  # before a hit
MAX_CHARACTERS = 1000  # of the text to search for
ENDS = ("", "truncated", "complete")
Read = Callable[[Path, Sequence[float] | None], Step]
ANYTHING = (-math.inf, math.inf)


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
        places = self._places(as_text(step.table.column("completion").take(rows)))
        for row, place in zip(rows[in_prompt | (places >= 0)], places[in_prompt | (places >= 0)], strict=True):
            yield int(row), _num_characters(step, int(row), int(place))

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

        Regular expressions are those of RE2, whose time is linear in the text.
        """
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
        step = _matching(run.rollout_file(number), query, read, weights, is_likely)
        is_likely, start, first = False, first, 0
        if step is None:
            continue
        for row, place in query.rows(step, start):
            if len(hits) == MAX_HITS:
                return {"hits": hits, "next": {"before": number + 1, "first": row}, "num_searched": num_searched}
            hits.append(_hit(step, number, row, place))
            is_likely = True
    return {"hits": hits, "next": None, "num_searched": len(steps)}


def exported(run: Run, query: Query) -> Iterator[bytes]:
    """Yields the matching completions of all steps as JSON Lines, newest steps first, with their full texts."""
    weights, is_likely = run.reward_weights(), True
    for number in reversed(query.steps_of(run)):
        step = _matching(run.rollout_file(number), query, read_step, weights, is_likely)
        is_likely = False
        if step is None:
            continue
        for row, _ in query.rows(step):
            is_likely = True
            yield json.dumps(_record(step, number, row), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def excerpt(text: str, place: int) -> str:
    """Returns the text around a position."""
    start = max(place - CONTEXT_CHARACTERS, 0)
    return ("…" if start else "") + text[start : start + PREVIEW_CHARACTERS]


def _matching(path: Path, query: Query, read: Read, weights: Sequence[float] | None, is_likely: bool) -> Step | None:
    """Returns a step; None if its texts do not match, or if the file is damaged or was removed in the meantime.

    A step that is likely to match, because the one before did, is read at once, without looking at its texts first.
    """
    try:
        return read(path, weights) if is_likely or query.may_match(path) else None
    except (OSError, ValueError):
        return None


def _hit(step: Step, number: int, row: int, place: int) -> dict[str, Any]:
    return {
        "step": number,
        "prompt_index": int(step.prompt_index[row]),
        "sample_index": step.table.column("sample_index")[row].as_py(),
        "excerpt": excerpt(step.text("completion", row)[0], place),
        "total": step.total[row],
        "advantage": step.advantage[row],
        "num_tokens": int(step.num_tokens[row]),
    }


def _record(step: Step, number: int, row: int) -> Mapping[str, Any]:
    names = step.table.column_names
    return {
        "step": number,
        "prompt_index": int(step.prompt_index[row]),
        "sample_index": step.table.column("sample_index")[row].as_py(),
        "reward": _known(step.total[row]),
        "rewards": {name: _known(column[row]) for name, column in step.rewards.items()},
        "advantage": _known(step.advantage[row]),
        "num_tokens": int(step.num_tokens[row]),
        "finish_reason": step.table.column("finish_reason")[row].as_py() if "finish_reason" in names else None,
        "prompt": step.text("prompt", row)[0],
        "completion": step.text("completion", row)[0],
    }


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _num_characters(step: Step, row: int, num_bytes: int) -> int:
    return len(step.text("completion", row, num_bytes)[0]) if num_bytes > 0 else 0
