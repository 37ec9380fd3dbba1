# SPDX-License-Identifier: Apache-2.0
"""The settings that are tried: methods and keeps, each with a seed if it draws at random."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tokenprune.errors import OptionError
from tokenprune.methods.registry import available_methods
from tokenprune.selection.method import Site
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting

KEEPS = (0.75, 0.5, 0.33, 0.25, 0.15)
SEED = 0  # of methods that draw at random: what is promised holds for the draw that was tested


def explain_unfit(candidate: Setting, videos: bool) -> str | None:
    """Return why a candidate cannot act on such questions. videos: whether any is about a video."""
    for method in candidate.methods:
        if isinstance(method, ImageChooser):
            return f"{method.name} chooses between the images of a prompt: it has no budget to tune"
        if (method.site is Site.ATTENTION or compares_frames(method)) and not videos:
            return f"{method.name} acts on videos, and these questions are about images only"
    return None


@cache
def load_comparison_methods() -> dict[str, str]:
    """Return the methods that our models did not show to beat both `random` and `uniform` anywhere, and what was seen
    instead; a tuner tries them where they are named."""
    made = json.loads((Path(__file__).parent / "for_comparison.json").read_text(encoding="utf-8"))
    methods: dict[str, str] = made["methods"]
    return methods


def build_grid(methods: Iterable[str | Setting] = (), keeps: Sequence[float | int] = KEEPS) -> list[Setting]:
    """Return a candidate for each method, or stack, and keep; no methods: all that are registered, but for those
    `for_comparison`.

    Raises what `Setting.steps` raises for a setting that cannot be built.
    """
    if not keeps:
        raise OptionError("the tuner needs at least one keep")
    made = []
    for method in tuple(methods) or [name for name in available_methods() if name not in load_comparison_methods()]:
        setting = method if isinstance(method, Setting) else Setting.from_text(method)
        made += [setting.with_keep(keep).with_defaults({}, seed=SEED) for keep in keeps]
    for candidate in made:
        candidate.steps()
    return list(dict.fromkeys(made))


__all__ = ["KEEPS", "build_grid", "explain_unfit", "load_comparison_methods"]
