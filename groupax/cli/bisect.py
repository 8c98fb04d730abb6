"""`groupax bisect`: the step that a metric went wrong in, and what differs in it today."""

from collections.abc import Sequence
from dataclasses import dataclass

from groupax.cli.replay import maker
from groupax.core.settings.command_line import Positional, parsed
from groupax.core.terminal.printable import printable


@dataclass(frozen=True, kw_only=True)
class Bisect:
    """Find the first step whose metrics fulfil a condition, and what made it so.

    The steps up to it are computed again. One that is not the recorded one with today's dataset, rewards and settings
    names what has changed.
    """

    run_dir: Positional[str]
    """Run folder. Nothing in it is changed."""
    until: str
    """The condition, such as 'kl > 1' or 'grad_norm > 10 or loss is nan'."""
    window: int = 8
    """Number of steps to compute again, of which the last one is the first that fulfils the condition."""


def bisect(arguments: Sequence[str]) -> None:
    """Runs `groupax bisect`."""
    command = parsed(Bisect, "bisect", arguments)

    from groupax.satellites.replay.bisect import bisected, bisection_lines, first_line, opening, parsed_condition
    from groupax.satellites.replay.recorded import recorded_run

    run, condition = recorded_run(command.run_dir.rstrip("/")), parsed_condition(command.until)
    step, before = first_line(run.metrics, condition)
    _print(opening(condition, step, before))
    found = bisected(run, condition, maker(run, "none"), command.window)
    _print(*bisection_lines(found))


def _print(*lines: str) -> None:
    print(*map(printable, lines), sep="\n", flush=True)
