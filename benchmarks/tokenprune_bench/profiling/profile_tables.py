# SPDX-License-Identifier: Apache-2.0
"""Tables of a profile: the stages of a call, and the maximum saving per site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.cli.table import Cell, Table
from tokenprune.settings.cost import CostModel, Load, compute_decode_limit, compute_site_limits
from tokenprune_bench.profiling.kept_tokens import describe_cuts, format_percent
from tokenprune_bench.profiling.stages import FIRST_TOKEN, STAGES

if TYPE_CHECKING:
    from tokenprune_bench.profiling.profile import Profile, SideProfile

TO_FIRST_TOKEN = "to the first token"


def format_setting(profile: Profile) -> str:
    """Format the setting of a profile: "downsample 0.5 + divprune 0.25". Empty without a setting."""
    if profile.setting is None:
        return ""
    methods, budgets = profile.setting.steps()
    return " + ".join(f"{method.name} {budget.format_short()}" for method, budget in zip(methods, budgets, strict=True))


def get_stage_times(side: SideProfile) -> dict[str, float]:
    """Return the milliseconds by table row: the stages to the first token, their sum, and a decode step."""
    run = side.median_run
    first = {STAGES[stage]: run[stage] for stage in FIRST_TOKEN}
    return {**first, TO_FIRST_TOKEN: sum(first.values()), STAGES["decode"]: run["decode"]}


def build_stage_table(profile: Profile) -> Table:
    """Return the milliseconds of each stage, before and after."""
    before, after = profile.before, profile.after
    ours, theirs = get_stage_times(before), None if after is None else get_stage_times(after)
    ratios = {STAGES[stage]: profile.ratio(stage) for stage in STAGES if stage != "selection"}
    ratios[TO_FIRST_TOKEN] = profile.ratio()
    summed = [STAGES[stage] for stage in FIRST_TOKEN]
    rows = []
    for name, took in ours.items():
        row = [name, format_ms(took), f"{took / ours[TO_FIRST_TOKEN]:.0%}" if name in summed else ""]
        if theirs is not None:
            row += [format_ms(theirs[name]), _format_ratio(ratios.get(name))]
        rows.append([*map(Cell, row)])
    cache = ["KV cache", f"{before.kv_bytes / 1024:.0f} KiB", ""]
    tokens = ["visual tokens, first to last layer", f"{before.visual[0]}", ""]
    if after is not None:
        cache += [f"{after.kv_bytes / 1024:.0f} KiB", _format_ratio(before.kv_bytes / max(1, after.kv_bytes))]
        average = before.visual[0] / max(1.0, after.visual[2])
        share = format_percent(after.visual[1] / max(1, before.visual[0]))
        tokens += [f"{after.visual[0]} → {after.visual[1]} ({share})", _format_ratio(average)]
    rows += [[*map(Cell, row)] for row in (cache, tokens)]
    columns: tuple[str, ...] = ("stage", "unpatched", "share")
    columns += () if after is None else (format_setting(profile), "faster by")
    return Table(
        f"Where a call's time goes: {profile.environment['model']}", columns, rows, tuple(_format_notes(profile))
    )


def build_limit_table(model: CostModel, load: Load, keep: float, title: str = "Maximum saving per site") -> Table:
    """Return the closed-form limits of each site. The tower's sites are left out if the tower is not known."""
    limits = compute_site_limits(model, load, keep)
    if model.tower is None:
        limits = limits[2:]  # sites in the decoder
    rows = [
        [*map(Cell, (limit.site, _format_ratio(limit.at_keep), _format_ratio(limit.limit), limit.what))]
        for limit in limits
    ]
    step = compute_decode_limit(model, load, keep)
    note = "decode step, by bytes read from weights and cache"
    rows.append([*map(Cell, ("DECODE", _format_ratio(step[0]), _format_ratio(step[1]), note))])
    cost = model.compute_cost(load)
    if model.tower is None:
        first = "The closed form of this family's vision tower is not known, so ratios use the decoder's FLOPs only."
    else:
        free = cost.flops / cost.tower
        first = (
            f"The tower, with its projector, is {cost.tower_share:.0%} of the prefill's FLOPs ({len(load.views)} "
            f"view(s), {sum(load.views)} patches, {load.visual} visual tokens, {load.text} text tokens). A cut after "
            f"the tower makes the prefill at most {_format_ratio(free)} faster. On a GPU the tower reaches a smaller "
            f"share of the peak and takes about {cost.tower_time:.0%} of the time "
            f"({_format_ratio(1 / cost.tower_time)})."
        )
    second = (
        "Prefill FLOPs, unpatched over pruned, without the cost of selection; the limit keeps the text only. Smaller "
        "images and merging need a tower that supports them."
    )
    return Table(
        title, ("site", f"keep {format_percent(keep)}", "limit", "taken to be"), rows, (first, second), last_left=True
    )


def _format_notes(profile: Profile) -> list[str]:
    before, after = profile.before, profile.after
    runs, load = len(before.runs), profile.machine_load
    note = f"The run with the median time to the first token, of {runs}"
    note += "" if after is None else " alternating runs each; ratios are medians over pairs of runs"
    notes = [note + ("." if load is None else f"; load of the machine {load:.1f}.")]
    predicted = profile.predict_speedup()
    if predicted is not None:
        cost = profile.model.compute_cost(profile.load)
        notes.append(
            f"By FLOPs of tower ({cost.tower_share:.0%}) and decoder it would be {_format_ratio(predicted)} faster."
        )
    if after is not None and profile.setting is not None:
        notes.append(f"Asked for: {describe_cuts(*profile.setting.steps(), profile.visual_tokens_per_image)}.")
        took = after.median_run
        slowest = max(FIRST_TOKEN, key=lambda stage: took[stage])
        share = took[slowest] / sum(took[stage] for stage in FIRST_TOKEN)
        notes.append(f"Largest stage now: {STAGES[slowest]}, {share:.0%} of the time to the first token.")
        notes.append(f"Answers: {before.answer!r} unpatched, {after.answer!r} patched.")
    if profile.environment["device"] != "cpu" and after is not None:
        notes.append("Selection is timed on the host. On this device that is its launch time.")
    return notes


def _format_ratio(value: float | None) -> str:
    return "" if value is None else f"x{value:.2f}" if value < 10 else f"x{value:.0f}"


def format_ms(value: float) -> str:
    """Format milliseconds for tables and bars."""
    return f"{value:.1f} ms"
