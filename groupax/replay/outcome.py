"""A step that was computed again, and the texts about it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupax.replay.compare import Columns, StageResult
from groupax.replay.shares import Shares
from groupax.replay.trainer import Target
from groupax.runs.step_record import StepRecord
from groupax.terminal.printable import printable

SHOWN_TOKENS = 10
METRICS = ("reward", "loss", "grad_norm", "kl", "entropy", "learning_rate", "completions/mean_length")


@dataclass(frozen=True)
class Outcome:
    """A step that was computed again.

    Attributes:
        target: The step.
        first_step: Step after which the replay started.
        record: Its digests.
        columns: Its completions, as in the rollout log.
        metrics: Its metrics.
        stages: Comparison with the run's.
        parted_at: First earlier step whose weights were not the run's; None if they all were.
        sampled: Earlier rollouts that were sampled again because they were not kept, by number.
        machine: How the machine and the libraries differ from those of the run.
        shares: The shares of its rows in the gradient, if they were asked for.
        moves: Of a step under changes with the same tokens: the KL between the policies before and after the update, in
            the run and under changes.
        is_forced: Whether the stages after the rollout have the run's completions, as other ones came out.
    """

    target: Target
    first_step: int
    record: StepRecord
    columns: Columns
    metrics: Mapping[str, Any]
    stages: tuple[StageResult, ...]
    parted_at: int | None
    sampled: tuple[int, ...]
    machine: tuple[str, ...]
    shares: Shares | None = None
    moves: tuple[float, ...] = ()
    is_forced: bool = False

    @property
    def has_other_tokens(self) -> bool:
        """True if completions differ from those of the run, where these were kept."""
        then = self.target.run.table(self.step)
        return then is not None and then["completion_ids"] != self.columns.get("completion_ids")

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.target.step

    @property
    def is_equal(self) -> bool:
        """True if every stage has the bits of the run."""
        return self.parted_at is None and all(stage.is_equal for stage in self.stages)

    def __str__(self) -> str:
        lines = changes(self) if self.target.is_changed else comparison(self)
        shares = () if self.shares is None else self.shares.lines()
        return "\n".join(map(printable, [*lines, *shares]))


def comparison(outcome: Outcome) -> Iterator[str]:
    """Yields the lines of a replay: every stage with its first difference."""
    yield f"step {outcome.step}, after {outcome.step - 1 - outcome.first_step} updates on recorded rollouts:"
    if outcome.target.run.settings(outcome.step).get("rollout_servers") and outcome.target.stage != "data":
        yield "  servers sampled its completions, which are those of the record; --stage rollout samples them here"
    if outcome.sampled:
        yield f"  rollouts {', '.join(map(str, outcome.sampled))} were not kept and have been sampled again"
    for change in outcome.machine:
        yield f"  {change}: sums may round differently"
    if outcome.parted_at is not None:
        yield f"  the weights already differ after step {outcome.parted_at}"
    for stage in outcome.stages:
        if outcome.is_forced and stage.stage == "reward":
            yield "  from here on with the completions of the run:"
        yield f"  {stage.stage:10} {'equal' if stage.is_equal else f'DIFFERS: {stage.text}'}"


def changes(outcome: Outcome) -> Iterator[str]:
    """Yields the lines of a step under changes: what differs by metric, group and token."""
    run, step = outcome.target.run, outcome.step
    then, text_of = run.table(step), _text_of(run.folder / "tokenizer")
    metrics = next((line for line in run.metrics if line["step"] == step and "loss" in line), {})
    differing = (stage.stage for stage in outcome.stages if not stage.is_equal)
    stage = next(differing, outcome.target.stage)
    yield f"step {outcome.step} under changes, from its {stage} on"
    yield f"  {'':26}{'run':>14}{'changed':>14}"
    for name in METRICS:
        if name in metrics or name in outcome.metrics:
            yield f"  {name:26}{_number(metrics.get(name)):>14}{_number(outcome.metrics.get(name)):>14}"
    if outcome.moves:
        before, after = map(_number, outcome.moves)
        yield f"  {'kl of the update':26}{before:>14}{after:>14}"
    if then is None:
        yield "  its completions were not kept, so that groups and tokens cannot be compared"
        return
    yield ""
    yield "  group  rows (run, changed)  with other tokens   mean reward (run, changed)   advantages change by up to"
    yield from _groups(then, outcome.columns)
    yield ""
    yield from _tokens(then, outcome.columns, text_of)


def _text_of(folder: Path) -> Callable[[int], str]:
    """Returns a function that returns the text of a token in quotes; of a run without a tokenizer it is empty."""
    if not folder.is_dir():
        return lambda _: ""
    from groupax.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return lambda token: json.dumps(tokenizer.decode([token]), ensure_ascii=False)


def _groups(then: Columns, now: Columns) -> Iterator[str]:
    rows_now = _by_place(now)
    for group in sorted({*then["prompt_index"], *now["prompt_index"]}):
        own, others = ([row for row, each in enumerate(c["prompt_index"]) if each == group] for c in (then, now))
        pairs = [(row, rows_now[place]) for row in own if (place := _place(then, row)) in rows_now]
        differ = sum(then["completion_ids"][a] != now["completion_ids"][b] for a, b in pairs)
        moved = max((abs(now["advantage"][b] - then["advantage"][a]) for a, b in pairs), default=0.0)
        counts, changed = f"{len(own)}, {len(others)}", f"{differ} of {len(pairs)}"
        rewards = f"{_mean_reward(then, own):>12} {_mean_reward(now, others):>12}"
        yield f"  {group:5}  {counts:>19}  {changed:>17}    {rewards}   {moved:>12.4g}"


def _tokens(then: Columns, now: Columns, text_of: Callable[[int], str]) -> Iterator[str]:
    """Yields the tokens of rows with the same tokens whose log-prob under the policy changes most."""
    rows_now, found = _by_place(now), []
    for a in range(len(then["prompt_index"])):
        b = rows_now.get(_place(then, a))
        if b is None or then["completion_ids"][a] != now["completion_ids"][b]:
            continue
        old, new = then["trainer_logps"][a], now["trainer_logps"][b]
        if old is None or new is None:
            continue
        change = np.subtract(new, old) * (1 if "mask" not in then else np.asarray(then["mask"][a]))
        found += [(abs(float(x)), a, at, old[at], new[at]) for at, x in enumerate(change) if x]
    if not found:
        yield "  no log-prob of a token that is the same in both differs"
        return
    yield f"  tokens whose log-prob changes most, of {len(found)}:"
    yield "    row  token  id        run      changed"
    for _, row, at, old, new in sorted(found, key=lambda each: -each[0])[:SHOWN_TOKENS]:
        token = then["completion_ids"][row][at]
        yield f"  {row:5} {at:6}  {token:<6} {old:>10.5g} {new:>12.5g}   {text_of(token)}".rstrip()


def _by_place(columns: Columns) -> dict[tuple[int, int], int]:
    return {_place(columns, row): row for row in range(len(columns["prompt_index"]))}


def _place(columns: Columns, row: int) -> tuple[int, int]:
    return columns["prompt_index"][row], columns["sample_index"][row]


def _mean_reward(columns: Columns, rows: Sequence[int]) -> str:
    names = [name for name in columns if name.startswith("rewards/")]
    values = [[columns[name][row] for name in names] for row in rows]
    scored = [sum(each) for row in values if (each := [value for value in row if value is not None])]
    return f"{np.mean(scored):.4g}" if scored else "none"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
