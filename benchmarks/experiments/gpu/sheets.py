# SPDX-License-Identifier: Apache-2.0
"""Format the GPU tables' files for terminals and pages. This module does not need torch.

The first line of a file is its header: device, versions, title, and the title of each column by its key. Key suffixes
give units: `_bytes` is shown in MiB, `_share` in percent.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import rows

GOOD_VERDICTS = {"equal": "equal", "ties": "within ties"}  # with their descriptions
RESULTS = Path(__file__).parents[2] / "results"


def cell(key: str, value: Any) -> str:
    """Format a value as a table cell. Quantiles are shown by their median."""
    if isinstance(value, dict):
        value = value["p50"]
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes"):
        return f"{value / 2**20:.0f}" if value >= 2**23 else f"{value / 2**20:.2f}"
    if key.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cells(header: dict[str, Any], row: dict[str, Any]) -> list[str]:
    return [cell(key, row.get(key)) for key in header["columns"]]


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the rows of an idle machine.

    Raises SystemExit for tiny runs, whose numbers are meaningless.
    """
    header, records = rows.quiet(path)
    if header.get("tiny", True):
        raise SystemExit(f"{path} is a run with --tiny, which only checks the code. Pages cannot show its numbers.")
    return header, [row for row in records if "failed" not in row]


def short(path: Path) -> str:
    """Return a table with one short line per row, for terminals that show only the last lines."""
    header, records = rows.read(path)
    lines = [f"{header['title']}: {' | '.join(header['columns'].values())}"]
    for row in records:
        if "failed" in row:
            lines.append(f"failed: {row['label']}: {row['failed'][:120]}")
        elif row.get("verdict") not in GOOD_VERDICTS:
            lines.append(" | ".join(cells(header, row)))
    lines += [
        f"{comparison}: {count} {GOOD_VERDICTS[verdict]}" for (comparison, verdict), count in _equal(records).items()
    ]
    return "\n".join(lines)


def _equal(records: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Return the number of rows with a good verdict, by comparison and verdict."""
    return Counter((row["what"], row["verdict"]) for row in records if row.get("verdict") in GOOD_VERDICTS)


def found(name: str) -> list[tuple[Path, dict[str, Any], list[dict[str, Any]]]]:
    """Return the tables of a name, one per measured GPU, without tables that have only rows of a loaded machine."""
    paths = [path for path in sorted(RESULTS.glob(f"*/{name}.jsonl")) if not path.parent.name.endswith("-tiny")]
    sheets = [(path, *read(path)) for path in paths]
    return [sheet for sheet in sheets if sheet[2]]


def where(header: dict[str, Any]) -> str:
    """Return the device and the versions of a table."""
    return (
        f"{header['device']}, torch {header['torch']}, transformers {header['transformers']}, {header['date']}, "
        f"random weights of {header['shape']}."
    )


def markdown(header: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Return a table for a page."""
    # Good verdicts are counted, not listed.
    kinds, records = _equal(records), [row for row in records if row.get("verdict") not in GOOD_VERDICTS]
    names = list(header["columns"].values())
    lines = ["| " + " | ".join(names) + " |", "|---" + "|---:" * (len(names) - 1) + "|"]
    lines += ["| " + " | ".join(cells(header, row)) + " |" for row in records]
    noun = "methods" if names[0] == "method" else "answers"
    counted = "; ".join(
        f"{comparison}: {count} {noun} {GOOD_VERDICTS[verdict]}" for (comparison, verdict), count in kinds.items()
    )
    return "\n".join([*([counted, ""] if counted else []), *lines])


def pages(names: tuple[str, ...]) -> str:
    """Return all tables of the given names, each in a collapsed section; empty without GPU results."""
    parts = []
    for name in names:
        for path, header, rows_ in found(name):
            source = f"benchmarks/results/{path.parent.name}/{path.name}"
            by = f"By `python benchmarks/experiments/gpu/{name}.py`; raw data: [{source}](../{source})."
            text = f"{where(header)} {header.get('note', '')}".strip() + f"\n\n{markdown(header, rows_)}\n\n{by}"
            parts.append(f"<details markdown>\n<summary>{header['title']}</summary>\n\n{text}\n\n</details>")
    return "\n\n".join(parts)
