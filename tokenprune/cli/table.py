# SPDX-License-Identifier: Apache-2.0
"""One table, as it is shown in the terminal and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.table import Table as RichTable
from rich.text import Text

_NAME, _NUMBER = 24, 14  # letters of a line, in the first two columns and in others, at least
_LINES = 3  # what a column takes besides its text, lines and blanks


@dataclass(frozen=True)
class Cell:
    """Text of one field; bad: to be shown in red."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """Column names, rows of cells, and notes to be printed below; the first column is text, the others align right.

    grouped: whether a line parts rows whose first cells differ. last_left: whether the last column is text, too.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    notes: tuple[str, ...] = ()
    grouped: bool = False
    last_left: bool = False


def split_table(table: Table, width: int) -> list[Table]:
    """Return the table as tables that a screen of so many letters holds: itself, or some of its columns each, after
    those that name a row. The notes stay with the last."""
    needs, keys = _needs(table), 2 if table.grouped else 1
    groups: list[list[int]] = [[]]
    for column in range(keys, len(table.columns)):
        if groups[-1] and sum(needs[one] + _LINES for one in (*range(keys), *groups[-1], column)) >= width:
            groups.append([])
        groups[-1].append(column)
    if len(groups) == 1:
        return [table]
    parts = []
    for number, group in enumerate(groups):
        shown, last = [*range(keys), *group], number == len(groups) - 1
        parts.append(
            replace(
                table,
                title=f"{table.title}, continued" if number else table.title,
                columns=tuple(table.columns[one] for one in shown),
                rows=[[row[one] for one in shown] for row in table.rows],
                notes=table.notes if last else (),
                last_left=table.last_left and last,
            )
        )
    return parts


def _needs(table: Table) -> list[int]:
    """Return how many letters each column needs to be read: a short text is whole, and of a long one its words are."""
    needs = []
    for column, name in enumerate(table.columns):
        cells = [row[column].text for row in table.rows]
        whole, words = max(map(len, cells), default=0), " ".join([name, *cells]).split()
        needs.append(max(min(whole, _NAME if column < 2 else _NUMBER), *map(len, words), 0))
    return needs


def _widths(table: Table, width: int) -> list[int]:
    """Return the letters of each column on a screen of `width`: what it needs, and of the rest what it can use."""
    needs, rows = _needs(table), ([cell.text for cell in row] for row in table.rows)
    whole = [max(map(len, texts)) for texts in zip(table.columns, *rows, strict=True)]
    for _ in range(width - 1 - sum(needs) - _LINES * len(needs)):
        widest = max(range(len(needs)), key=lambda one: whole[one] - needs[one])
        needs[widest] += whole[widest] > needs[widest]
    return needs


def to_rich(table: Table, width: int | None = None) -> RichTable:
    """Return the table for a terminal of so many letters, None for any; its notes are left to the caller."""
    made = RichTable(title=table.title, title_justify="left", header_style="bold")
    widths = [None] * len(table.columns) if width is None else _widths(table, width)
    for index, (name, letters) in enumerate(zip(table.columns, widths, strict=True)):
        left = index == 0 or (table.last_left and index == len(table.columns) - 1)
        whole = letters is None and index < min(2, len(table.columns) - 1)
        made.add_column(name, justify="left" if left else "right", no_wrap=whole, width=letters)
    previous = None
    for row in table.rows:
        if table.grouped and previous not in (None, row[0].text):
            made.add_section()
        previous = row[0].text
        made.add_row(*(Text(cell.text, style="bold red" if cell.bad else "") for cell in row))
    return made


def to_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown; bad cells are bold."""
    lines = [f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |"]
    lines.append("| --- |" + " ---: |" * (len(table.columns) - 1))
    for row in table.rows:
        lines.append("| " + " | ".join(f"**{c.text}**" if c.bad else c.text for c in row) + " |")
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes)])
