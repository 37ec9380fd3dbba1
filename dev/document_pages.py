# SPDX-License-Identifier: Apache-2.0
"""The generated table of docs/results/documents.md: methods on drawn pages of a thousand tokens, beside the unpatched
model; dev/readme.py puts it there."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import rows
from guard import LIMIT

from tokenprune.integrations.hf.guard.floors import load_floors
from tokenprune_demo.drawn_documents import TEXT_KINDS

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks/results/pages.jsonl"
SURE = 1.96  # standard errors of an interval of 95 %
UNPATCHED = "unpatched"


def pages() -> str:
    """Return the table and what it says."""
    header, records = rows.read(FILE)
    found = {(one["method"], one["keep"]): one["right"] for one in records if one["record"] == "result"}
    whole = found.pop((UNPATCHED, 1.0))
    keeps = sorted({keep for _, keep in found}, reverse=True)
    text = [kind in TEXT_KINDS for kind in header["kinds"]]
    size = len(whole) // header["prompts"]

    def order(name: str) -> tuple[int, float]:
        own = [_share(found[name, keep]) for keep in keeps if (name, keep) in found]
        return -len(own), -fmean(own)

    lines = [f"| method | {' | '.join(f'keep {keep:g}' for keep in keeps)} |", "|---" * (1 + len(keeps)) + "|"]
    for name in sorted({name for name, _ in found}, key=order):
        cells = []
        for keep in keeps:
            right = found.get((name, keep))
            cells.append("" if right is None else f"{_cell(right, text)} {_beside(whole, right, size)}")
        lines.append(f"| {_named(name)} | {' | '.join(cells)} |")
    best = {
        keep: max((name for name, at in found if at == keep), key=lambda name: _share(found[name, keep]))
        for keep in keeps
    }
    layouts = sorted(set(header["layouts"]), key=header["layouts"].index)
    by_layout = ", ".join(f"{one}s {_share(whole, [of == one for of in header['layouts']]):.0f}" for one in layouts)
    left = {one["keep"]: one.get("left", 1) for one in records if one.get("method") == "pixelprune"}
    fewer = ", ".join(f"{100 * left[keep]:.0f} % at {keep:g}" for keep in keeps if left.get(keep, 1) < keep - 0.005)
    lost = _below_floors(header["kinds"], whole, found)
    about = (
        f"{header['model'].partition(' ')[0]}, {header['questions']} questions about {header['prompts']} "
        "[prompts](docs/results/video.md#documents) of 1,024 to 1,280 tokens; unpatched "
        f"{_cell(whole, text)} ({by_layout}). It was trained on 784 tokens at most, so any way to fewer "
        "may help: gains say little of larger models. Cells: % right/of text alone, points beside "
        "unpatched±95 % of prompts. "
        f"Most right: {', '.join(f'{_named(name)} at {keep:g}' for keep, name in best.items())}"
        f"{fewer and f'; `pixelprune` keeps {fewer}, all that does not repeat'}. "
        f"Methods that lose more than {100 * LIMIT:.0f} points of words or digits at "
        f"[the guard's floor](docs/guides/guard.md) for text: {', '.join(lost) or 'none'}. By "
        f"`python benchmarks/experiments/pages.py`; [raw data](../../{FILE.relative_to(ROOT)})."
    )
    return "\n".join([about, "", *lines])


def _below_floors(kinds: list[str], whole: str, found: dict[tuple[str, float], str]) -> list[str]:
    """Return the settings at a floor or above it that lose more than a floor allows of words, or of digits."""
    lost = []
    for (name, keep), right in found.items():
        if keep >= load_floors().get_floor(name.partition("@")[0], "text"):
            places = [[one == kind for one in kinds] for kind in TEXT_KINDS]
            worst = max(_share(whole, where) - _share(right, where) for where in places)
            lost += [f"{_named(name)} at {keep:g}"] * (worst > 100 * LIMIT)
    return lost


def _named(name: str) -> str:
    method, _, block = name.partition("@")
    return f"`{method}`" + (f" at block {block}" if block else "")


def _cell(right: str, text: list[bool]) -> str:
    return f"{_share(right):.0f}/{_share(right, text):.0f}"


def _share(right: str, where: list[bool] | None = None) -> float:
    """Return percent right, of the questions in some places or of all."""
    return 100 * fmean(one == "1" for one, here in zip(right, where or [True] * len(right), strict=True) if here)


def _beside(whole: str, right: str, size: int) -> str:
    """Return points beside the unpatched model with their interval. size: questions a prompt."""
    starts = range(0, len(whole), size)
    gains = [_share(right[at : at + size]) - _share(whole[at : at + size]) for at in starts]
    error = SURE * stdev(gains) / sqrt(len(gains))
    return f"{fmean(gains):+.1f}±{error:.1f}"
