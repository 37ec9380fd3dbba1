# SPDX-License-Identifier: Apache-2.0
"""One table, as it is shown in the terminal and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Cell:
    """Text of one field; bad: to be shown in red."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """Column names, rows of cells, and notes to be printed below; the first column is text, the others align right."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    notes: tuple[str, ...] = ()
    grouped: bool = False  # whether a line parts rows whose first cells differ


def to_rich(table: Table) -> RichTable:
    """Return the table for a terminal; its notes are left to the caller."""
    made = RichTable(title=table.title, title_justify="left", header_style="bold")
    for index, name in enumerate(table.columns):
        made.add_column(name, justify="left" if index == 0 else "right", no_wrap=index < min(2, len(table.columns) - 1))
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
