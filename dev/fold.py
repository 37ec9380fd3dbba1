# SPDX-License-Identifier: Apache-2.0
"""Fold tables of the site with more than 15 rows: ten rows stay visible (dev/mkdocs_hooks.py)."""

from __future__ import annotations

import re

SHOWN, WHOLE = 10, 15  # visible rows of a folded table; maximum of rows without folding
# A table of Markdown at the margin: head, the line below it, and its rows. Tables that a script of the page sorts stay.
_TABLE = re.compile(rf"^(\|.*\n)(\|[ :|-]+\|\n)((?:\|.*(?:\n|\Z)){{{WHOLE + 1},}})", re.MULTILINE)
_SORTED = '<div id="board"'
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE)


def folded(markdown: str) -> str:
    """Return the page with the rows after the tenth of every long table folded."""
    fences = [match.span() for match in _FENCE.finditer(markdown)]

    def fold(match: re.Match[str]) -> str:
        inside = any(start <= match.start() < end for start, end in fences)
        if inside or markdown[: match.start()].rstrip().rpartition("\n")[2].startswith(_SORTED):
            return match[0]
        head, line, rows = match[1], match[2], match[3].splitlines(keepends=True)
        end = "" if rows[-1].endswith("\n") else "\n"
        rest = "".join(rows[SHOWN:]) + end
        return (
            f"{head}{line}{''.join(rows[:SHOWN])}\n<details class=rest markdown>\n"
            f"<summary>{len(rows) - SHOWN} more</summary>\n\n{head}{line}{rest}\n</details>\n"
        )

    return _TABLE.sub(fold, markdown)
