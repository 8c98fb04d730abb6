"""The shares of a step's rows in its gradient, and the file that `groupax view` reads them from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupax.replay.moments import Moment
from groupax.replay.recorded import RecordedRun
from groupax.replay.trainer import ReplayTrainer
from groupax.runs.files import replace_text
from groupax.runs.rollout_log import beginning, prompt_text
from groupax.training.influence import Influence, influence_of
from groupax.types import Rollout

SHOWN_ROWS = 8


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of a step's completions in its gradient.

    Attributes:
        step: The step.
        influence: Influence of each completion that it trained on.
        completions: Indices of these completions.
        rollouts: All completions of its rollout.
        prompts: Their prompts as the run had them.
    """

    step: int
    influence: Influence
    completions: Sequence[int]
    rollouts: Sequence[Rollout]
    prompts: Sequence[str]

    def lines(self) -> Iterator[str]:
        """Yields the largest ones as text."""
        yield f"rows of step {self.step} by their share of the gradient:"
        yield from share_lines(self.influence, self.completions, self.rollouts, self.prompts)

    def write(self, run: Path) -> Path:
        """Writes all of them into a run folder, and returns the path of the file."""
        path = run / "why" / f"step_{self.step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        record = why_record(self.step, self.influence, self.completions, self.rollouts)
        replace_text(path, json.dumps(record) + "\n")
        return path


def observe_shares(trainer: ReplayTrainer, found: list[Shares]) -> None:
    """Has a trainer compute the shares of its target before the update, into a list."""

    def compute(step: int, moment: Moment) -> None:
        parts = moment.parts()
        influence = influence_of(trainer.learner, moment.rows, [*parts.values()])
        prompts = shown_prompts(trainer.target.run, step, moment.completions)
        found.append(Shares(step, influence, tuple(parts), moment.completions, prompts))

    trainer.observe = compute


def shown_prompts(run: RecordedRun, step: int, rollouts: Sequence[Rollout]) -> list[str]:
    """Returns the ends of the prompts of completions: as the run had them, if these were kept, else as of today."""
    table = run.table(step) or {"prompt_index": [], "sample_index": [], "prompt": []}
    places = zip(table["prompt_index"], table["sample_index"], strict=True)
    known = dict(zip(places, table["prompt"], strict=True))
    texts = (known.get((each.prompt_index, each.sample_index)) or prompt_text(each.prompt) for each in rollouts)
    return [*map(end_of_prompt, texts)]


def end_of_prompt(text: str) -> str:
    """Returns the end of a prompt of the rollout log: of a conversation, that of its last message's text."""
    try:
        messages = json.loads(text)
        content = messages[-1]["content"]
        parts = [part["text"] for part in content if "text" in part] if isinstance(content, list) else [content]
        text = "".join(parts)
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    return text if len(text) <= 40 else f"…{text[-40:]}"


def share_lines(
    influence: Influence, completions: Sequence[int], rollouts: Sequence[Rollout], prompts: Sequence[str]
) -> Iterator[str]:
    """Yields the completions with the largest shares of a gradient.

    Args:
        influence: Their influence.
        completions: Their indices.
        rollouts: All completions of the rollout.
        prompts: The prompts of these.
    """
    rows = sorted(zip(completions, influence.shares, influence.norms, strict=True), key=_most)
    yield "     share   norm of its gradient"
    for index, share, norm in rows[:SHOWN_ROWS]:
        yield f"  {_percent(share):>8}   {shown_number(norm):>10}   {place(rollouts[index], index, prompts[index])}"
    if len(rows) > SHOWN_ROWS:
        rest = [share for _, share, _ in rows[SHOWN_ROWS:] if share == share]
        yield f"  {_percent(sum(rest)):>8}   of the {len(rows) - SHOWN_ROWS} others together"


def place(rollout: Rollout, index: int, prompt: str) -> str:
    """Returns a completion's place in its step with its reward, its advantage, its prompt and its beginning."""
    rewards = ", ".join(f"{name} {shown_number(value)}" for name, value in rollout.rewards.items())
    texts = (json.dumps(text, ensure_ascii=False) for text in (prompt, beginning(rollout.text, 60)))
    return (
        f"row {index} (group {rollout.prompt_index}, sample {rollout.sample_index}; {rewards}; advantage "
        f"{shown_number(rollout.advantage)}) {' → '.join(texts)}"
    )


def why_record(step: int, influence: Influence, completions: Sequence[int], rollouts: Sequence[Rollout]) -> Any:
    """Returns the influence of a step's completions as plain data, for its file in `why/`."""
    rows = zip(completions, influence.shares, influence.norms, strict=True)
    return {
        "step": step,
        "norm": influence.norm,
        "rows": [
            {
                "prompt_index": rollouts[index].prompt_index,
                "sample_index": rollouts[index].sample_index,
                "share": _finite(share),
                "norm": _finite(norm),
            }
            for index, share, norm in rows
        ],
    }


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
