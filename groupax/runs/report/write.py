"""Writes the report of a run. Imports no jax."""

from pathlib import Path

from groupax.runs.report.contents import contents_of
from groupax.runs.report.page import html_page, markdown
from groupax.runs.report.record import read_run


def write_run_report(folder: Path, to: Path | None = None, price_per_hour: float | None = None) -> tuple[Path, Path]:
    """Writes `report.html` and `report.md`.

    Args:
        folder: The run folder.
        to: Folder for the two files; None for the run folder.
        price_per_hour: Price of a device, or of the machine if it trains on CPU.

    Returns:
        The two files.

    Raises:
        ValueError: The folder has no run, or its run has no logged step yet.
    """
    report = contents_of(read_run(folder), price_per_hour)
    to = to or folder
    to.mkdir(parents=True, exist_ok=True)
    files = to / "report.html", to / "report.md"
    for path, text in zip(files, (html_page(report), markdown(report)), strict=True):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return files
