"""The rollouts of a step: groups with rewards, completions and tokens. Files are read on demand."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from groupax.view.runs import NotThereError

PREVIEW_CHARACTERS = 320
SHOWN_CHARACTERS = 20_000  # of a text, until all of it is requested
SHOWN_TOKENS = 1_500  # of a completion, likewise
CACHE_BYTES = 64 * 2**20
NEEDED = ("prompt", "completion", "prompt_index", "sample_index")
REWARD = "rewards/"
EXTRA = "extra/"


@dataclass(frozen=True)
class Step:
    """The rollouts of one step, without values per token.

    Attributes:
        table: Table with one row per completion.
        prompt_index: Index of each prompt, [B] int64.
        rewards: Rewards by reward function, each [B] float64, NaN where one does not apply.
        total: Weighted sum of the rewards that apply, [B] float64, NaN if none does.
        advantage: Advantages, [B] float64, NaN if unknown.
        truncated: Whether each completion reached the token limit, [B] bool.
        num_tokens: Number of completion tokens, [B] int64.
    """

    table: pyarrow.Table
    prompt_index: np.ndarray
    rewards: Mapping[str, np.ndarray]
    total: np.ndarray
    advantage: np.ndarray
    truncated: np.ndarray
    num_tokens: np.ndarray

    def rows_of(self, prompt_index: int) -> np.ndarray:
        """Returns the rows of a prompt.

        Raises:
            NotThereError: There are none.
        """
        rows = np.flatnonzero(self.prompt_index == prompt_index)
        if not rows.size:
            raise NotThereError(f"this step has no prompt {prompt_index}; it has {len(np.unique(self.prompt_index))}")
        return rows

    def text(self, name: str, row: int, limit: int | None = None) -> tuple[str, int]:
        """Returns a text, or its start, and the number of bytes of the full text."""
        return _text(self.table.column(name)[row], limit)


def read_step(path: Path, weights: Sequence[float] | None = None) -> Step:
    """Reads a step's rollouts, without values per token.

    Args:
        path: Path of the file.
        weights: Weights of the reward functions, in the order of their columns; 1 each if None or of another number.

    Raises:
        ValueError: The file is damaged, or is not a rollout log.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            missing = [name for name in NEEDED if name not in schema.names]
            if missing:
                raise ValueError(f"{path.name} is no rollout log: it has no column {', '.join(missing)}")
            flat = [item.name for item in schema if not pyarrow.types.is_nested(item.type)]
            table = file.read(columns=flat, use_threads=False)
            lengths = _num_tokens(file, schema, table)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    names = [name for name in flat if name.startswith(REWARD)]
    rewards = {name.removeprefix(REWARD): _floats(table, name) for name in names}
    reasons = table.column("finish_reason").to_pylist() if "finish_reason" in flat else []
    return Step(
        table=table,
        prompt_index=table.column("prompt_index").to_numpy().astype(np.int64),
        rewards=rewards,
        total=_weighted(list(rewards.values()), weights, table.num_rows),
        advantage=_floats(table, "advantage"),
        truncated=np.array([reason == "length" for reason in reasons] or [False] * table.num_rows, bool),
        num_tokens=lengths,
    )


class StepCache:
    """A cache of the steps that were used last, up to a number of bytes."""

    def __init__(self, num_bytes: int = CACHE_BYTES) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._steps: OrderedDict[tuple[Path, int, tuple[float, ...]], Step] = OrderedDict()

    def read(self, path: Path, weights: Sequence[float] | None) -> Step:
        """Returns `read_step`, from the cache if neither file nor weights have changed."""
        key = (path, path.stat().st_mtime_ns, tuple(weights or ()))
        with self._lock:
            if key in self._steps:
                self._steps.move_to_end(key)
                return self._steps[key]
        step = read_step(path, weights)
        with self._lock:
            self._steps[key] = step
            while len(self._steps) > 1 and sum(each.table.nbytes for each in self._steps.values()) > self._num_bytes:
                self._steps.popitem(last=False)
        return step


def group_summaries(step: Step) -> list[dict[str, Any]]:
    """Returns one record per prompt, in the order of the rollout, with everything that a list of groups needs."""
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
        flat = np.fmin.reduceat(totals, starts) == np.fmax.reduceat(totals, starts)
    disagree = disagreeing_groups([column[order] for column in step.rewards.values()], group_of)
    num_truncated = np.bincount(group_of, step.truncated[order])
    mean_tokens = np.bincount(group_of, step.num_tokens[order]) / sizes
    texts = (shown_prompt(step.text("prompt", int(order[start]))[0]) for start in starts)
    groups = [
        {
            "prompt_index": int(prompts[index]),
            "preview": text[:PREVIEW_CHARACTERS],
            "size": int(sizes[index]),
            "totals": totals[starts[index] : starts[index] + sizes[index]].tolist(),
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
    """Returns for each group whether two reward functions order two of its completions in opposite ways, as [P] bool.

    Args:
        columns: Rewards by reward function, each [B], NaN where one does not apply.
        group_of: Number of the group of each completion, from 0, [B].
    """
    disagree = np.zeros(group_of.max(initial=-1) + 1, bool)
    for number, first in enumerate(columns):
        for second in columns[:number]:
            applies = ~(np.isnan(first) | np.isnan(second))
            groups, a, b = group_of[applies], first[applies], second[applies]
            order = np.lexsort((b, a, groups))  # where `a` is the same `b` rises, so where it falls `a` has risen
            groups, b = groups[order], b[order]
            disagree[groups[1:][(groups[1:] == groups[:-1]) & (b[1:] < b[:-1])]] = True
    return disagree


def group(step: Step, prompt_index: int) -> dict[str, Any]:
    """Returns a prompt and its completions; all texts but turns of a conversation are cut at `SHOWN_CHARACTERS`."""
    rows = step.rows_of(prompt_index)
    whole, num_bytes = step.text("prompt", int(rows[0]))
    return {
        "prompt": cut(whole),
        "is_cut": len(whole) > SHOWN_CHARACTERS,
        "messages": messages(whole),
        "key": prompt_key(step.table.column("prompt")[int(rows[0])]),
        "num_bytes": num_bytes,
        "rows": [_row(step, int(row)) for row in rows],
    }


def _row(step: Step, row: int) -> dict[str, Any]:
    text, num_bytes = step.text("completion", row, 4 * SHOWN_CHARACTERS)
    names = step.table.column_names
    return {
        "sample_index": step.table.column("sample_index")[row].as_py(),
        "text": cut(text),
        "is_cut": len(text) > SHOWN_CHARACTERS or num_bytes > 4 * SHOWN_CHARACTERS,
        "num_bytes": num_bytes,
        "num_tokens": int(step.num_tokens[row]),
        "total": step.total[row],
        "advantage": step.advantage[row],
        "rewards": {name: column[row] for name, column in step.rewards.items()},
        "finish_reason": step.table.column("finish_reason")[row].as_py() if "finish_reason" in names else None,
        "extra": {
            name.removeprefix(EXTRA): cut(_any_text(step.table.column(name)[row]))
            for name in names
            if name.startswith(EXTRA)
        },
    }


def whole_text(step: Step, prompt_index: int, sample_index: int | None) -> str:
    """Returns a full completion, or the full prompt if `sample_index` is None."""
    rows = step.rows_of(prompt_index)
    if sample_index is None:
        return step.text("prompt", int(rows[0]))[0]
    for row in rows:
        if step.table.column("sample_index")[int(row)].as_py() == sample_index:
            return step.text("completion", int(row))[0]
    raise NotThereError(f"prompt {prompt_index} has no sample {sample_index}; it has {len(rows)}")


def matching_rows(step: Step, query: str) -> list[int]:
    """Returns the rows whose prompt or completion contains a text, ignoring case."""
    wanted = query.casefold()
    prompts: dict[int, bool] = {}
    found = []
    for row, prompt_index in enumerate(step.prompt_index.tolist()):
        if prompt_index not in prompts:
            prompts[prompt_index] = wanted in searched_text(step.text("prompt", row)[0]).casefold()
        if prompts[prompt_index] or wanted in step.text("completion", row)[0].casefold():
            found.append(row)
    return found


def token_channels(path: Path) -> dict[str, dict[str, str]]:
    """Returns the values that tokens can be shaded by, by name: the `kind` (logp, entropy, ratio, value), the `column`,
    and for a ratio the column that it is `over`."""
    with pyarrow.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
    if "completion_ids" not in schema.names:
        return {}
    names = [item.name for item in schema if _is_list(item.type) and pyarrow.types.is_floating(item.type.value_type)]
    channels = {name: {"kind": _kind(name), "column": name, "over": ""} for name in names}
    if "policy_logps" in names:
        for name in names:
            if name.endswith("_logps") and name != "policy_logps":
                ratio = f"ratio {name.removesuffix('_logps')} / policy"
                channels[ratio] = {"kind": "ratio", "column": name, "over": "policy_logps"}
    order = ("logp", "entropy", "ratio", "value")
    return dict(sorted(channels.items(), key=lambda item: (order.index(item[1]["kind"]), item[0] != "policy_logps")))


def token_values(path: Path, prompt_index: int, channel: str, sample: int | None = None) -> dict[int, dict[str, Any]]:
    """Returns ids and values of the tokens of a group, by sample.

    Args:
        path: Path of the step's file.
        prompt_index: Prompt index of the group.
        channel: One of `token_channels`.
        sample: Index of a completion, of which all tokens are returned; None for all completions, each up to
            `SHOWN_TOKENS`.

    Raises:
        NotThereError: There is no such channel.
    """
    channels = token_channels(path)
    if channel not in channels:
        raise NotThereError(f"{path.name} has no {channel!r} per token; it has {', '.join(channels) or 'nothing'}")
    column, over = channels[channel]["column"], channels[channel]["over"]
    wanted = ["prompt_index", "sample_index", "completion_ids", column, *([over] if over else [])]
    limit = None if sample is not None else SHOWN_TOKENS
    found: dict[int, dict[str, Any]] = {}
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64, columns=wanted, use_threads=False):
            rows = np.flatnonzero(np.asarray(batch.column("prompt_index")) == prompt_index)
            for row in rows.tolist():
                sample_index = batch.column("sample_index")[row].as_py()
                if sample is not None and sample_index != sample:
                    continue
                ids = _list_values(batch.column("completion_ids")[row])[:limit].astype(int)
                values = _of_tokens(batch.column(column)[row], len(ids))
                if over:
                    with np.errstate(over="ignore"):
                        values = np.exp(values - _of_tokens(batch.column(over)[row], len(ids)))
                found[sample_index] = {"ids": ids.tolist(), "values": np.round(values, 5).tolist()}
    return found


def messages(prompt: str) -> list[dict[str, str]]:
    """Returns the turns of a conversation; none if the prompt is plain text."""
    if not prompt.startswith("[{"):
        return []
    try:
        turns = json.loads(prompt)
    except (ValueError, RecursionError):
        return []
    if not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return []
    return [{"role": str(turn["role"]), "content": _content(turn.get("content"))} for turn in turns]


def shown_prompt(prompt: str) -> str:
    """Returns the text of a prompt for a list: of a conversation the last turn."""
    turns = messages(prompt)
    return turns[-1]["content"] if turns else prompt


def searched_text(prompt: str) -> str:
    """Returns the searchable text of a prompt: of a conversation all turns."""
    turns = messages(prompt)
    return "\n".join(turn["content"] for turn in turns) if turns else prompt


def prompt_key(scalar: Any) -> str:
    """Returns a hash of a prompt, which is the same in every step."""
    return hashlib.blake2b(_bytes(scalar), digest_size=8).hexdigest()


def cut(text: str) -> str:
    """Returns the start of a long text."""
    return text[:SHOWN_CHARACTERS]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "" if content is None else json.dumps(content)


def _kind(name: str) -> str:
    for kind in ("logp", "entrop", "ratio"):
        if kind in name:
            return "entropy" if kind == "entrop" else kind
    return "value"


def _weighted(columns: Sequence[np.ndarray], weights: Sequence[float] | None, num_rows: int) -> np.ndarray:
    if not columns:
        return np.full(num_rows, np.nan)
    stacked = np.stack(columns)
    factors = np.ones(len(columns)) if not weights or len(weights) != len(columns) else np.asarray(weights, np.float64)
    known = ~np.isnan(stacked)
    total = (np.where(known, stacked, 0.0) * factors[:, None]).sum(axis=0)
    return np.where(known.any(axis=0), total, np.nan)


def _num_tokens(file: Any, schema: Any, table: Any) -> np.ndarray:
    """Returns the number of tokens of each completion; their ids are read in batches and not kept."""
    if "completion_ids" not in schema.names:
        return np.zeros(table.num_rows, np.int64)
    lengths = [
        np.asarray(batch.column(0).value_lengths().fill_null(0))
        for batch in file.iter_batches(batch_size=256, columns=["completion_ids"], use_threads=False)
    ]
    return np.concatenate(lengths).astype(np.int64) if lengths else np.zeros(0, np.int64)


def _floats(table: Any, name: str) -> np.ndarray:
    """Returns a column as float64; null and values that are no numbers become NaN."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    values = table.column(name).to_pylist()
    return np.array([float(value) if isinstance(value, int | float) else np.nan for value in values], np.float64)


def _list_values(scalar: Any) -> np.ndarray:
    values = scalar.values
    return np.zeros(0) if values is None else np.asarray(values.to_numpy(zero_copy_only=False))


def _of_tokens(scalar: Any, num_tokens: int) -> np.ndarray:
    """Returns a list as [num_tokens] float64, NaN where the row has no value."""
    values = _list_values(scalar)[:num_tokens].astype(np.float64)
    return np.concatenate([values, np.full(num_tokens - len(values), np.nan)])


def _is_list(kind: Any) -> bool:
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)


def _bytes(scalar: Any) -> bytes:
    buffer = scalar.as_buffer() if hasattr(scalar, "as_buffer") else None
    return b"" if buffer is None else bytes(buffer)


def _text(scalar: Any, limit: int | None) -> tuple[str, int]:
    """Returns the text of a scalar and its bytes; invalid UTF-8 becomes replacement characters."""
    if hasattr(scalar, "dictionary"):
        scalar = scalar.dictionary[scalar.index.as_py()]
    buffer = scalar.as_buffer() if hasattr(scalar, "as_buffer") else None
    if buffer is None:
        return "", 0
    content = bytes(buffer if limit is None else buffer.slice(0, min(limit, buffer.size)))
    text = content.decode("utf-8", errors="replace")
    return (text.rstrip("\ufffd") if buffer.size > len(content) else text), buffer.size


def _any_text(scalar: Any) -> str:
    """Returns a value of any type as text."""
    return _text(scalar, None)[0] if hasattr(scalar, "as_buffer") else str(scalar.as_py())
