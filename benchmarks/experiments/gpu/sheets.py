# SPDX-License-Identifier: Apache-2.0
"""Files of the GPU's tables, as a terminal and a page show them. Nothing here needs torch.

The first line of a file is its header: where it was measured, the title, and of each column its key in a row and its
name. Keys say the unit: `_bytes` are shown in MiB, `_share` in percent.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import rows

AS_IT_SHOULD_BE = {"equal": "equal", "ties": "within ties"}  # verdicts, and in words
RESULTS = Path(__file__).parents[2] / "results"


def cell(key: str, value: Any) -> str:
    """Return a value as a table shows it: of quantiles the median."""
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
    """Return the cells of a row."""
    return [cell(key, row.get(key)) for key in header["columns"]]


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the quiet rows of a table. Raises SystemExit for a tiny run: it proves the code, and its
    numbers are of nothing."""
    header, found = rows.quiet(path)
    if header.get("tiny", True):
        raise SystemExit(f"{path} is of a run with --tiny, which proves the code alone: no page shows its numbers")
    return header, [row for row in found if "failed" not in row]


def short(path: Path) -> str:
    """Return a table in a few words a row, as a terminal that shows the last lines alone has room for."""
    header, found = rows.read(path)
    lines = [f"{header['title']}: {' | '.join(header['columns'].values())}"]
    for row in found:
        if "failed" in row:
            lines.append(f"failed: {row['label']}: {row['failed'][:120]}")
        elif row.get("verdict") not in AS_IT_SHOULD_BE:
            lines.append(" | ".join(cells(header, row)))
    lines += [f"{what}: {number} {AS_IT_SHOULD_BE[verdict]}" for (what, verdict), number in _equal(found).items()]
    return "\n".join(lines)


def _equal(found: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Return how many rows are as they should be, by what was compared and the verdict."""
    return Counter((row["what"], row["verdict"]) for row in found if row.get("verdict") in AS_IT_SHOULD_BE)


def found(name: str) -> list[tuple[Path, dict[str, Any], list[dict[str, Any]]]]:
    """Return the tables of this name, one for each GPU that was measured, without those that have no quiet row."""
    paths = [path for path in sorted(RESULTS.glob(f"*/{name}.jsonl")) if not path.parent.name.endswith("-tiny")]
    made = [(path, *read(path)) for path in paths]
    return [one for one in made if one[2]]


def where(header: dict[str, Any]) -> str:
    """Return the device and the versions of a table."""
    return (
        f"{header['device']}, torch {header['torch']}, transformers {header['transformers']}, {header['date']}, "
        f"random weights of {header['shape']}."
    )


def markdown(header: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Return a table for a page."""
    # What is as it should be is counted, not listed.
    kinds, found = _equal(found), [row for row in found if row.get("verdict") not in AS_IT_SHOULD_BE]
    names = list(header["columns"].values())
    lines = ["| " + " | ".join(names) + " |", "|---" + "|---:" * (len(names) - 1) + "|"]
    lines += ["| " + " | ".join(cells(header, row)) + " |" for row in found]
    noun = "methods" if names[0] == "method" else "answers"
    said = "; ".join(f"{what}: {number} {noun} {AS_IT_SHOULD_BE[verdict]}" for (what, verdict), number in kinds.items())
    return "\n".join([*([said, ""] if said else []), *lines])


def pages(names: tuple[str, ...]) -> str:
    """Return all tables of these names, each in a fold under its title; nothing where no GPU was measured."""
    parts = []
    for name in names:
        for path, header, rows_ in found(name):
            source = f"benchmarks/results/{path.parent.name}/{path.name}"
            by = f"By `python benchmarks/experiments/gpu/{name}.py`; raw data: [{source}](../{source})."
            text = f"{where(header)} {header.get('note', '')}".strip() + f"\n\n{markdown(header, rows_)}\n\n{by}"
            parts.append(f"<details markdown>\n<summary>{header['title']}</summary>\n\n{text}\n\n</details>")
    return "\n\n".join(parts)
