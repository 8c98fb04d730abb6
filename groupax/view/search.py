"""Search in the rollouts of all steps: texts, regular expressions, and ranges of rewards, lengths and advantages."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex

from groupax.view.rollouts import Step, read_step
from groupax.view.runs import Run
from groupax.view.texts import PREVIEW_CHARACTERS, searched_text

BUDGET_S = 0.5  # time limit of a call; the page shows the hits and continues the search
MAX_HITS = 50
CONTEXT_CHARACTERS = 60  # before a hit
REGEX_TIMEOUT_S = 1.0  # of one text
MAX_PATTERN_CHARACTERS = 1000
ENDS = ("", "truncated", "complete")
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
        end: `truncated` or `complete`; empty for either.

    Raises:
        ValueError: The regular expression is malformed, `end` is unknown, or everything would match.
    """

    text: str = ""
    is_regex: bool = False
    reward: tuple[float, float] = ANYTHING
    length: tuple[float, float] = ANYTHING
    advantage: tuple[float, float] = ANYTHING
    end: str = ""

    def __post_init__(self) -> None:
        if self.end not in ENDS:
            raise ValueError(f"end={self.end!r} is none of truncated, complete")
        if not self.text and not self.end and {self.reward, self.length, self.advantage} == {ANYTHING}:
            raise ValueError("q is empty; it must be the text to search for, unless there is another condition")
        self.finder()

    def finder(self) -> Callable[[str], int | None]:
        """Returns a function that gives the position of the first match in a text, None without one."""
        if self.is_regex and self.text:
            if len(self.text) > MAX_PATTERN_CHARACTERS:
                raise ValueError(f"the regular expression has more than {MAX_PATTERN_CHARACTERS} characters")
            try:
                pattern = regex.compile(self.text, regex.IGNORECASE)
            except regex.error as error:
                raise ValueError(f"{self.text!r} is not a regular expression: {error}") from error
            return lambda text: _first_match(pattern, text)
        wanted = self.text.casefold()
        return lambda text: None if (found := text.casefold().find(wanted)) < 0 else found

    def rows(self, step: Step) -> Iterator[tuple[int, int]]:
        """Yields the matching rows of a step, with the position of the match in the completion, 0 without one.

        Raises:
            ValueError: The regular expression takes too long.
        """
        find = self.finder()
        prompts: dict[int, bool] = {}
        for row in np.flatnonzero(self._fits(step)).tolist():
            prompt_index = int(step.prompt_index[row])
            if prompt_index not in prompts:
                prompts[prompt_index] = find(searched_text(step.text("prompt", row)[0])) is not None
            place = find(step.text("completion", row)[0])
            if prompts[prompt_index] or place is not None:
                yield row, place or 0

    def _fits(self, step: Step) -> np.ndarray:
        fits = np.ones(len(step.prompt_index), bool)
        ranges = ((self.reward, step.total), (self.length, step.num_tokens), (self.advantage, step.advantage))
        for (low, high), values in ranges:
            if (low, high) != ANYTHING:
                fits &= (values >= low) & (values <= high)
        return fits & (step.truncated == (self.end == "truncated")) if self.end else fits


def search_steps(run: Run, query: Query, before: float) -> dict[str, Any]:
    """Searches for completions that match a query, newest steps first.

    Args:
        run: Run to search.
        query: Completions to search for.
        before: Step to start below.

    Returns:
        hits: Records with `step`, `prompt_index`, `sample_index`, `excerpt`, `total` and `num_tokens`.
        next_before: Value of `before` that continues the search; None if it is complete.
        num_searched: Number of steps searched.
    """
    started_s = time.monotonic()
    hits: list[dict[str, Any]] = []
    num_searched = 0
    weights = run.reward_weights()
    steps = [step for step in run.rollout_steps() if step < before]
    for number in reversed(steps):
        if len(hits) >= MAX_HITS or time.monotonic() - started_s > BUDGET_S:
            break
        before = number
        num_searched += 1
        try:
            step = read_step(run.rollout_file(number), weights)
        except ValueError:  # damaged, or removed in the meantime
            continue
        hits += [_hit(step, number, row, place) for row, place in query.rows(step)]
    is_end = num_searched == len(steps)
    return {"hits": hits, "next_before": None if is_end else before, "num_searched": num_searched}


def exported(run: Run, query: Query) -> Iterator[bytes]:
    """Yields the matching completions of all steps as JSON Lines, newest steps first, with their full texts."""
    weights = run.reward_weights()
    for number in reversed(run.rollout_steps()):
        try:
            step = read_step(run.rollout_file(number), weights)
        except ValueError:  # damaged, or removed in the meantime
            continue
        for row, _ in query.rows(step):
            yield json.dumps(_record(step, number, row), ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def excerpt(text: str, place: int) -> str:
    """Returns the text around a position."""
    start = max(place - CONTEXT_CHARACTERS, 0)
    return ("…" if start else "") + text[start : start + PREVIEW_CHARACTERS]


def _hit(step: Step, number: int, row: int, place: int) -> dict[str, Any]:
    return {
        "step": number,
        "prompt_index": int(step.prompt_index[row]),
        "sample_index": step.table.column("sample_index")[row].as_py(),
        "excerpt": excerpt(step.text("completion", row)[0], place),
        "total": step.total[row],
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


def _first_match(pattern: Any, text: str) -> int | None:
    try:
        match = pattern.search(text, timeout=REGEX_TIMEOUT_S)
    except TimeoutError:
        raise ValueError(
            f"the regular expression took longer than {REGEX_TIMEOUT_S:g} s on one text; simplify its repetitions"
        ) from None
    return None if match is None else match.start()
