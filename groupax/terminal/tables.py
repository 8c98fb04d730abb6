"""Tables for terminals of any width. Imports rich."""

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from groupax.terminal.printable import printable

SAMPLE_COLUMNS = 20  # that a column of completions needs to be readable


class Fitting:
    """The first of several tables with the same content that fits the width that it is printed at.

    A table fits where each of its columns can have its `min_width`.

    Args:
        tables: The tables, widest first. The last one is shown wherever the others do not fit.
    """

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        yield next((table for table in self.tables if _min_width(table) <= options.max_width), self.tables[-1])


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ("",)) -> Table:
    """Returns a table whose cells are not cut where the table fits.

    Args:
        title: Title of the table.
        columns: Headers of the columns.
        rows: Texts of the cells.
        left: Headers of the columns that are aligned to the left.
    """
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


def _min_width(table: Table) -> int:
    borders = 3 * len(table.columns) + 1  # with a space on either side of a cell
    return sum(column.min_width or 0 for column in table.columns) + borders
