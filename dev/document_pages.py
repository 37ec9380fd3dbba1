# SPDX-License-Identifier: Apache-2.0
"""Generated table of docs/results/documents.md: methods on drawn pages; dev/readme.py writes it."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import rows
from guard import LIMIT
from tables import format_keeps, format_table

from tokenprune.integrations.hf.guard.floors import load_floors
from tokenprune_demo.drawn_documents import TEXT_KINDS

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks/results/pages.jsonl"
SURE = 1.96  # standard errors of an interval of 95 %
UNPATCHED = "unpatched"


def pages() -> str:
    """Return the table and its caption."""
    header, records = rows.read(FILE)
    right_by_setting = {
        (record["method"], record["keep"]): record["right"] for record in records if record["record"] == "result"
    }
    unpatched = right_by_setting.pop((UNPATCHED, 1.0))
    keeps = sorted({keep for _, keep in right_by_setting}, reverse=True)
    text = [kind in TEXT_KINDS for kind in header["kinds"]]
    size = len(unpatched) // header["prompts"]

    def order(name: str) -> tuple[int, float]:
        shares = [_share(right_by_setting[name, keep]) for keep in keeps if (name, keep) in right_by_setting]
        return -len(shares), -fmean(shares)

    lines = []
    for name in sorted({name for name, _ in right_by_setting}, key=order):
        cells = []
        for keep in keeps:
            right = right_by_setting.get((name, keep))
            cells.append("" if right is None else f"{_cell(right, text)} {_beside(unpatched, right, size)}")
        lines.append([_named(name), *cells])
    kept_shares = {record["keep"]: record.get("left", 1) for record in records if record.get("method") == "pixelprune"}
    lower = [keep for keep in keeps if kept_shares.get(keep, 1) < keep - 0.005]
    fewer = ", ".join(f"{100 * kept_shares[keep]:.0f} % at keep={keep:g}" for keep in lower)
    lost = _below_floors(header["kinds"], unpatched, right_by_setting)
    about = (
        f"Correct answers of {header['model'].partition(' ')[0]} in %, all/text only, and the gain over the unpatched "
        f"model ({_cell(unpatched, text)}) with its 95 % interval: {header['questions']} questions about "
        f"{header['prompts']} [prompts](docs/results/video.md#documents) of 1,024 to 1,280 tokens. The model was "
        "trained with at most 784 tokens, so any reduction may help it, and the gains do not predict larger models. "
        f"{fewer and f'`pixelprune` keeps {fewer}: all patches that do not repeat. '}"
        f"Methods that lose over {100 * LIMIT:.0f} points of words or digits at "
        f"[the guard's floor](docs/guides/guard.md): {', '.join(lost) or 'none'}. "
        f"By `python benchmarks/experiments/pages.py`; [raw data]({FILE.relative_to(ROOT)})."
    )
    return f"{about}\n\n{format_table(['method', *format_keeps(keeps)], lines)}"


def _below_floors(kinds: list[str], unpatched: str, right_by_setting: dict[tuple[str, float], str]) -> list[str]:
    """Return the settings at or above the guard's floor that lose more words or digits than it allows."""
    lost = []
    for (name, keep), right in right_by_setting.items():
        if keep >= load_floors().get_floor(name.partition("@")[0], "text"):
            places = [[name == kind for name in kinds] for kind in TEXT_KINDS]
            worst = max(_share(unpatched, where) - _share(right, where) for where in places)
            lost += [f"{_named(name)} at {keep:g}"] * (worst > 100 * LIMIT)
    return lost


def _named(name: str) -> str:
    method, _, block = name.partition("@")
    return f"`{method}`" + (f" at block {block}" if block else "")


def _cell(right: str, text: list[bool]) -> str:
    return f"{_share(right):.0f}/{_share(right, text):.0f}"


def _share(right: str, where: list[bool] | None = None) -> float:
    """Return accuracy in percent, of the selected questions or of all."""
    return 100 * fmean(digit == "1" for digit, here in zip(right, where or [True] * len(right), strict=True) if here)


def _beside(unpatched: str, right: str, size: int) -> str:
    """Return the gain over the unpatched model with its interval. size: questions per prompt."""
    starts = range(0, len(unpatched), size)
    gains = [_share(right[start : start + size]) - _share(unpatched[start : start + size]) for start in starts]
    error = SURE * stdev(gains) / sqrt(len(gains))
    return f"{fmean(gains):+.1f}±{error:.1f}"
