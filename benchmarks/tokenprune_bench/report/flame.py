# SPDX-License-Identifier: Apache-2.0
"""Profile as an HTML page: stages as bars, before and after on one scale."""

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
from tokenprune_bench.report.page import render_template
from tokenprune_bench.report.styles import Styles

WIDTH, HEIGHT, GAP = 1000, 26, 3
_LETTER, _MARGIN = 8, 8  # maximum width of a letter, and margin of a label
_COLORS = {"processor": 5, "tower": 0, "selection": 7, "prefill": 1, "rest": 4, "decode": 2}


@dataclass(frozen=True)
class Bar:
    """A bar, in units of the SVG.

    Attributes:
        x: Left edge.
        y: Upper edge.
        width: Width.
        name: Stage, as in the table of stages.
        time: Time as text.
        label: Text inside the bar, "" if none fits.
        css: Class of its color.
    """

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
    """Bars of one side of a profile.

    Attributes:
        name: Name of the side.
        first_token: Time to the first token, as text.
        bars: Bars in the order of the table of stages.
        width: Width of the SVG.
        height: Height of the SVG.
        bar_height: Height of a bar.
    """

    name: str
    first_token: str
    bars: list[Bar]
    width: int = WIDTH
    height: int = 2 * (HEIGHT + GAP)
    bar_height: int = HEIGHT


def build_flames(profile: Profile) -> list[Flame]:
    """Return the bars of both sides, on one scale."""
    sides = [("unpatched", profile.before)]
    if profile.after is not None:
        sides.append((format_setting(profile), profile.after))
    times_by_side = [(name, get_stage_times(side)) for name, side in sides]
    scale = WIDTH / max(times[TO_FIRST_TOKEN] + times[STAGES["decode"]] for _, times in times_by_side)
    return [Flame(name, format_ms(times[TO_FIRST_TOKEN]), _build_bars(times, scale)) for name, times in times_by_side]


def make_profile_page(profile: Profile, keep: float) -> str:
    """Return the profile as a self-contained HTML page.

    Args:
        profile: The profile.
        keep: Keep of the table of limits.

    Raises:
        TokenPruneError: If Jinja2 is not installed.
    """
    tables = [build_stage_table(profile), build_limit_table(profile.model, profile.load, keep)]
    env = profile.environment
    facts = [
        ("Model", env["model"]),
        ("Device", f"{env['device']}, {env['dtype']}"),
        ("Setting", format_setting(profile) or "unpatched only"),
        ("Versions", ", ".join(f"{name} {env[name]}" for name in ("tokenprune", "transformers", "torch"))),
    ]
    return render_template(
        "profile.html",
        facts=facts,
        flames=build_flames(profile),
        tables=tables,
        styles=Styles({}, {}),
        version=tokenprune.__version__,
    )


def _build_bars(times: dict[str, float], scale: float) -> list[Bar]:
    """Return a bar for each stage with a nonzero time. The sum is above its stages."""
    css = {STAGES[stage]: f"c{color}" for stage, color in _COLORS.items()} | {TO_FIRST_TOKEN: "base0"}
    below = [STAGES[stage] for stage in FIRST_TOKEN]
    bars, start = [], 0.0
    for name, took in times.items():
        x, width = 0.0 if name == TO_FIRST_TOKEN else start * scale, took * scale
        if name != TO_FIRST_TOKEN:
            start += took
        if took > 0:
            time = format_ms(took)
            label = next(
                (text for text in (f"{name}: {time}", name, time) if len(text) * _LETTER + _MARGIN < width), ""
            )
            bars.append(Bar(x, HEIGHT + GAP if name in below else 0, width, name, time, label, css[name]))
    return bars
