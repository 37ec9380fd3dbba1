# SPDX-License-Identifier: Apache-2.0
"""Render a comparison as HTML. Text from users and models is escaped."""

from __future__ import annotations

import base64
import html
import os
import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from tokenprune_bench.app import link
from tokenprune_bench.app.headline import WHY_SLOWER, format_ratio, headline, is_slower
from tokenprune_bench.metrics import ending
from tokenprune_bench.profiling.machine_load import format_busy_note, get_machine_load, is_busy

if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Comparison, SettingResult

_CORES = os.cpu_count()


def head(comparison: Comparison, keep: float, status: str = "") -> str:
    """Return the question, one sentence per method, warnings, and a link. `status` is the progress of the run."""
    prompt = comparison.prompt
    example, question, methods = prompt.example, prompt.question, prompt.methods
    sentences = "".join(
        f"<li><b>{html.escape(result.name)}</b>: {html.escape(headline(comparison, result, _CORES))}</li>"
        for result in comparison.asked
    )
    notes = "".join(f"<p class=tokenprune-note>⚠ {html.escape(text)}</p>" for text in _list_warnings(comparison))
    shared = "these settings, without your file" if example is None else "these settings"
    return (
        f"<h2>{html.escape(question)}</h2><ul>{sentences}</ul>{_format_status(status)}{notes}"
        f'<p><a href="{html.escape(link.query(example, question, methods, keep))}">Link to {shared}</a></p>'
    )


def waiting(status: str) -> str:
    """Return the status that replaces the headline before the first result."""
    return _format_status(status)


def panels(comparison: Comparison) -> str:
    """Return the original and the kept tokens of each method: in a row, or below each other for strips of frames."""
    right = comparison.prompt.right
    cells = [
        _format_panel(
            "original",
            "unpatched",
            comparison.original,
            f"{comparison.tokens} visual tokens",
            comparison.before,
            right,
            "",
        )
    ]
    for result in comparison.asked:
        kept = f"{result.tokens} → {result.kept} visual tokens"
        time = "" if result.ttft is None else f"first token after {_format_first_token_time(comparison, result)}"
        cells.append(
            _format_panel(f"kept by {result.name}", result.name, result.drawing, kept, result.answer, right, time)
        )
    return f"<div class='tokenprune-row{' strips' if comparison.strips else ''}'>{''.join(cells)}</div>"


def _format_panel(
    alt: str, title: str, image: bytes, tokens: str, answer: str | None, right: str | None, time: str
) -> str:
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
    return " <ins>✓ right</ins>" if ending(answer, right) else f" <del>✗ wrong</del> ({html.escape(right)})"


def details(comparison: Comparison) -> str:
    """Return a table of costs and bars of the visual tokens per layer; "" while the comparison is not complete."""
    return _format_table(comparison) + _format_layer_bars(comparison) if comparison.complete else ""


def _format_table(comparison: Comparison) -> str:
    """Return a table with one column per setting, which also fits a phone."""
    unpatched = (
        "unpatched",
        comparison.before,
        str(comparison.tokens),
        str(comparison.tokens),
        _format_size(comparison.asked[0].stats.kv_bytes_full),
        _format_first_token_time(comparison),
    )
    columns = [unpatched, *(_format_column(comparison, result) for result in comparison.asked)]
    names, *values = zip(*columns, strict=True)
    titles = ("answer", "visual tokens", "average over the layers", "KV cache", "time to first token")
    head = "<tr><th></th>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "</tr>"
    body = "".join(
        f"<tr><th>{title}</th>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>"
        for title, row in zip(titles, values, strict=True)
    )
    return f"<div class='tokenprune-table'><table>{head}{body}</table></div>"


def _format_column(comparison: Comparison, result: SettingResult) -> tuple[str | None, ...]:
    speed_up, change = 1 / result.ttft["ttft_ratio"]["p50"], ""
    if not is_busy(result.ttft["load"], _CORES):  # the times of a busy machine are not judged
        change = f" ({format_ratio(max(speed_up, 1 / speed_up))} {'faster' if speed_up > 1 else 'slower'})"
    return (
        result.name,
        result.answer,
        f"{result.tokens} → {result.kept}",
        str(round(result.stats.visual_tokens_average)),
        _format_size(result.stats.kv_bytes),
        f"{_format_first_token_time(comparison, result)}{change}",
    )


def _format_layer_bars(comparison: Comparison) -> str:
    parts = []
    for result in comparison.asked:
        layers = result.stats.visual_tokens_per_layer
        max_tokens = max(comparison.tokens, 1)
        bars = "".join(
            f'<span title="layer {index}: {count}" style="--share: {round(100 * count / max_tokens)}%"></span>'
            for index, count in enumerate(layers)
        )
        parts.append(
            f"<p>{html.escape(result.name)}, visual tokens in the decoder: {_format_layers(layers)}</p>"
            f'<div class="tokenprune-bars">{bars}</div>'
        )
    return "".join(parts)


def _format_layers(layers: Sequence[int]) -> str:
    """Format counts per layer, "256 in layers 0 to 1, 64 in layers 2 to 5"."""
    parts, start = [], 0
    for count, group in groupby(layers):
        end = start + len(list(group)) - 1
        parts.append(f"{count} in layer{f' {start}' if start == end else f's {start} to {end}'}")
        start = end + 1
    return ", ".join(parts)


def _list_warnings(comparison: Comparison) -> list[str]:
    timed = [result.ttft["load"] or 0 for result in comparison.asked if result.ttft]
    said = [comparison.prompt.note, format_busy_note(max(timed)) if timed else _describe_load(), *comparison.notes]
    if any(is_slower(result, _CORES) for result in comparison.asked):
        said.append(WHY_SLOWER)
    said += [f"{result.setting.to_text()}: {text}" for result in comparison.asked for text in result.stats.notes]
    return [text for text in dict.fromkeys(said) if text]


def _describe_load() -> str:
    load = get_machine_load()
    return f"The machine is busy (load {load:.1f} on {_CORES} cores): times are not reliable." if is_busy(
        load, _CORES
    ) else ""  # fmt: skip


def _format_status(text: str) -> str:
    return f"<p role=status class=tokenprune-status>{html.escape(text)}</p>" if text else ""


def _format_size(num_bytes: float) -> str:
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes < 10 * 2**20 else f"{num_bytes / 2**20:.0f} MiB"


def _format_first_token_time(comparison: Comparison, result: SettingResult | None = None) -> str:
    """Return the time to first token of a setting, or of the unpatched model for None.

    The unpatched model is timed again with each method. Its time is the median over methods. A method's time is this
    median times the method's ratio.
    """
    unpatched = statistics.median(each.ttft["ttft_ms_unpatched"]["p50"] for each in comparison.asked if each.ttft)
    return f"{unpatched if result is None else unpatched * result.ttft['ttft_ratio']['p50']:.0f} ms"
