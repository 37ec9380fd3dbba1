# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.table import Table as RichTable
from rich.text import Text

_NAME, _NUMBER = 24, 14  # minimum width of long texts in the first two columns, and in the others
_LINES = 3  # width of the lines and blanks of a column


@dataclass(frozen=True)
class Cell:
    """Text of a table cell. `bad` cells are red in the terminal and bold in Markdown."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """Table with a title, column names, rows of cells, and notes.

    The first column is left-aligned, the others right-aligned.

    Args:
        title: Text above the table.
        columns: Column names.
        rows: Cells of each row.
        notes: Paragraphs below the table.
        grouped: True to separate rows with different first cells by a line.
        last_left: True to left-align the last column.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    notes: tuple[str, ...] = ()
    grouped: bool = False
    last_left: bool = False


def split_table(table: Table, width: int) -> list[Table]:
    """Split a table by columns into tables that fit a terminal of `width` characters.

    Each part repeats the leading columns. The last part has the notes.
    """
    min_widths, keys = _compute_min_widths(table), 2 if table.grouped else 1
    groups: list[list[int]] = [[]]
    for column in range(keys, len(table.columns)):
        if groups[-1] and sum(min_widths[index] + _LINES for index in (*range(keys), *groups[-1], column)) >= width:
            groups.append([])
        groups[-1].append(column)
    if len(groups) == 1:
        return [table]
    parts = []
    for index, group in enumerate(groups):
        columns, is_last = [*range(keys), *group], index == len(groups) - 1
        parts.append(
            replace(
                table,
                title=f"{table.title}, continued" if index else table.title,
                columns=tuple(table.columns[column] for column in columns),
                rows=[[row[column] for column in columns] for row in table.rows],
                notes=table.notes if is_last else (),
                last_left=table.last_left and is_last,
            )
        )
    return parts


def _compute_min_widths(table: Table) -> list[int]:
    """Return the minimum width of each column. Short texts are not wrapped, long texts are wrapped between words."""
    min_widths = []
    for column, name in enumerate(table.columns):
        cells = [row[column].text for row in table.rows]
        longest, words = max(map(len, cells), default=0), " ".join([name, *cells]).split()
        min_widths.append(max(min(longest, _NAME if column < 2 else _NUMBER), *map(len, words), 0))
    return min_widths


def _compute_widths(table: Table, width: int) -> list[int]:
    """Return the width of each column for a terminal of `width` characters."""
    min_widths, rows = _compute_min_widths(table), ([cell.text for cell in row] for row in table.rows)
    longest = [max(map(len, texts)) for texts in zip(table.columns, *rows, strict=True)]
    for _ in range(width - 1 - sum(min_widths) - _LINES * len(min_widths)):
        widest = max(range(len(min_widths)), key=lambda column: longest[column] - min_widths[column])
        min_widths[widest] += longest[widest] > min_widths[widest]
    return min_widths


def to_rich(table: Table, width: int | None = None) -> RichTable:
    """Return a rich table without the notes, for a terminal of `width` characters. None: no limit."""
    rich_table = RichTable(title=table.title, title_justify="left", header_style="bold")
    widths = [None] * len(table.columns) if width is None else _compute_widths(table, width)
    for index, (name, column_width) in enumerate(zip(table.columns, widths, strict=True)):
        left = index == 0 or (table.last_left and index == len(table.columns) - 1)
        no_wrap = column_width is None and index < min(2, len(table.columns) - 1)
        rich_table.add_column(name, justify="left" if left else "right", no_wrap=no_wrap, width=column_width)
    previous = None
    for row in table.rows:
        if table.grouped and previous not in (None, row[0].text):
            rich_table.add_section()
        previous = row[0].text
        rich_table.add_row(*(Text(cell.text, style="bold red" if cell.bad else "") for cell in row))
    return rich_table


def to_markdown(table: Table) -> str:
    """Return the table in GitHub Markdown."""
    lines = [f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |"]
    lines.append("| --- |" + " ---: |" * (len(table.columns) - 1))
    for row in table.rows:
        lines.append("| " + " | ".join(f"**{c.text}**" if c.bad else c.text for c in row) + " |")
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes)])
