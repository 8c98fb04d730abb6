"""`groupax bisect`: the step that a metric went wrong in."""

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from groupax.cli.replay import maker, trained_command
from groupax.settings.command_line import parsed
from groupax.terminal.printable import printable


@dataclass(frozen=True, kw_only=True)
class Bisect:
    """Find the first step whose metrics fulfil a condition, and compute it and the steps before it again.

    A step that is not the recorded one with today's dataset, rewards and settings names what has changed.
    """

    run_dir: tyro.conf.Positional[str]
    """Run folder. Nothing in it is changed."""
    until: str
    """The condition, such as 'kl > 1' or 'grad_norm > 10 or loss is nan'."""
    window: int = 3
    """Number of steps to compute again, of which the last one is the first that fulfils the condition."""


def bisect(arguments: Sequence[str]) -> None:
    """Runs `groupax bisect`."""
    command = parsed(Bisect, "bisect", arguments)

    from groupax.replay.bisect import first_line, parting_step
    from groupax.replay.expression import parsed_condition
    from groupax.replay.recorded import recorded_run
    from groupax.replay.show import comparison
    from groupax.replay.trainer import Target

    if command.window < 1:
        raise ValueError(f"--window must be at least 1, got {command.window}")
    run = recorded_run(command.run_dir.rstrip("/"))
    step, before = first_line(run.metrics, parsed_condition(command.until))
    print(printable(f"the first step with {command.until}: {step}, after the line of metrics of step {before}"))
    trained = trained_command(str(run.folder))
    steps = range(max(1, step - command.window + 1), step + 1)
    outcomes = parting_step(Target(run, step), maker(trained, "none"), trained.args, steps)
    is_equal = True
    for outcome in outcomes:
        is_equal = outcome.is_equal
        if is_equal:
            print(f"step {outcome.step} is the recorded one, with the same data, rewards and settings")
        else:
            print(*map(printable, comparison(outcome)), sep="\n")
    if is_equal:
        print("the run computes the same today: look at these steps in groupax view, or replay them with --with")
