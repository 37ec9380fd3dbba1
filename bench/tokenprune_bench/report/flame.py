# SPDX-License-Identifier: Apache-2.0
"""A profile as a page: a bar for each stage under what it is a part of, before and after on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenprune
from tokenprune.profiling.profile import STAGES, Profile, Side
from tokenprune.profiling.profile_tables import limit_table, setting_name, stage_table
from tokenprune_bench.report.page import filled
from tokenprune_bench.report.styles import Styles

WIDTH, HEIGHT, GAP = 1000, 26, 3
_LETTER = 7.5  # units that a letter takes, at most
# Which stages a bar spans; those that stand in several spans stand under each other.
_SPANS = (
    (("call", tuple(STAGES)),),
    (
        ("processor", ("processor",)),
        ("to the first token", ("tower", "selection", "prefill", "rest")),
        ("a step", ("decode",)),
    ),
    (
        ("tower", ("tower",)),
        ("decoder", ("selection", "prefill")),
        ("rest", ("rest",)),
    ),
    (("choosing", ("selection",)), ("layers", ("prefill",))),
)
_COLORS = {"processor": 5, "tower": 0, "selection": 7, "prefill": 1, "rest": 4, "decode": 2}


@dataclass(frozen=True)
class Bar:
    """A bar, in units of the drawing. label: what fits inside. title: all of it. css: its colour."""

    x: float
    y: float
    width: float
    label: str
    title: str
    css: str


@dataclass(frozen=True)
class Flame:
    """Bars of one side. name: of the side. total: milliseconds, from the image to the end of one step of decoding."""

    name: str
    total: float
    bars: list[Bar]
    width: int = WIDTH
    height: int = len(_SPANS) * (HEIGHT + GAP)
    bar_height: int = HEIGHT


def flames(profile: Profile) -> list[Flame]:
    """Return the bars of both sides, on one scale."""
    sides = [("unpatched", profile.before)]
    if profile.after is not None:
        sides.append((setting_name(profile), profile.after))
    longest = max(_total(side) for _, side in sides)
    return [Flame(name, _total(side), _bars(side, WIDTH / longest)) for name, side in sides]


def profile_page(profile: Profile, keep: float) -> str:
    """Return the profile as a whole HTML page, which loads nothing. Raises TokenPruneError without Jinja2."""
    tables = [stage_table(profile), limit_table(profile.model, profile.load, keep)]
    env = profile.environment
    facts = [
        ("Model", env["model"]),
        ("Device", f"{env['device']}, {env['dtype']}"),
        ("Setting", setting_name(profile) or "unpatched alone"),
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


def _total(side: Side) -> float:
    return sum(side.median(stage) for stage in STAGES)


def _bars(side: Side, scale: float) -> list[Bar]:
    starts, at = {}, 0.0
    for stage in STAGES:
        starts[stage] = at
        at += side.median(stage)
    made = []
    for level, spans in enumerate(_SPANS):
        for name, stages in spans:
            took = sum(side.median(stage) for stage in stages)
            if took <= 0:
                continue
            title = f"{_whole_name(name, stages)}: {took:.1f} ms"
            width = took * scale
            label = next((text for text in (title, name) if len(text) * _LETTER < width), "")
            css = f"c{_COLORS[stages[-1]]}" if len(stages) < 3 else "base1"
            made.append(Bar(starts[stages[0]] * scale, level * (HEIGHT + GAP), width, label, title, css))
    return made


def _whole_name(name: str, stages: Sequence[str]) -> str:
    return STAGES[stages[0]] if len(stages) == 1 else name
