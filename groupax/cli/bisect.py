"""`groupax bisect`: the step, the update and the rows that a metric went wrong by."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from groupax.cli.replay import maker, trained_command
from groupax.settings.command_line import parsed
from groupax.terminal.printable import printable


@dataclass(frozen=True, kw_only=True)
class Bisect:
    """Find the first step whose metrics fulfil a condition, and what made it so.

    The steps up to it are computed again. One that is not the recorded one with today's dataset, rewards and settings
    names what has changed. The update that made the metric go wrong, and its rows, are found by leaving them out.
    """

    run_dir: tyro.conf.Positional[str]
    """Run folder. Nothing in it is changed."""
    until: str
    """The condition, such as 'kl > 1' or 'grad_norm > 10 or loss is nan'."""
    window: int = 8
    """Number of steps to compute again, of which the last one is the first that fulfils the condition. Their weights
    and optimizer states are kept in memory."""


def bisect(arguments: Sequence[str]) -> None:
    """Runs `groupax bisect`."""
    command = parsed(Bisect, "bisect", arguments)

    from groupax.replay.bisect import bisected, first_line
    from groupax.replay.expression import parsed_condition
    from groupax.replay.recorded import recorded_run
    from groupax.replay.session import settings_of
    from groupax.replay.show import comparison
    from groupax.replay.show_cause import cause_lines

    if command.window < 1:
        raise ValueError(f"--window must be at least 1, got {command.window}")
    run, condition = recorded_run(command.run_dir.rstrip("/")), parsed_condition(command.until)
    step, before = first_line(run.metrics, condition)
    earlier = f"; it does not in the line of metrics before it, that of step {before}" if before else ""
    _print(f"{command.until} first holds in step {step}{earlier}")
    trained_command(run, step)
    found = bisected(run, condition, maker(run, "none"), settings_of(run), command.window)
    steps = [outcome.step for outcome in found.outcomes if outcome.is_equal]
    if steps:
        which = f"steps {steps[0]} to {steps[-1]} are" if len(steps) > 1 else f"step {steps[0]} is"
        _print(f"{which} computed as recorded, with the dataset, rewards and settings of today")
    if found.parted is not None:
        _print(*comparison(found.parted))
    if found.cause is None:
        _print(f"the rows that did it were not looked for: {found.why_not}")
    else:
        _print(*cause_lines(found.cause, condition.metrics, command.until))
    step = found.cause.step if found.cause else found.outcomes[-1].step
    folder = shlex.quote(str(run.folder))
    _print(f"look at it: groupax replay {folder} --step {step} --why, then groupax view {folder}")


def _print(*lines: str) -> None:
    print(*map(printable, lines), sep="\n", flush=True)
