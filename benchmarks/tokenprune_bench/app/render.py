# SPDX-License-Identifier: Apache-2.0
"""A comparison as HTML. Whatever a user or a model wrote is escaped."""

from __future__ import annotations

import base64
import html
import os
import statistics
from typing import TYPE_CHECKING

from tokenprune_bench.app import link
from tokenprune_bench.app.headline import WHY_SLOWER, headline, slower
from tokenprune_bench.metrics import exact
from tokenprune_bench.profiling.machine_load import format_busy_note, get_machine_load, is_busy

if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Asked, Comparison

_CORES = os.cpu_count()


def head(found: Comparison, keep: float, status: str = "") -> str:
    """Return the question, one sentence a method, warnings, and a link. status: of the run."""
    example, question, methods = found.prompt.example, found.prompt.question, found.prompt.methods
    said = "".join(
        f"<li><b>{html.escape(one.name)}</b>: {html.escape(headline(found, one, _CORES))}</li>" for one in found.asked
    )
    notes = "".join(f"<p class=tokenprune-note>⚠ {html.escape(text)}</p>" for text in _warnings(found))
    shared = "these settings, without your file" if example is None else "these settings"
    return (
        f"<h2>{html.escape(question)}</h2><ul>{said}</ul>{_status(status)}{notes}"
        f'<p><a href="{html.escape(link.query(example, question, methods, keep))}">Link to {shared}</a></p>'
    )


def waiting(status: str) -> str:
    """Return what stands in the place of a headline before anything is known."""
    return _status(status)


def panels(found: Comparison) -> str:
    """Return the original and what each method keeps, in a row at one scale; strips of frames one below the other."""
    right = found.prompt.right
    cells = [_panel("original", "unpatched", found.original, f"{found.tokens} visual tokens", found.before, right, "")]
    for one in found.asked:
        kept = f"{one.tokens} → {one.kept} visual tokens"
        time = "" if one.ttft is None else f"first token {_ms(found, one)}, unpatched {_ms(found)}"
        cells.append(_panel(f"kept by {one.name}", one.name, one.drawing, kept, one.answer, right, time))
    return f"<div class='tokenprune-row{' strips' if found.strips else ''}'>{''.join(cells)}</div>"


def _panel(alt: str, title: str, image: bytes, tokens: str, answer: str | None, right: str | None, time: str) -> str:
    source = "data:image/jpeg;base64," + base64.b64encode(image).decode()
    said = "…" if answer is None else html.escape(answer) + _mark(answer, right)
    lines = [f"<b>{html.escape(title)}</b>", f"<span class=answer>{said}</span>", tokens, *([time] if time else [])]
    return (
        f"<figure><details><summary title='enlarge'><img alt='{html.escape(alt)}' src='{source}'></summary></details>"
        f"<figcaption>{'<br>'.join(lines)}<br><a download='{html.escape(title)}.jpg' href='{source}'>save</a>"
        "</figcaption></figure>"
    )


def _mark(answer: str, right: str | None) -> str:
    if right is None:
        return ""
    return " <ins>✓ right</ins>" if exact(answer, right) else f" <del>✗ wrong</del> ({html.escape(right)})"


def details(found: Comparison) -> str:
    """Return what each method cost, as a table, and the visual tokens of each layer as bars; "" before it is known."""
    return _table(found) + _layers(found) if found.complete else ""


def _table(found: Comparison) -> str:
    titles = ("", "answer", "visual tokens", "mean of the layers", "KV cache", "first token")
    stats = found.asked[0].stats
    rows = [("unpatched", found.before, found.tokens, found.tokens, _size(stats.kv_bytes_full), _ms(found))]
    for one in found.asked:
        average, first = round(one.stats.visual_tokens_average), f"{_ms(found, one)}, ×{_speed_up(one):.2f}"
        rows.append(
            (one.name, one.answer, f"{one.tokens} → {one.kept}", average, _size(one.stats.kv_bytes), first)
        )  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in titles)
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='tokenprune-table'><table><tr>{head}</tr>{cells}</table></div>"


def _layers(found: Comparison) -> str:
    parts = []
    for one in found.asked:
        layers = one.stats.visual_tokens_per_layer
        most = max(found.tokens, 1)
        bars = "".join(
            f'<span title="layer {number}: {count}" style="height:{max(2, round(48 * count / most))}px"></span>'
            for number, count in enumerate(layers)
        )
        parts.append(
            f"<p>{html.escape(one.setting.to_text())}: visual tokens in layers 0 to {len(layers) - 1}: "
            f'{", ".join(map(str, layers))}</p><div class="tokenprune-bars">{bars}</div>'
        )
    return "".join(parts)


def _warnings(found: Comparison) -> list[str]:
    timed = [one.ttft["load"] or 0 for one in found.asked if one.ttft]
    said = [found.prompt.note, format_busy_note(max(timed)) if timed else _busy_now(), *found.notes]
    if any(slower(one, _CORES) for one in found.asked):
        said.append(WHY_SLOWER)
    said += [f"{one.setting.to_text()}: {text}" for one in found.asked for text in one.stats.notes]
    return [text for text in dict.fromkeys(said) if text]


def _busy_now() -> str:
    load = get_machine_load()
    return f"The machine is busy (load {load:.1f} on {_CORES} cores): times will say little." if is_busy(
        load, _CORES
    ) else ""  # fmt: skip


def _status(text: str) -> str:
    return f"<p role=status class=tokenprune-status>{html.escape(text)}</p>" if text else ""


def _speed_up(one: Asked) -> float:
    return 1 / one.ttft["ttft_ratio"]["p50"]


def _size(number: float) -> str:
    return f"{number / 1024:.0f} KiB" if number < 10 * 2**20 else f"{number / 2**20:.0f} MiB"


def _ms(found: Comparison, one: Asked | None = None) -> str:
    """Return the time to the first token, None: of the unpatched model. That is one time for all methods, each of which
    was timed in turn with it: the median, and a method's is its ratio of that."""
    whole = statistics.median(each.ttft["ttft_ms_unpatched"]["p50"] for each in found.asked if each.ttft)
    return f"{whole if one is None else whole * one.ttft['ttft_ratio']['p50']:.0f} ms"
