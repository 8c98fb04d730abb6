"""Sections of a model's card about its run. Imports no jax.

Cards are published, so they have no prompts, no completions, no texts of diagnostics, and names instead of paths.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupax.runs.model_card import shown_name
from groupax.runs.report.contents import Contents, contents_of, repeating_command
from groupax.runs.report.page import sparklines, table
from groupax.runs.report.record import RunRecord, read_run
from groupax.terminal.printable import one_line

CURVES = ("reward", "evaluation", "loss", "KL to the reference, nats", "entropy, nats", "completion length, tokens")
MAX_COMMAND = 4000  # characters


def run_sections(folder: Path) -> str:
    """Returns sections in Markdown about the run in a folder; empty before its first logged step."""
    try:
        run = read_run(folder, has_samples=False)
    except ValueError:
        return ""
    contents = contents_of(run)
    curves = [each for each in contents.curves if each.title in CURVES]
    found = [(str(each["name"]), each["severity"], str(each["step"])) for each in contents.diagnostics]
    sections = {
        "Command": _command(run),
        "Before and after": _before_and_after(contents),
        "Curves over optimizer steps": table(sparklines(curves)),
        "Diagnostics": table([("", "severity", "step"), *found]),
        "Hardware and software": table(contents.hardware),
    }
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)


def _before_and_after(contents: Contents) -> str:
    tables = [rows for rows in (contents.evaluations, contents.changes) if len(rows) > 1]
    return "\n\n".join(table(rows) for rows in tables)


def _command(run: RunRecord) -> str:
    """Returns the command as a block of code, with names of files and folders instead of their paths."""
    if run.command is None:
        return ""
    command = {name: _without_paths(value) for name, value in run.command.items()}
    settings = {name: (_without_paths(value), default) for name, (value, default) in run.settings.items()}
    text = one_line(repeating_command(command, settings), MAX_COMMAND).replace("`", "'")
    return f"```\n{text}\n```"


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return shown_name(value)
    return list(map(_without_paths, value)) if isinstance(value, Sequence) else value
