"""The shares of a step's rows in its gradient, and the file that `groupax view` reads them from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.replay.influence import Influence, influence_of
from groupax.replay.moments import Moment
from groupax.replay.recorded import RecordedRun
from groupax.replay.trainer import ReplayTrainer
from groupax.runs.files import replace_text
from groupax.runs.rollout_log import beginning, prompt_text
from groupax.types import Rollout
from groupax.view.rollouts import shown_prompt

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
        rows = sorted(self._rows(), key=_most)
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


def _most(row: tuple[int, float, float]) -> tuple[bool, float]:
    share = row[1]
    return share == share, 0.0 if share != share else -abs(share)


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _percent(share: float) -> str:
    return "not finite" if share != share else f"{100 * share:.1f} %".replace("-0.0 ", "0.0 ")


def shown_number(value: Any) -> str:
    """Returns a number as text; one that is missing is not finite."""
    if value is None or value != value:
        return "not finite"
    return f"{value:.5g}"
