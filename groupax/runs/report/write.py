"""Writes a run's report. Imports no jax."""

from pathlib import Path

from groupax.runs.report.contents import contents_of
from groupax.runs.report.page import html_page, markdown
from groupax.runs.report.record import read_run


def write_run_report(folder: Path, to: Path | None = None, price_per_hour: float | None = None) -> tuple[Path, Path]:
    """Write `report.html` and `report.md`.

    Args:
        folder: of the run.
        to: folder for the two; by default the run's.
        price_per_hour: of a device, or of the machine if it trains on CPU.

    Returns:
        The two files.

    Raises:
        ValueError: the folder has no run, or none that has come to a logged step.
    """
    report = contents_of(read_run(folder), price_per_hour)
    to = to or folder
    to.mkdir(parents=True, exist_ok=True)
    files = to / "report.html", to / "report.md"
    for path, text in zip(files, (html_page(report), markdown(report)), strict=True):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return files
