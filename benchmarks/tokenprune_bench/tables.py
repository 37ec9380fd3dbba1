# SPDX-License-Identifier: Apache-2.0
"""Tables of a benchmark for the terminal, Markdown and the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenprune.cli.table import Cell, Table, to_markdown, to_rich
from tokenprune_bench.equal_cost import describe_setting
from tokenprune_bench.metrics import METRICS, Metric
from tokenprune_bench.paired import RESAMPLES
from tokenprune_bench.point_changes import format_change
from tokenprune_bench.profiling.machine_load import format_busy_note
from tokenprune_bench.results import COLLAPSE, MARKS, UNPATCHED, Results, Row, ScoreShare, find_busy_load
from tokenprune_bench.significance import LEVEL

FALLEN = "▼"


def build_tables(results: Results) -> list[Table]:
    """Return the tables of cost and accuracy, of accuracy per kind of question, and of paired differences.

    Tables of groups, evidence and controls are added if the results have them.
    """
    evidence = [_build_evidence_table(results)] if any(row.evidence for row in results.rows) else []
    groups = [_build_groups_table(results)] if results.groups else []
    controls = [_build_controls_table(results)] if results.controls else []
    tables = [
        _build_cost_table(results),
        _build_kinds_table(results),
        *groups,
        *evidence,
        *controls,
        _build_paired_table(results),
    ]
    if results.evidence_only:
        tables = [_build_spending_table(results), *evidence]
    if not results.equal_cost:
        return tables
    # At equal cost, "keep" is the target share of all methods.
    titled_tables = [
        replace(table, columns=tuple("target" if name == "keep" else name for name in table.columns))
        for table in tables
    ]
    return [titled_tables[0], _build_settings_table(results), *titled_tables[1:]]


def _build_settings_table(results: Results) -> Table:
    """Return a table of each method's setting and visual tokens per layer at equal cost."""
    rows = [
        [
            *map(Cell, _label(row)),
            Cell(f"{100 * row.tokens_average / row.tokens_in:.1f} %"),
            Cell(describe_setting(row.setting, row.stats["visual_tokens_per_layer"], row.stats["visual_tokens_in"])),
        ]
        for row in results.rows
        if row.setting
    ]
    note = (
        "Target: share of the unpatched model's visual tokens for every method, averaged over the decoder's layers. "
        "Reached: the measured share. Setting: the method's setting for `patch(config=...)`, and its share of the "
        "tokens by layer."
    )
    return Table("Equal cost", ("method", "target", "reached", "setting"), rows, (note,), grouped=True)


def _build_spending_table(results: Results) -> Table:
    """Return a table of the costs of a run without answers."""
    rows = []
    for row in results.rows:
        flops = row.stats["prefill_flops_ratio"]
        counts = f"{row.tokens_in:.0f} → {row.tokens_out:.0f}", f"{row.tokens_average:.0f}"
        rows.append([*map(Cell, (*_label(row), *counts, "" if flops is None else f"{flops:.0%}"))])
    columns = ("method", "keep", "visual tokens", "layer avg", "prefill FLOPs")
    note = "This run does not generate answers or measure times."
    return Table(_format_title(results), columns, rows, (note, *_describe_skipped(results)), grouped=True)


def _build_groups_table(results: Results) -> Table:
    rows = [
        [
            *map(Cell, _label(row)),
            *(Cell(f"{100 * share.value:.0f} [{_format_interval(share)}]") for share in row.groups.values()),
        ]
        for row in results.rows
    ]
    note = "Most of a video is still only if its ground is still. Do not rank methods by that group only."
    columns = ("method", "keep", *results.groups)
    return Table("Accuracy by ground", columns, rows, (note,), grouped=True)


def _build_evidence_table(results: Results) -> Table:
    names = [
        name for name in ("", *results.kinds, *results.groups) if any(name in row.evidence for row in results.rows)
    ]
    rows = [
        [
            *map(Cell, _label(row)),
            *(Cell(f"{100 * row.evidence[name]:.0f}" if name in row.evidence else "") for name in names),
        ]
        for row in results.rows
        if row.evidence
    ]
    note = (
        "Percent of the evidence for an answer that is still visible: for each look (an object, or an object at one "
        "time) a kept token is in one of its boxes, or a merged token has half of its weight there. Not defined for "
        "the unpatched model and for methods that do not select tokens."
    )
    columns = ("method", "keep", *(name or "all" for name in names))
    return Table("Evidence kept", columns, rows, (note,), grouped=True)


def _build_controls_table(results: Results) -> Table:
    kinds = list(dict.fromkeys(kind for control in results.controls for kind in control.chance))
    rows = []
    for control in results.controls:
        cells = []
        for kind in kinds:
            if kind not in control.kinds:
                cells.append(Cell(""))
                continue
            share, chance = control.kinds[kind], f"chance {100 * control.chance[kind]:.0f}"
            cells.append(Cell(f"{100 * share.value:.0f} [{_format_interval(share)}], {chance}", kind in control.passed))
        rows.append([Cell(control.name), *cells])
    note = (
        "The unpatched model with incomplete input, which must score at chance level. Red: the 95 % Wilson interval is "
        "above chance, so scores on that kind do not show that a method sees the evidence."
    )
    return Table("Controls, which must fail", ("control", *kinds), rows, (note,))


def _build_cost_table(results: Results) -> Table:
    evident = any(row.evidence for row in results.rows)
    columns = (
        "method", "keep", "visual tokens", "layer avg", "prefill FLOPs", "KV cache", "TTFT, ms", "per token, ms",
        *(["evidence"] if evident else []), _get_metric(results).title, "95 % CI", "no better than",
    )  # fmt: skip
    unpatched_ms = {name: results.unpatched_ms(name) for name in ("ttft", "token")}
    rows = []
    for row in results.rows:
        name, keep = _label(row)
        bytes_, full = row.stats["kv_bytes"], row.stats["kv_bytes_full"]
        rows.append([
            *map(Cell, (name, keep, f"{row.tokens_in:.0f} → {row.tokens_out:.0f}", f"{row.tokens_average:.0f}")),
            Cell("" if row.stats["prefill_flops_ratio"] is None else f"{row.stats['prefill_flops_ratio']:.0%}"),
            Cell(f"{_format_bytes(bytes_ / row.questions)} ({bytes_ / full:.0%})" if full else ""),
            *(Cell(_time(row, name, ms)) for name, ms in unpatched_ms.items()),
            *([Cell(f"{100 * row.evidence['']:.0f}" if row.evidence else "")] if evident else []),
            Cell(f"{100 * row.overall.value:.1f}"),
            Cell(_format_interval(row.overall, 1)),
            Cell(" ".join(row.marks), bad=bool(row.marks)),
        ])  # fmt: skip
    return Table(_format_title(results), columns, rows, tuple(_format_cost_notes(results)), grouped=True)


def _build_kinds_table(results: Results) -> Table:
    rows = []
    for row in results.rows:
        cells = [
            Cell(
                f"{100 * share.value:.0f}{FALLEN if share.collapsed else ''} [{_format_interval(share)}]",
                share.collapsed,
            )
            for share in row.kinds.values()
        ]
        rows.append([*map(Cell, _label(row)), *cells])
    metric = _get_metric(results)
    right = "Percent right" if metric.name == "exact" else metric.title
    interval = "bootstrap (zero width for equal scores)" if metric.graded else "Wilson"
    note = (
        f"{right} [95 % {interval} interval]. {FALLEN} (red): more than {100 * COLLAPSE:.0f} points below the "
        "unpatched model: the method fails on this kind, also if its mean is good."
    )
    columns = ("method", "keep", *results.baseline.kinds)
    return Table("Accuracy by kind of question", columns, rows, (note,), grouped=True)


def _build_paired_table(results: Results) -> Table:
    names = (UNPATCHED, *MARKS)
    rows = []
    for row in results.rows:
        if row.method == UNPATCHED:
            continue
        cells = []
        for difference in (row.differences.get(name) for name in names):
            ours = ""
            if difference is not None:
                interval = f"{format_change(difference.low)}, {format_change(difference.high)}"
                ours = f"{format_change(difference.difference)} [{interval}]"
            cells += [Cell(ours), Cell("" if difference is None or difference.p is None else f"{difference.p:.2g}")]
        hard = ("", "", "")
        if row.hard:
            share = row.hard.ours
            hard = (f"{100 * share.value:.0f} [{_format_interval(share)}]", f"{100 * row.hard.unpatched:.0f}")
            hard = (*hard, f"{row.hard.questions}")
        rows.append([*map(Cell, _label(row)), *cells, *map(Cell, hard)])
    note = (
        f"Points gained or lost on the same questions [95 % interval, paired bootstrap with {RESAMPLES} resamples]; p: "
        "McNemar's exact test, two-sided. p is not corrected for the number of comparisons. Hard: the questions "
        "that `downsample` at the same keep gets wrong, with the score of the method and of the unpatched model."
    )
    columns = (*(text for name in names for text in (f"vs {name}", "p")), "hard", "unpatched", "questions")
    return Table("Against the baselines", ("method", "keep", *columns), rows, (note,), grouped=True)


def _get_metric(results: Results) -> Metric:
    return METRICS[results.header.get("metric", "exact")]


def _label(row: Row) -> tuple[str, str]:
    return row.method, "" if row.method == UNPATCHED else row.keep_text


def _format_interval(share: ScoreShare, digits: int = 0) -> str:
    return f"{100 * share.low:.{digits}f}–{100 * share.high:.{digits}f}"


def _format_bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 10 * 2**20 else f"{count / 2**10:.0f} KiB"


def _time(row: Row, name: str, unpatched_ms: float | None) -> str:
    """Format milliseconds and the speedup over the unpatched model."""
    if unpatched_ms is None or (row.method != UNPATCHED and (row.timing is None or f"{name}_ratio" not in row.timing)):
        return ""
    ratio = 1.0 if row.method == UNPATCHED else row.timing[f"{name}_ratio"]["p50"]
    text = f"{ratio * unpatched_ms:.{0 if ratio * unpatched_ms >= 100 else 1}f}"
    return text if row.method == UNPATCHED else f"{text} ({1 / ratio:.2f}x)"


def _format_title(results: Results) -> str:
    base, env = results.baseline, results.header["environment"]
    data = results.header.get("data")
    asked = f"of {data['name']}" if data else f"on {base.questions // len(base.kinds)} images"
    title = (
        f"{env['model']}: {base.questions} questions {asked}, {env['device']}, {_describe_engine(env)}, {env['dtype']}"
    )
    return title + describe_limit(results)


def describe_limit(results: Results) -> str:
    """Return a clause about the maximum number of tokens per image, empty without a maximum."""
    limit = results.max_visual_tokens
    return "" if limit is None else f", methods get at most {limit} visual tokens per image"


def _describe_engine(env: dict[str, Any]) -> str:
    if "vllm" in env:
        return f"vLLM {env['vllm']}"
    return f"{env['threads']} thread{'s' if env['threads'] != 1 else ''}"


def _format_cost_notes(results: Results) -> list[str]:
    timing = next((row.timing for row in results.rows if row.timing), None)
    sites = {"IN_LLM", "DECODE"}
    cut_inside = (row.method for row in results.rows if row.site and sites & set(row.site.split("+")))
    inside = ", ".join(dict.fromkeys(cut_inside)) or "none here"
    meaning = ", ".join(f"{mark} = not better than {name}" for name, mark in MARKS.items())
    how = (
        "an exact one-sided McNemar test" if _get_metric(results).right is not None else "a one-sided paired bootstrap"
    )
    vllm = "vllm" in results.header["environment"]
    cache = "closed form, from the length of the prompt that vLLM reports" if vllm else "measured"
    notes = [
        "Visual tokens: of an image at the unpatched decoder's entry → in the last decoder layer. Layer avg: mean "
        + (
            "over the decoder's layers. At one target all methods spend the same (settings in the next table)."
            if results.equal_cost
            else f"over the decoder's layers. IN_LLM methods ({inside}) process all tokens in the layers before their "
            "cut, so compare them with PRE_LLM methods at equal layer avg."
        ),
        "FLOPs: decoder prefill, closed form, share of unpatched; KV cache: of one question after prefill, "
        f"{cache}. `downsample` also saves work in the vision tower, which only TTFT includes.",
        f"No better than: {meaning}, by {how} at {100 * LEVEL:.0f} % on the same questions "
        "at the same keep. "
        "Random methods are pooled over "
        f"{len(results.header['plan']['seeds'])} seeds; their intervals count each question once.",
    ]
    if timing:
        how = (
            "requests to vLLM, one at a time and with uncached images, processor and decoding of JPEG files included"
            if vllm
            else f"runs of `generate` on {timing['rows']} question(s), vision tower included, processor not"
        )
        notes.append(
            f"Times: medians of {timing['repeats']} {how}. Each row was timed in alternation with the unpatched "
            "model. In brackets: median speedup. Before it: the unpatched median over all rows, divided by the speedup."
        )
        if busy := find_busy_load(results):
            notes.append(format_busy_note(*busy))
    return [*notes, *_describe_skipped(results)]


def _describe_skipped(results: Results) -> list[str]:
    notes = []
    if left_out := (results.header.get("data") or {}).get("skipped"):
        more = f" and {len(left_out) - 1} more" if left_out[1:] else ""
        notes.append(f"Skipped in the data: {left_out[0]}{more}")
    for record in results.skipped:
        keep_name = "target" if results.equal_cost else "keep"
        notes.append(f"Skipped {record['method']} at {keep_name} {record['keep']:g}: {record['reason']}")
    return notes


__all__ = ["FALLEN", "Cell", "Table", "build_tables", "describe_limit", "to_markdown", "to_rich"]
