"""The commands `groupax compare` and `groupax report`. Imports heavy modules lazily."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from groupax.settings.command_line import parsed

if TYPE_CHECKING:
    from groupax.evaluation.items import Comparison

Positional = tyro.conf.Positional


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two evaluations on their common items: differences with 95 % intervals, and statistical tests."""

    before: Annotated[Path, Positional]
    """An output folder of `groupax eval`, or a .jsonl file with items of one set, also from a run's evaluations/."""
    after: Annotated[Path, Positional]
    """Another one, on the same prompts."""
    to: Path | None = None
    """File for the comparison as JSON. By default none is written."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a run's report, for example for a pull request: report.html, which is self-contained, and report.md."""

    run_dir: Annotated[Path, Positional]
    """The run's folder."""
    to: Path | None = None
    """Folder for the two files; by default the run's."""
    price_per_hour: float | None = None
    """Price of a device, or of the machine if it trains on CPU; adds the cost of the run to the report."""


def compare(arguments: Sequence[str]) -> None:
    """Runs `groupax compare`."""
    command = parsed(Compare, "compare", arguments)

    from groupax.cli.summary import difference_table, plain_differences
    from groupax.evaluation.items import compare as compare_items
    from groupax.evaluation.items import read_items
    from groupax.terminal.tables import output_console

    console = output_console()
    written = {}
    pairs = _common_files(command.before, command.after)
    for side in (command.before, command.after):
        if alone := sorted({each.stem for each in side.glob("*.jsonl")} - pairs.keys()):
            console.print(f"evaluated only in {side}: {', '.join(alone)}", soft_wrap=True, markup=False)
    for name, (before, after) in pairs.items():
        comparison = compare_items(read_items(before), read_items(after))
        console.print(difference_table(f"{name}: {comparison.num_items:,} common items", comparison, {}, {}))
        if comparison.num_only_before or comparison.num_only_after:
            console.print(
                f"omitted: {comparison.num_only_before:,} items only in {command.before}, "
                f"{comparison.num_only_after:,} only in {command.after}",
                soft_wrap=True,
            )
        for side, names in ((command.before, comparison.metrics_before), (command.after, comparison.metrics_after)):
            if names:
                console.print(f"only in {side}: {', '.join(names)}", soft_wrap=True, markup=False)
        if comparison.has_other_rewards:
            console.print("their rewards are of different functions, so the totals are not compared", soft_wrap=True)
        console.print(f"{_methods(comparison)}\n", soft_wrap=True, markup=False)
        written[name] = plain_differences(comparison)
    if command.to is not None:
        command.to.parent.mkdir(parents=True, exist_ok=True)
        command.to.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def report(arguments: Sequence[str]) -> None:
    """Runs `groupax report`."""
    command = parsed(Report, "report", arguments)

    from groupax.runs.report.page import write_run_report

    if command.price_per_hour is not None and not command.price_per_hour >= 0:
        raise ValueError(f"--price_per_hour must be at least 0, got {command.price_per_hour}")
    page, markdown = write_run_report(command.run_dir, command.to, command.price_per_hour)
    print(f"report: {page} and {markdown}")


def _common_files(before: Path, after: Path) -> dict[str, tuple[Path, Path]]:
    """Returns the pairs of files to compare, by name.

    Raises:
        ValueError: There are none.
    """
    if before.is_file() and after.is_file():
        return {after.stem: (before, after)}
    for path in (before, after):
        if not path.is_dir():
            raise ValueError(f"{path} is {'a file and the other a folder' if path.is_file() else 'missing'}")
    names = sorted({path.name for path in before.glob("*.jsonl")} & {path.name for path in after.glob("*.jsonl")})
    if not names:
        raise ValueError(f"{before} and {after} have no .jsonl file of the same name: no set was evaluated in both")
    return {Path(name).stem: (before / name, after / name) for name in names}


def _methods(comparison: "Comparison") -> str:
    """Returns how the intervals and the p-values of a comparison were computed."""
    from groupax.evaluation.paired import METHODS

    by_method: dict[tuple[str, str], list[str]] = {}
    for name, pair in comparison.differences.items():
        by_method.setdefault((pair.difference.method, pair.test), []).append(name)
    return "\n".join(
        f"95 % intervals by {METHODS[interval]}, p-values by {METHODS[test]}: {', '.join(names)}"
        for (interval, test), names in by_method.items()
    )
