"""The command `groupax doctor`."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupax.core.settings.command_line import parsed
from groupax.core.terminal.printable import printable


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check what groupax finds and can do on this machine: versions, devices, kernels, a small model's first steps.

    It takes at most a few minutes and ends with status 1 if something needs attention.
    """

    emulate: bool = False
    """Check the kernels for accelerators too, emulated by operations that every device has."""
    json: Path | None = None
    """File to which everything is written as JSON, e.g. to attach to a report."""


def doctor(arguments: Sequence[str]) -> int:
    """Runs `groupax doctor`."""
    command = parsed(Doctor, "doctor", arguments)

    from groupax.satellites import doctor as checks

    rows: list[checks.Row] = []
    numbers: dict[str, object] = {}
    started_s = time.perf_counter()

    def show(found: checks.Row) -> None:
        rows.append(found)
        print(printable(f"{'!!' if found.remedy else 'ok'}  {found.name:30} {found.found}"), flush=True)
        if found.remedy:
            print(printable(f"    {'':30} → {found.remedy}"), flush=True)

    for each in (*checks.software(), *checks.machine()):
        show(each)
    # kernels first, whose findings the other parts use
    parts = {"kernels": lambda: checks.kernels(command.emulate), "peaks": checks.peaks, "training": checks.training}
    for name, part in parts.items():
        found, numbers[name] = part()
        for each in found:
            show(each)
    problems = [each for each in rows if each.remedy]
    seconds = time.perf_counter() - started_s
    print(f"\n{f'{len(problems)} to look at' if problems else 'all is well'}, after {seconds:.0f} s")
    if command.json is not None:
        record = {"rows": [vars(each) for each in rows], "numbers": numbers, "seconds": seconds}
        command.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0
