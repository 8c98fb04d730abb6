"""The groups of a step: summaries for a list, and one group with its completions, episodes and images."""

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupax.satellites.view.rollouts import (
    PREVIEW_CHARACTERS,
    SHOWN_CHARACTERS,
    Step,
    messages,
    prompt_key,
    scalar_buffer,
    scalar_text,
    shown_prompt,
)
from groupax.satellites.view.runs import NotFoundError, number_of

EXTRA = "extra/"
GROUP_CHARACTERS = 4_000_000  # of all completions of a group together, until full texts are requested
TURN_CHARACTERS = 8_000  # of a text of the model or the environment, until the full text is requested
RESULT_CHARACTERS = 4_000
IMAGE_NAME = re.compile(r"images/[0-9a-f]{64}\.png")
IMAGE_SIGNATURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
MAX_IMAGE_BYTES = 1 << 26
MAX_PIXELS = 50_000_000
MAX_IMAGES = 64  # of a prompt


def group_summaries(step: Step) -> list[dict[str, Any]]:
    """Returns one record per prompt in the order of the rollout, with what the list shows, filters and sorts by."""
    order = np.argsort(step.prompt_index, kind="stable")
    prompts, starts, group_of, sizes = np.unique(
        step.prompt_index[order], return_index=True, return_inverse=True, return_counts=True
    )
    if not prompts.size:
        return []
    totals, lengths = step.total[order], step.num_tokens[order]
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
    mean_tokens = np.bincount(group_of, lengths) / sizes
    groups = []
    for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        text = shown_prompt(step.text("prompt", int(order[start]))[0])
        groups.append(
            {
                "prompt_index": int(prompts[index]),
                "preview": text[:PREVIEW_CHARACTERS],
                "size": size,
                "totals": totals[start : start + size].tolist(),
                "lengths": lengths[start : start + size].tolist(),
                "highest": highest[index],
                "mean": means[index],
                "std": stds[index],
                "zero_variance": bool(flat[index]),
                "num_truncated": int(num_truncated[index]),
                "disagree": bool(disagree[index]),
                "mean_tokens": float(mean_tokens[index]),
            }
        )
    return [groups[index] for index in np.argsort(order[starts])]


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
    """Returns a prompt and its completions, with long texts cut except in `messages`."""
    rows = step.rows_of(prompt_index)
    first = int(rows[0])
    prompt, num_bytes = step.text("prompt", first)
    images = [
        name for name in _list(step.value("images", first)) if isinstance(name, str) and IMAGE_NAME.fullmatch(name)
    ]
    limit = min(SHOWN_CHARACTERS, max(PREVIEW_CHARACTERS, GROUP_CHARACTERS // len(rows)))
    return {
        "prompt": prompt[:SHOWN_CHARACTERS],
        "is_cut": len(prompt) > SHOWN_CHARACTERS,
        "messages": messages(prompt),
        "images": images[:MAX_IMAGES],
        "key": prompt_key(step.table.column("prompt")[first]),
        "num_bytes": num_bytes,
        "rows": [_row(step, int(row), limit) for row in rows],
    }


def _row(step: Step, row: int, limit: int) -> dict[str, Any]:
    text, num_bytes = step.text("completion", row, 4 * limit)
    extra = [name for name in step.table.column_names if name.startswith(EXTRA)]
    return {
        "sample_index": step.value("sample_index", row),
        "text": text[:limit],
        "is_cut": len(text) > limit or num_bytes > 4 * limit,
        "num_bytes": num_bytes,
        "num_tokens": int(step.num_tokens[row]),
        "total": step.total[row],
        "advantage": step.advantage[row],
        "rewards": {name: column[row] for name, column in step.rewards.items()},
        "episode": episode_of(step, row),
        "streams": streams_of(step, row),
        "finish_reason": step.value("finish_reason", row),
        "extra": {name.removeprefix(EXTRA): _extra(step.table.column(name)[row])[:limit] for name in extra},
    }


def _extra(scalar: Any) -> str:
    value = scalar_text(scalar, None)[0] if scalar_buffer(scalar) is not None else scalar.as_py()
    return "" if value is None else str(value)


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
    row = next((int(row) for row in rows if step.value("sample_index", int(row)) == sample_index), None)
    if row is None:
        raise NotFoundError(f"prompt {prompt_index} has no sample {sample_index}; it has {len(rows)}")
    if turn is None:
        return step.text("completion", row)[0]
    found = _at(_json_column(step, "turns", row), turn)
    if found is not None and call is not None:
        found = _at(found.get("calls"), call)
    if found is None:
        raise NotFoundError(f"the episode has no turn {turn}" + ("" if call is None else f" with a call {call}"))
    return str(found.get("text" if call is None else "result", ""))


def episode_of(step: Step, row: int) -> list[dict[str, Any]] | None:
    """Returns the parts of an episode in their order: turns of the model with their calls, and other messages.

    None for a completion of a log without turns, or whose turns cannot be read. Long texts are cut, and their `cut` is
    the number of characters of the full text. A turn has the range of its tokens.
    """
    turns, messages = (_json_column(step, name, row) for name in ("turns", "messages"))
    if not {"turns", "messages"} <= {*step.table.column_names}:
        return None
    return parts_of(turns, messages)


def streams_of(step: Step, row: int) -> list[dict[str, Any]]:
    """Returns the further streams of tokens of an episode: the numbers of their turns and of tokens that count, parts.

    The parts are those of `episode_of`, after the messages that the model has read first.
    """
    found = []
    for branch in _mappings(_json_column(step, "branches", row)):
        turns, messages, prompt = (_parsed(_text(branch.get(name))) for name in ("turns", "messages", "prompt"))
        mask = branch.get("mask")
        read = [
            {"role": f"{message.get('role')}, prompt", **_cut(message.get("content"), TURN_CHARACTERS)}
            for message in _mappings(prompt)
        ]
        num_tokens = sum(map(bool, _list(mask)))
        parts = [*read, *(parts_of(turns, messages) or ())]
        found.append({"num_turns": len(_mappings(turns)), "num_tokens": num_tokens, "parts": parts})
    return found


def parts_of(turns: Any, messages: Any) -> list[dict[str, Any]] | None:
    """Returns the parts of an episode (see `episode_of`) from its turns and messages as JSON has them."""
    own = _mappings(turns)
    return list(_parts(own, _mappings(messages))) if own else None


def _parts(turns: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the parts. Results of calls are those of the turns, since the last ones are in no message."""
    numbered = enumerate(turns)
    for message in messages or [{"role": "assistant"}] * len(turns):
        role = str(message.get("role"))
        if role == "assistant":
            number, turn = next(numbered, (None, None))
            if turn is not None:
                yield _turn(number, turn, message)
        elif role != "tool":
            yield {"role": role, **_cut(message.get("content"), TURN_CHARACTERS)}


def _turn(number: int | None, turn: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    rewards = turn.get("rewards")
    return {
        "role": "assistant",
        "turn": number,
        "reasoning": _cut(message.get("reasoning_content"), TURN_CHARACTERS)["text"],
        **_cut(turn.get("text"), TURN_CHARACTERS),
        "start": _integer(turn.get("start")),
        "end": _integer(turn.get("end")),
        "reward": _number(turn.get("reward")),
        "rewards": {str(name): _number(each) for name, each in rewards.items()} if isinstance(rewards, Mapping) else {},
        "calls": [
            {
                "name": str(call.get("name")),
                "arguments": _cut(call.get("arguments"), RESULT_CHARACTERS)["text"],
                **_cut(call.get("result"), RESULT_CHARACTERS),
                "seconds": _number(call.get("seconds")),
                "is_error": bool(call.get("error")),
            }
            for call in _mappings(turn.get("calls"))
        ],
    }


def _cut(value: Any, limit: int) -> dict[str, Any]:
    text = _text(value)
    return {"text": text[:limit], "cut": len(text) if len(text) > limit else 0}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _json_column(step: Step, name: str, row: int) -> Any:
    return _parsed(step.text(name, row)[0]) if name in step.table.column_names else None


def _parsed(text: str) -> Any:
    """Returns what a JSON text stands for; None if it is damaged."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in _list(value) if isinstance(each, Mapping)]


def _at(value: Any, index: int) -> Mapping[str, Any] | None:
    found = _mappings(value)
    return found[index] if index < len(found) else None


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    return number_of(0.0 if value is None else value) or 0.0


def read_image(folder: Path, name: str) -> bytes:
    """Returns an image of a run folder, a PNG file, as it is after a check.

    Args:
        folder: The run folder.
        name: Name of the file (see `data.images.image_name`).

    Raises:
        NotFoundError: There is no such image.
        ValueError: The file is not an image of a size that is shown.
    """
    if not IMAGE_NAME.fullmatch(name):
        raise NotFoundError(f"{name[:100]!r} is not the name of an image: images/, 64 hexadecimal digits, .png")
    path = folder / name
    try:
        found = path.lstat()
    except OSError as error:
        raise NotFoundError(f"the run has no {name}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_IMAGE_BYTES:
        raise ValueError(f"{name} is not a file of at most {MAX_IMAGE_BYTES:,} bytes")
    content = path.read_bytes()
    width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
    if not content.startswith(IMAGE_SIGNATURE) or not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"{name} is not a PNG file of at most {MAX_PIXELS:,} pixels")
    return content
