"""Tables for terminals of any width, and for notebooks. Imports rich."""

import html
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from groupax.core.terminal.printable import printable

SAMPLE_COLUMNS = 20  # that a column of completions needs to be readable
WIDE = 160  # columns of what is not a terminal, such as a file
_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top;"


def output_console() -> Console:
    """Returns a console on standard output; without a terminal it is wide enough for the names in a table."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if has_width else WIDE)


def table_html(rows: Iterable[Sequence[object]], head: Sequence[str] = (), title: str = "") -> str:
    """Returns rows of texts as a table for a notebook, without effects of markup and control characters in them."""
    parts = [f"<b>{_escaped(title)}</b>"] if title else []
    parts.append('<table style="border-collapse:collapse;margin:4px 0 8px 0">')
    if head:
        cells = "".join(f'<th style="{_CELL}opacity:.65;font-weight:normal">{_escaped(each)}</th>' for each in head)
        parts.append(f"<tr>{cells}</tr>")
    for row in rows:
        cells = (f'<td style="{_CELL}white-space:pre-wrap">{_escaped(each)}</td>' for each in row)
        parts.append(f"<tr>{''.join(cells)}</tr>")
    return "".join([*parts, "</table>"])


def details_html(summary: str, content: str) -> str:
    """Returns content, which is HTML, that opens when its summary is clicked."""
    return f"<details><summary>{_escaped(summary)}</summary>{content}</details>"


def _escaped(text: object) -> str:
    return html.escape(printable(str(text)))


class Fitting:
    """The first of several tables with the same content, widest first, that fits the width; else the last one.

    A table fits where each of its columns can have its `min_width`.
    """

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        for table in self.tables[:-1]:
            borders = 3 * len(table.columns) + 1  # with a space on either side of a cell
            if sum(column.min_width or 0 for column in table.columns) + borders <= options.max_width:
                yield table
                return
        yield self.tables[-1]


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ("",)) -> Table:
    """Returns a table whose cells are not cut where it fits; `left` are headers of columns aligned to the left."""
    table = empty_table(title)
    for index, header in enumerate(columns):
        width = max(cell_len(printable(text)) for text in (header, *(row[index] for row in rows)))
        justify = "left" if header in left else "right"
        table.add_column(Text(printable(header)), justify=justify, no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*(Text(printable(text)) for text in row))
    return table


def stacked(title: str, entries: Sequence[tuple[str, str]], show_lines: bool = False) -> Table:
    """Returns a table of one column, in which each entry has its label on a line above its text."""
    table = empty_table(title, show_header=False, show_lines=show_lines)
    table.add_column(overflow="fold")
    for label, text in entries:
        table.add_row(Text.assemble((printable(label), "bold"), "\n", printable(text)))
    return table


def empty_table(title: str, **options: Any) -> Table:
    """Returns a table without columns, whose title is a text of others."""
    return Table(title=Text(printable(title)), title_justify="left", **options)
