# SPDX-License-Identifier: Apache-2.0
"""Print tables and write output files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenprune.cli.common import get_console, say
from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from tokenprune.cli.table import Table


def print_table(table: Table) -> None:
    """Print a table with its notes. A table that is too wide for the terminal is split by columns."""
    from tokenprune.cli.table import split_table, to_rich

    console = get_console()
    for part in split_table(table, console.width):
        console.print(to_rich(part, console.width))
    for note in table.notes:
        say(note, "dim")


def write_file(path: Path, content: str) -> None:
    """Write a file and print its path. Raise TokenPruneError if it cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
    get_console(error=True).print(f"written: {path}", markup=False, soft_wrap=True)
