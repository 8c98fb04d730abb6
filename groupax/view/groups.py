"""The groups of a step: summaries for a list, and one group with its completions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from groupax.view.arrow import value_as_text
from groupax.view.episodes import episode_of, full_result, streams_of
from groupax.view.images import image_names
from groupax.view.rollouts import Step
from groupax.view.runs import NotFoundError
from groupax.view.texts import PREVIEW_CHARACTERS, SHOWN_CHARACTERS, messages, prompt_key, shown_prompt, truncate

EXTRA = "extra/"


def group_summaries(step: Step) -> list[dict[str, Any]]:
    """Returns one record per prompt in the order of the rollout, with what the list shows, filters and sorts by."""
    order = np.argsort(step.prompt_index, kind="stable")
    prompts, starts, group_of, sizes = np.unique(
        step.prompt_index[order], return_index=True, return_inverse=True, return_counts=True
    )
    if not prompts.size:
        return []
    totals = step.total[order]
    known = ~np.isnan(totals)
    num_known = np.bincount(group_of, known)
    with np.errstate(invalid="ignore"):  # a group without any reward has no mean
        means = np.bincount(group_of, np.where(known, totals, 0.0)) / num_known
        squares = np.where(known, totals - means[group_of], 0.0) ** 2
        stds = np.sqrt(np.bincount(group_of, squares) / num_known)
        highest = np.fmax.reduceat(totals, starts)
        flat = np.fmin.reduceat(totals, starts) == highest
    disagree = disagreeing_groups([column[order] for column in step.rewards.values()], group_of)
    num_truncated = np.bincount(group_of, step.truncated[order])
    lengths = step.num_tokens[order]
    mean_tokens = np.bincount(group_of, lengths) / sizes
    texts = (shown_prompt(step.text("prompt", int(order[start]))[0]) for start in starts)
    groups = [
        {
            "prompt_index": int(prompts[index]),
            "preview": text[:PREVIEW_CHARACTERS],
            "size": int(sizes[index]),
            "totals": totals[starts[index] : starts[index] + sizes[index]].tolist(),
            "lengths": lengths[starts[index] : starts[index] + sizes[index]].tolist(),
            "highest": highest[index],
            "mean": means[index],
            "std": stds[index],
            "zero_variance": bool(flat[index]),
            "num_truncated": int(num_truncated[index]),
            "disagree": bool(disagree[index]),
            "mean_tokens": float(mean_tokens[index]),
        }
        for index, text in enumerate(texts)
    ]
    first_rows = order[starts]
    return [groups[index] for index in np.argsort(first_rows)]


def disagreeing_groups(columns: Sequence[np.ndarray], group_of: np.ndarray) -> np.ndarray:
    """Returns [P] bool, whether two reward functions rank two completions of a group in opposite orders.

    Args:
        columns: [B] rewards of each reward function, NaN where it does not apply.
        group_of: [B] group index of each completion, from 0.
    """
    disagree = np.zeros(group_of.max(initial=-1) + 1, bool)
    for number, first in enumerate(columns):
        for second in columns[:number]:
            applies = ~(np.isnan(first) | np.isnan(second))
            groups, a, b = group_of[applies], first[applies], second[applies]
            order = np.lexsort((b, a, groups))  # for equal `a`, `b` rises; so where `b` falls, `a` has risen
            groups, b = groups[order], b[order]
            disagree[groups[1:][(groups[1:] == groups[:-1]) & (b[1:] < b[:-1])]] = True
    return disagree


def group(step: Step, prompt_index: int) -> dict[str, Any]:
    """Returns a prompt and its completions, with texts truncated to `SHOWN_CHARACTERS` except in `messages`."""
    rows = step.rows_of(prompt_index)
    prompt, num_bytes = step.text("prompt", int(rows[0]))
    return {
        "prompt": truncate(prompt),
        "is_cut": len(prompt) > SHOWN_CHARACTERS,
        "messages": messages(prompt),
        "images": image_names(step.table.column("images")[int(rows[0])].as_py() if step.has_images else None),
        "key": prompt_key(step.table.column("prompt")[int(rows[0])]),
        "num_bytes": num_bytes,
        "rows": [_row(step, int(row)) for row in rows],
    }


def _row(step: Step, row: int) -> dict[str, Any]:
    text, num_bytes = step.text("completion", row, 4 * SHOWN_CHARACTERS)
    names = step.table.column_names
    return {
        "sample_index": step.table.column("sample_index")[row].as_py(),
        "text": truncate(text),
        "is_cut": len(text) > SHOWN_CHARACTERS or num_bytes > 4 * SHOWN_CHARACTERS,
        "num_bytes": num_bytes,
        "num_tokens": int(step.num_tokens[row]),
        "total": step.total[row],
        "advantage": step.advantage[row],
        "rewards": {name: column[row] for name, column in step.rewards.items()},
        "episode": episode_of(step, row),
        "streams": streams_of(step, row),
        "finish_reason": step.table.column("finish_reason")[row].as_py() if "finish_reason" in names else None,
        "extra": {
            name.removeprefix(EXTRA): truncate(value_as_text(step.table.column(name)[row]))
            for name in names
            if name.startswith(EXTRA)
        },
    }


def full_text(
    step: Step, prompt_index: int, sample_index: int | None, turn: int | None = None, call: int | None = None
) -> str:
    """Returns the full text of a completion, or of the prompt if `sample_index` is None.

    Args:
        step: The step.
        prompt_index: Index of the prompt.
        sample_index: Index of the completion in its group.
        turn: Turn of the completion whose text to return instead.
        call: Call of the turn whose result to return instead.

    Raises:
        NotFoundError: There is no such text.
    """
    rows = step.rows_of(prompt_index)
    if sample_index is None:
        return step.text("prompt", int(rows[0]))[0]
    for row in rows:
        if step.table.column("sample_index")[int(row)].as_py() == sample_index:
            return step.text("completion", int(row))[0] if turn is None else full_result(step, int(row), turn, call)
    raise NotFoundError(f"prompt {prompt_index} has no sample {sample_index}; it has {len(rows)}")
