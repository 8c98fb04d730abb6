"""Draws what a terminal shows during `groupax train`, at two widths, from a real run on a pseudo-terminal.

    python dev/terminal_captures.py

writes docs/images/terminal_80.svg and terminal_120.svg.
"""

import html
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from groupax.recipes import load_recipe  # noqa: E402
from tests.runs.terminals import Terminal  # noqa: E402

IMAGES = ROOT / "docs" / "images"
NO_BREAK = "\N{NO-BREAK SPACE}"  # neighbouring spaces would become one
CELL, LINE, MARGIN = 8.0, 18, 14  # pixels
COLORS = {"default": "#d8dee9", "cyan": "#7fc8d6", "green": "#98c37a", "brown": "#e0b970", "red": "#e0787c"}


def main() -> None:
    """Draws both terminals in the middle of a run."""
    for columns in (80, 120):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(load_recipe("arithmetic").model, Path(folder) / "arithmetic")
            os.chdir(folder)
            settings = "--model arithmetic --max_steps 40 --prompts_per_step 8 --output_dir runs/demo"
            argv = [sys.executable, "-m", "groupax", "train", "--recipe", "arithmetic", *settings.split()]
            with Terminal(argv, columns, rows=40) as terminal:
                terminal.wait_for(lambda: _is_whole(terminal.lines))
                (IMAGES / f"terminal_{columns}.svg").write_text(svg(terminal.screen), encoding="utf-8")
                print(f"written: {IMAGES / f'terminal_{columns}.svg'}")


def _is_whole(lines: list[str]) -> bool:
    """Returns whether the screen shows a step in the middle of the run, down to the end of the table."""
    return any(f"step {step}/40" in line for line in lines for step in range(20, 30)) and lines[-1].endswith("┘")


def svg(screen: Any) -> str:
    """Returns a screen of pyte as an image."""
    last = max((row for row in range(screen.lines) if screen.display[row].strip()), default=0)
    width, height = screen.columns * CELL + 2 * MARGIN, (last + 1) * LINE + 2 * MARGIN
    texts = [text for row in range(last + 1) for text in _texts(screen, row)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#20242c"/>\n' + "\n".join(texts) + "\n</svg>\n"
    )


def _texts(screen: Any, row: int) -> Iterator[str]:
    """Yields the texts of a line, one for each stretch of cells with the same color."""
    cells = [screen.buffer[row][column] for column in range(screen.columns)]
    start = 0
    for end in range(1, screen.columns + 1):
        if end < screen.columns and (cells[end].fg, cells[end].bold) == (cells[start].fg, cells[start].bold):
            continue
        text = "".join(cell.data for cell in cells[start:end]).rstrip()
        if text:
            weight = ' font-weight="bold"' if cells[start].bold else ""
            fill = COLORS.get(cells[start].fg, f"#{cells[start].fg}" if len(cells[start].fg) == 6 else "#d8dee9")
            yield (
                f'<text x="{MARGIN + start * CELL:.0f}" y="{MARGIN + (row + 1) * LINE - 5}" fill="{fill}"{weight} '
                f'textLength="{len(text) * CELL:.0f}">{html.escape(text.replace(" ", NO_BREAK))}</text>'
            )
        start = end


if __name__ == "__main__":
    main()
