"""A step that was computed again: its comparison with the record, the shares of its rows, and the texts about them."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupax.core.terminal.printable import printable
from groupax.core.types import Rollout
from groupax.runs.files import replace_text
from groupax.runs.rollout_log import beginning, prompt_text
from groupax.runs.step_record import STAGES, Stage, StepRecord
from groupax.satellites.replay.influence import Influence, influence_of
from groupax.satellites.replay.recorded import RecordedRun
from groupax.satellites.replay.trainer import Moment, ReplayTrainer, Target
from groupax.satellites.view.rollouts import shown_prompt

SHOWN_ROWS = 8
PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 40, 60


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of a step's completions in its gradient.

    Attributes:
        step: The step.
        influence: Influence of each completion that it trained on.
        completions: Indices of these completions.
        rollouts: All completions of its rollout.
        prompts: Their prompts as texts: as the run had them if these were kept, else as of today.
    """

    step: int
    influence: Influence
    completions: Sequence[int]
    rollouts: Sequence[Rollout]
    prompts: Sequence[str]

    def lines(self) -> Iterator[str]:
        """Yields the largest ones as text."""
        yield f"rows of step {self.step} by their share of the gradient:"
        rows = sorted(self._rows(), key=lambda row: -abs(row[1]) if row[1] == row[1] else -math.inf)
        yield "     share   norm of its gradient"
        for index, share, norm in rows[:SHOWN_ROWS]:
            yield f"  {_percent(share):>8}   {shown_number(norm):>10}   {self.place(index)}"
        if len(rows) > SHOWN_ROWS:
            rest = [share for _, share, _ in rows[SHOWN_ROWS:] if share == share]
            yield f"  {_percent(sum(rest)):>8}   of the {len(rows) - SHOWN_ROWS} others together"

    def place(self, index: int) -> str:
        """Returns a completion's place in the step with its reward, its advantage, its prompt and its beginning."""
        rollout, prompt = self.rollouts[index], shown_prompt(self.prompts[index])
        prompt = prompt if len(prompt) <= PROMPT_CHARACTERS else f"…{prompt[-PROMPT_CHARACTERS:]}"
        texts = (
            json.dumps(text, ensure_ascii=False) for text in (prompt, beginning(rollout.text, COMPLETION_CHARACTERS))
        )
        rewards = ", ".join(f"{name} {shown_number(value)}" for name, value in rollout.rewards.items())
        return (
            f"row {index} (group {rollout.prompt_index}, sample {rollout.sample_index}; {rewards}; advantage "
            f"{shown_number(rollout.advantage)}) {' → '.join(texts)}"
        )

    def write(self, run: Path) -> Path:
        """Writes all of them into a run folder, and returns the path of the file."""
        path = run / "why" / f"step_{self.step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        rows = [
            {
                "prompt_index": self.rollouts[index].prompt_index,
                "sample_index": self.rollouts[index].sample_index,
                "share": _finite(share),
                "norm": _finite(norm),
            }
            for index, share, norm in self._rows()
        ]
        replace_text(path, json.dumps({"step": self.step, "norm": self.influence.norm, "rows": rows}) + "\n")
        return path

    def _rows(self) -> Iterator[tuple[int, float, float]]:
        return zip(self.completions, self.influence.shares, self.influence.norms, strict=True)


def shares_of(trainer: ReplayTrainer, step: int, moment: Moment) -> Shares:
    """Returns the shares of a step's completions, whose learner must be as it is before the step's update."""
    parts = moment.parts()
    influence = influence_of(trainer.learner, moment.rows, [*parts.values()])
    prompts = _prompts(trainer.target.run, step, moment.completions)
    return Shares(step, influence, tuple(parts), moment.completions, prompts)


def _prompts(run: RecordedRun, step: int, rollouts: Sequence[Rollout]) -> list[str]:
    table = run.table(step) or {"prompt_index": [], "sample_index": [], "prompt": []}
    places = zip(table["prompt_index"], table["sample_index"], strict=True)
    known = dict(zip(places, table["prompt"], strict=True))
    return [known.get((each.prompt_index, each.sample_index)) or prompt_text(each.prompt) for each in rollouts]


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _percent(share: float) -> str:
    return "not finite" if share != share else f"{100 * share:.1f} %".replace("-0.0 ", "0.0 ")


def shown_number(value: Any) -> str:
    """Returns a number as text; one that is missing is not finite."""
    if value is None or value != value:
        return "not finite"
    return f"{value:.5g}"


Columns = Mapping[str, Sequence[Any]]  # of a step's completions, as in the rollout log


@dataclass(frozen=True)
class StageResult:
    """The comparison of a stage.

    Attributes:
        stage: Its name.
        is_equal: Whether all of its bits are those of the record.
        text: The first difference, and the number and size of all of them; empty where there is none.
        places: Numbers of the groups that differ, of the loss those of the update's rows.
    """

    stage: Stage
    is_equal: bool
    text: str = ""
    places: tuple[int, ...] = ()


def compare_step(
    then: StepRecord, now: StepRecord, columns_then: Columns | None, columns_now: Columns | None
) -> list[StageResult]:
    """Returns the comparison of each stage.

    Args:
        then: The record.
        now: The record of the same step, computed again.
        columns_then: The recorded completions; None if they were not kept.
        columns_now: The completions of the step, computed again.
    """
    results = []
    for stage in STAGES:
        a, b = getattr(then, stage), getattr(now, stage)
        numbers = _numbers(stage, then, now)
        if a == b and (stage == "update" or not numbers):  # the learning rate shows in the weights, if they have moved
            results.append(StageResult(stage, is_equal=True))
            continue
        places: tuple[int, ...] = ()
        if isinstance(a, tuple):
            places = tuple(i for i, pair in enumerate(itertools.zip_longest(a, b)) if pair[0] != pair[1])
        listed = ", ".join(map(str, places[:8])) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
        named = [f"{'rows' if stage == 'loss' else 'groups'} {listed}"] if places else []
        found: list[str] = []
        if columns_then is not None and columns_now is not None:
            found = _details(stage, columns_then, columns_now)
        results.append(StageResult(stage, False, "; ".join([*named, *numbers, *found]) or "other bits", places))
    return results


def _numbers(stage: Stage, then: StepRecord, now: StepRecord) -> list[str]:
    """Returns the numbers of a step's record that differ, as texts."""
    if stage == "loss":
        pairs = {"loss": (then.loss_value, now.loss_value), "grad_norm": (then.grad_norm, now.grad_norm)}
    elif stage == "update":
        pairs = {"learning_rate": (then.learning_rate, now.learning_rate)}
    else:
        return []
    differing = [f"{name} {_number(a)} in the run, {_number(b)} now" for name, (a, b) in pairs.items() if a != b]
    return differing or (["other weights"] if stage == "update" else [])


def _details(stage: Stage, then: Columns, now: Columns) -> list[str]:
    """Returns the first completion of a stage that differs, as texts."""
    match stage:
        case "data":
            return _first_value(then, now, "prompt") or ["a column of the dataset other than the prompt"]
        case "rollout":
            tokens = _tokens(then, now, "completion_ids", "token", exact=True)
            found = [*tokens, *_first_value(then, now, "finish_reason")]
            found = found or _tokens(then, now, "policy_logps", "the sampler's log-probs")
            return found or _tokens(then, now, "sampler_logps", "the log-probs of the truncated distribution")
        case "reward":
            names = dict.fromkeys(name for columns in (then, now) for name in columns if name.startswith("rewards/"))
            return [text for name in names for text in _first_value(then, now, name)]
        case "advantage":
            return _first_value(then, now, "advantage")
        case "loss":
            return _tokens(then, now, "trainer_logps", "the trainer's log-probs")
        case _:
            return []


def _first_value(then: Columns, now: Columns, name: str) -> list[str]:
    """Returns the first row whose value of a column differs, as a text; empty if there is none."""
    if (name in then) != (name in now):
        return [f"{name} is {'only in the run' if name in then else 'not in the run'}"]
    if name not in then:
        return []
    pairs = enumerate(zip(then[name], now[name], strict=False))
    rows = [index for index, (a, b) in pairs if a != b and not (a != a and b != b)]  # two NaN are the same
    if not rows:
        return []
    first = rows[0]
    a, b = _shown(then[name][first]), _shown(now[name][first])
    return [f"{name.removeprefix('rewards/')} of {_place(then, first)}: {a} in the run, {b} now ({len(rows)} rows)"]


def _tokens(then: Columns, now: Columns, name: str, label: str, exact: bool = False) -> list[str]:
    """Returns the first token whose value of a column differs, and the number and size of the differences."""
    first, num_rows, num_tokens, num_all, largest = "", 0, 0, 0, 0.0
    for row, (a, b) in enumerate(zip(then.get(name, ()), now.get(name, ()), strict=False)):
        if a is None or b is None:
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        size = min(len(x), len(y))
        differs = ~((x[:size] == y[:size]) | (np.isnan(x[:size]) & np.isnan(y[:size])))
        num_all += size
        if not differs.any() and len(x) == len(y):
            continue
        num_rows += 1
        num_tokens += int(differs.sum())
        at = int(differs.argmax()) if differs.any() else size
        if not exact and differs.any():
            largest = max(largest, float(np.nanmax(np.abs(x[:size] - y[:size]))))
        values = f"{_at(x, at, exact)} in the run, {_at(y, at, exact)} now"
        first = first or f"{label} of {_place(then, row)}, token {at}: {values}"
    if not first:
        return []
    size = "" if exact else f" of {num_all}, by {largest:.2g} at most"
    return [f"{first} ({num_rows} rows, {num_tokens} tokens{size})"]


def _at(values: np.ndarray, index: int, exact: bool) -> str:
    if index >= len(values):
        return "none"
    return str(int(values[index])) if exact else f"{values[index]:.8g}"


def _place(columns: Columns, row: int) -> str:
    return f"row {row} (group {columns['prompt_index'][row]}, sample {columns['sample_index'][row]})"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.8g}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.8g}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
            yield f"  {name:26}{_short(metrics.get(name)):>14}{_short(outcome.metrics.get(name)):>14}"
    if outcome.moves:
        before, after = map(_short, outcome.moves)
        yield f"  {'kl of the update':26}{before:>14}{after:>14}"
    if then is None:
        yield "  its completions were not kept, so that groups and tokens cannot be compared"
        return
    yield ""
    yield "  group  rows (run, changed)  with other tokens   mean reward (run, changed)   advantages change by up to"
    yield from _groups(then, outcome.columns)
    yield ""
    yield from _token_lines(then, outcome.columns, text_of)


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
        pairs = [(row, rows_now[place]) for row in own if (place := _key(then, row)) in rows_now]
        differ = sum(then["completion_ids"][a] != now["completion_ids"][b] for a, b in pairs)
        moved = max((abs(now["advantage"][b] - then["advantage"][a]) for a, b in pairs), default=0.0)
        counts, changed = f"{len(own)}, {len(others)}", f"{differ} of {len(pairs)}"
        rewards = f"{_mean_reward(then, own):>12} {_mean_reward(now, others):>12}"
        yield f"  {group:5}  {counts:>19}  {changed:>17}    {rewards}   {moved:>12.4g}"


def _token_lines(then: Columns, now: Columns, text_of: Callable[[int], str]) -> Iterator[str]:
    """Yields the tokens of rows with the same tokens whose log-prob under the policy changes most."""
    rows_now, found = _by_place(now), []
    for a in range(len(then["prompt_index"])):
        b = rows_now.get(_key(then, a))
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
    return {_key(columns, row): row for row in range(len(columns["prompt_index"]))}


def _key(columns: Columns, row: int) -> tuple[int, int]:
    return columns["prompt_index"][row], columns["sample_index"][row]


def _mean_reward(columns: Columns, rows: Sequence[int]) -> str:
    names = [name for name in columns if name.startswith("rewards/")]
    values = [[columns[name][row] for name in names] for row in rows]
    scored = [sum(each) for row in values if (each := [value for value in row if value is not None])]
    return f"{np.mean(scored):.4g}" if scored else "none"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
