"""Full-text search in the rollouts of all steps."""

import time
from typing import Any

from groupax.view.rollouts import matching_rows, read_step
from groupax.view.runs import Run
from groupax.view.texts import PREVIEW_CHARACTERS

BUDGET_S = 0.5  # time limit of a call; the page shows the hits and continues the search
MAX_HITS = 50
CONTEXT_CHARACTERS = 60  # before a hit


def search_steps(run: Run, query: str, before: float) -> dict[str, Any]:
    """Searches for completions that contain a text or whose prompt does, newest steps first.

    Args:
        run: Run to search.
        query: Text to search for, case-insensitive.
        before: Step to start below.

    Returns:
        hits: Records with `step`, `prompt_index`, `sample_index`, `excerpt` and `total`.
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
        for row in matching_rows(step, query):
            text = step.text("completion", row)[0]
            hits.append(
                {
                    "step": number,
                    "prompt_index": int(step.prompt_index[row]),
                    "sample_index": step.table.column("sample_index")[row].as_py(),
                    "excerpt": excerpt(text, query),
                    "total": step.total[row],
                }
            )
    is_end = num_searched == len(steps)
    return {"hits": hits, "next_before": None if is_end else before, "num_searched": num_searched}


def excerpt(text: str, query: str) -> str:
    """Returns the text around the first match, or its start if there is none."""
    index = max(text.casefold().find(query.casefold()), 0)
    start = max(index - CONTEXT_CHARACTERS, 0)
    return ("…" if start else "") + text[start : start + PREVIEW_CHARACTERS]
