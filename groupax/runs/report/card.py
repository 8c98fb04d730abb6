"""Sections of a model's card about its run. Imports no jax.

Cards are published, so they have no prompts, no completions, no texts of diagnostics, and names instead of paths.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupax.runs.model_card import shown_name
from groupax.runs.report.contents import Contents, contents_of, repeating_command
from groupax.runs.report.page import code, sparklines, table
from groupax.runs.report.record import NoStepsError, RunRecord, read_run
from groupax.terminal.printable import one_line

CURVES = ("reward", "evaluation", "loss", "KL to the reference, nats", "entropy, nats", "completion length, tokens")
ESTIMATES = ("pass@1", "reward")  # of held-out prompts
MAX_COMMAND = 4000  # characters


def run_sections(folder: Path, estimates: Mapping[int, Mapping[str, Mapping[str, Any]]] | None = None) -> str:
    """Returns sections in Markdown about the run in a folder; empty before its first logged step.

    Args:
        folder: The run folder.
        estimates: Means over held-out prompts, by the step after which they were measured, the set and the metric;
            shown if the folder has no evaluation.
    """
    try:
        run = read_run(folder, has_samples=False)
    except NoStepsError:
        return ""
    contents = contents_of(run)
    curves = [each for each in contents.curves if each.title in CURVES]
    found = [(str(each["name"]), each["severity"], str(each["step"])) for each in contents.diagnostics]
    sections = {
        "Command": _command(run),
        "Held-out prompts": _held_out(contents, estimates or {}),
        "Curves over optimizer steps": table(sparklines(curves)),
        "Diagnostics": table([("", "severity", "step"), *found]),
        "Hardware and software": table(contents.hardware),
    }
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)


def _held_out(contents: Contents, estimates: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    tables = [contents.evaluations or _measured(estimates), contents.changes]
    return "\n\n".join(table(rows) for rows in tables if len(rows) > 1)


def _measured(estimates: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Sequence[Sequence[str]]:
    """Returns a table of the first and the last means."""
    steps = sorted({min(estimates), max(estimates)}) if estimates else []
    rows = [("means with 95 % intervals", *(f"after step {step}" for step in steps))]
    for name, last in estimates[steps[-1]].items() if steps else ():
        for key in ESTIMATES:
            if key in last:
                values = [str(estimates[step][name].get(key, "")) for step in steps]
                rows.append((f"{name}: {key} ({last[key].num_items} prompts)", *values))
    return rows


def _command(run: RunRecord) -> str:
    """Returns the command as a block of code, with names of files and folders instead of their paths."""
    if run.command is None:
        return ""
    command = {name: _without_paths(value) for name, value in run.command.items()}
    settings = {name: (_without_paths(value), default) for name, (value, default) in run.settings.items()}
    return code(one_line(repeating_command(command, settings), MAX_COMMAND))


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return shown_name(value)
    return list(map(_without_paths, value)) if isinstance(value, Sequence) else value
