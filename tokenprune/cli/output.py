# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal and files that commands write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenprune.cli.common import get_console
from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from tokenprune.profiling.table import Table


def print_table(table: Table) -> None:
    """Print a table with its notes."""
    from rich.text import Text

    from tokenprune.profiling.table import to_rich

    shown = to_rich(table)
    if table.columns[0] == "site":
        shown.columns[-1].justify = "left"
    get_console().print(shown)
    for note in table.notes:
        get_console().print(Text(note, style="dim"), soft_wrap=True)


def write_file(path: Path, content: str) -> None:
    """Write a file and say so; raises TokenPruneError where it cannot be written."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
    get_console(error=True).print(f"written: {path}", markup=False, soft_wrap=True)
