# SPDX-License-Identifier: Apache-2.0
"""A profile as a page: the rows of its table of stages as bars, before and after on one scale."""

from __future__ import annotations

from dataclasses import dataclass

import tokenprune
from tokenprune_bench.profiling.profile import Profile
from tokenprune_bench.profiling.profile_tables import (
    TO_FIRST_TOKEN,
    build_limit_table,
    build_stage_table,
    format_ms,
    format_setting,
    get_stage_times,
)
from tokenprune_bench.profiling.stages import FIRST_TOKEN, STAGES
from tokenprune_bench.report.page import filled
from tokenprune_bench.report.styles import Styles

WIDTH, HEIGHT, GAP = 1000, 26, 3
_LETTER, _MARGIN = 8, 8  # units that a letter takes, at most, and what stays free beside a label
_COLORS = {"processor": 5, "tower": 0, "selection": 7, "prefill": 1, "rest": 4, "decode": 2}


@dataclass(frozen=True)
class Bar:
    """A bar, in units of the drawing. name, time: as in the table of stages. label: what fits inside. css: its
    colour."""

    x: float
    y: float
    width: float
    name: str
    time: str
    label: str
    css: str

    @property
    def title(self) -> str:
        return f"{self.name}: {self.time}"


@dataclass(frozen=True)
class Flame:
    """Bars of one side, in the order of the table of stages. name: of the side. first_token: its time, as text."""

    name: str
    first_token: str
    bars: list[Bar]
    width: int = WIDTH
    height: int = 2 * (HEIGHT + GAP)
    bar_height: int = HEIGHT


def flames(profile: Profile) -> list[Flame]:
    """Return the bars of both sides, on one scale."""
    sides = [("unpatched", profile.before)]
    if profile.after is not None:
        sides.append((format_setting(profile), profile.after))
    made = [(name, get_stage_times(side)) for name, side in sides]
    scale = WIDTH / max(times[TO_FIRST_TOKEN] + times[STAGES["decode"]] for _, times in made)
    return [Flame(name, format_ms(times[TO_FIRST_TOKEN]), _bars(times, scale)) for name, times in made]


def profile_page(profile: Profile, keep: float) -> str:
    """Return the profile as a whole HTML page, which loads nothing. Raises TokenPruneError without Jinja2."""
    tables = [build_stage_table(profile), build_limit_table(profile.model, profile.load, keep)]
    env = profile.environment
    facts = [
        ("Model", env["model"]),
        ("Device", f"{env['device']}, {env['dtype']}"),
        ("Setting", format_setting(profile) or "unpatched alone"),
        ("Versions", ", ".join(f"{name} {env[name]}" for name in ("tokenprune", "transformers", "torch"))),
    ]
    return filled(
        "profile.html",
        facts=facts,
        flames=flames(profile),
        tables=tables,
        styles=Styles({}, {}),
        version=tokenprune.__version__,
    )


def _bars(times: dict[str, float], scale: float) -> list[Bar]:
    """Return a bar for each stage that takes time; the sum lies above its stages."""
    css = {STAGES[stage]: f"c{color}" for stage, color in _COLORS.items()} | {TO_FIRST_TOKEN: "base0"}
    below = [STAGES[stage] for stage in FIRST_TOKEN]
    made, at = [], 0.0
    for name, took in times.items():
        x, width = 0.0 if name == TO_FIRST_TOKEN else at * scale, took * scale
        if name != TO_FIRST_TOKEN:
            at += took
        if took > 0:
            time = format_ms(took)
            label = next(
                (text for text in (f"{name}: {time}", name, time) if len(text) * _LETTER + _MARGIN < width), ""
            )
            made.append(Bar(x, HEIGHT + GAP if name in below else 0, width, name, time, label, css[name]))
    return made
