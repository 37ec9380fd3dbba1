# SPDX-License-Identifier: Apache-2.0
"""A profile in tables: the stages of a call, and what each site can save at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.cli.table import Cell, Table
from tokenprune.settings.cost import CostModel, Load, compute_decode_limit, compute_site_limits
from tokenprune_bench.profiling.kept import cuts_in_words, percent
from tokenprune_bench.profiling.stages import FIRST_TOKEN, STAGES

if TYPE_CHECKING:
    from tokenprune_bench.profiling.profile import Profile, Side

TO_FIRST_TOKEN = "to the first token"


def setting_name(profile: Profile) -> str:
    """Return a setting in words, "downsample 0.5 + divprune 0.25"; "" without one."""
    if profile.setting is None:
        return ""
    methods, budgets = profile.setting.steps()
    return " + ".join(f"{method.name} {budget.format_short()}" for method, budget in zip(methods, budgets, strict=True))


def stage_times(side: Side) -> dict[str, float]:
    """Return the milliseconds of a side by name, in the order of the table: the stages to the first token, their sum,
    and a step of decoding."""
    run = side.middle
    first = {STAGES[stage]: run[stage] for stage in FIRST_TOKEN}
    return {**first, TO_FIRST_TOKEN: sum(first.values()), STAGES["decode"]: run["decode"]}


def stage_table(profile: Profile) -> Table:
    """Return the milliseconds of each stage, before and after."""
    before, after = profile.before, profile.after
    ours, theirs = stage_times(before), None if after is None else stage_times(after)
    ratios = {STAGES[stage]: profile.ratio(stage) for stage in STAGES if stage != "selection"}
    ratios[TO_FIRST_TOKEN] = profile.ratio()
    summed = [STAGES[stage] for stage in FIRST_TOKEN]
    rows = []
    for name, took in ours.items():
        row = [name, in_ms(took), f"{took / ours[TO_FIRST_TOKEN]:.0%}" if name in summed else ""]
        if theirs is not None:
            row += [in_ms(theirs[name]), _ratio(ratios.get(name))]
        rows.append([*map(Cell, row)])
    cache = ["KV cache", f"{before.kv_bytes / 1024:.0f} KiB", ""]
    tokens = ["visual tokens, first to last layer", f"{before.visual[0]}", ""]
    if after is not None:
        cache += [f"{after.kv_bytes / 1024:.0f} KiB", _ratio(before.kv_bytes / max(1, after.kv_bytes))]
        average = before.visual[0] / max(1.0, after.visual[2])
        share = percent(after.visual[1] / max(1, before.visual[0]))
        tokens += [f"{after.visual[0]} → {after.visual[1]} ({share})", _ratio(average)]
    rows += [[*map(Cell, row)] for row in (cache, tokens)]
    columns: tuple[str, ...] = ("stage", "unpatched", "share")
    columns += () if after is None else (setting_name(profile), "faster by")
    return Table(f"Where a call's time goes: {profile.environment['model']}", columns, rows, tuple(_notes(profile)))


def limit_table(model: CostModel, load: Load, keep: float, title: str = "What each site can save at most") -> Table:
    """Return what the closed forms say; raises nothing for a model whose tower is not known, whose part is left out."""
    limits = compute_site_limits(model, load, keep)
    if model.tower is None:
        limits = limits[2:]  # of the decoder
    rows = [[*map(Cell, (limit.site, _ratio(limit.at_keep), _ratio(limit.limit), limit.what))] for limit in limits]
    step = compute_decode_limit(model, load, keep)
    note = "a step of decoding, by what it reads of weights and cache"
    rows.append([*map(Cell, ("DECODE", _ratio(step[0]), _ratio(step[1]), note))])
    cost = model.compute_cost(load)
    if model.tower is None:
        first = "The vision tower of this family is not known in closed form: ratios are of the decoder's FLOPs alone."
    else:
        free = cost.flops / cost.tower
        first = (
            f"The tower, with its projector, is {cost.tower_share:.0%} of the prefill's FLOPs ({len(load.views)} "
            f"view(s), {sum(load.views)} patches, {load.visual} visual tokens, {load.text} of text). With the decoder "
            f"free the prefill would be {_ratio(free)} faster: no cut after the tower gives more. On a GPU the tower "
            f"reaches less of the peak, and is some {cost.tower_time:.0%} of the time ({_ratio(1 / cost.tower_time)})."
        )
    second = (
        "Prefill FLOPs, unpatched over pruned, if choosing cost nothing; the limit leaves the text alone. Smaller "
        "images and merging need a tower that takes them."
    )
    return Table(
        title, ("site", f"keep {percent(keep)}", "limit", "taken to be"), rows, (first, second), last_left=True
    )


def _notes(profile: Profile) -> list[str]:
    before, after = profile.before, profile.after
    runs, load = len(before.runs), profile.machine_load
    said = f"The run with the median time to the first token, of {runs}"
    said += "" if after is None else " of each, in turn; ratios are medians over pairs of runs"
    notes = [said + ("." if load is None else f"; load of the machine {load:.1f}.")]
    predicted = profile.predicted()
    if predicted is not None:
        cost = profile.model.compute_cost(profile.load)
        notes.append(
            f"By FLOPs of tower ({cost.tower_share:.0%}) and decoder alone it would be {_ratio(predicted)} faster."
        )
    if after is not None and profile.setting is not None:
        notes.append(f"Asked for: {cuts_in_words(*profile.setting.steps(), profile.visual_of_an_image)}.")
        took = after.middle
        slowest = max(FIRST_TOKEN, key=lambda stage: took[stage])
        share = took[slowest] / sum(took[stage] for stage in FIRST_TOKEN)
        notes.append(f"What limits it now: {STAGES[slowest]}, {share:.0%} of the time to the first token.")
        notes.append(f"Answers: {before.answer!r} unpatched, {after.answer!r} patched.")
    if profile.environment["device"] != "cpu" and after is not None:
        notes.append("Choosing is timed on the host: on this device it is the time to launch it.")
    return notes


def _ratio(value: float | None) -> str:
    return "" if value is None else f"x{value:.2f}" if value < 10 else f"x{value:.0f}"


def in_ms(value: float) -> str:
    """Return milliseconds as text, of a table and of a bar alike."""
    return f"{value:.1f} ms"
