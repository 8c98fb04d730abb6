"""Search for texts in the rollouts of all steps."""

import time
from typing import Any

from groupax.view.rollouts import PREVIEW_CHARACTERS, matching_rows, read_step
from groupax.view.runs import Run

BUDGET_S = 0.5  # of one call, so that the page can show hits early and request more
MOST_HITS = 50
AROUND = 60  # characters before a hit


def search_steps(run: Run, query: str, before: float) -> dict[str, Any]:
    """Returns completions that contain a text, or whose prompts do, newest steps first.

    Args:
        run: The run whose rollouts to search.
        query: The text; case is ignored.
        before: Only steps below this one are searched.

    Returns:
        hits: `step`, `prompt_index`, `sample_index`, `excerpt`, `total`.
        next_before: `before` of the call that continues; None at the end.
        num_searched: Number of searched steps.
    """
    started_s = time.monotonic()
    hits: list[dict[str, Any]] = []
    num_searched = 0
    weights = run.reward_weights()
    steps = [step for step in run.rollout_steps() if step < before]
    for number in reversed(steps):
        if len(hits) >= MOST_HITS or time.monotonic() - started_s > BUDGET_S:
            break
        before = number
        num_searched += 1
        try:
            step = read_step(run.rollout_file(number), weights)
        except ValueError:  # damaged, or removed meanwhile
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
    """Returns the text around a match, or its start if there is no match."""
    index = max(text.casefold().find(query.casefold()), 0)
    start = max(index - AROUND, 0)
    return ("…" if start else "") + text[start : start + PREVIEW_CHARACTERS]
