# SPDX-License-Identifier: Apache-2.0
"""Candidate settings of the tuner: a method and a keep each, with a seed for random methods."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tokenprune.errors import OptionError
from tokenprune.methods.registry import available_methods, method_class
from tokenprune.selection.method import Site
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting

KEEPS = (0.75, 0.5, 0.33, 0.25, 0.15)
SEED = 0  # seed of random methods: the promise holds for the tested draw only


def explain_unfit(candidate: Setting, videos: bool) -> str | None:
    """Return why a candidate cannot run on these questions, or None.

    Args:
        candidate: The setting to check.
        videos: Whether any question is about a video.
    """
    for method in candidate.methods:
        if isinstance(method, ImageChooser):
            return f"{method.name} chooses between the images of a prompt, so it cannot be tuned"
        if (method.site is Site.ATTENTION or compares_frames(method)) and not videos:
            return f"{method.name} works on videos, but these questions are about images only"
    return None


@cache
def load_comparison_methods() -> dict[str, str]:
    """Return the methods that did not beat both `random` and `uniform` in our measurements, with the measured result.

    The tuner tries these methods only if the user names them.
    """
    stored = json.loads((Path(__file__).parent / "for_comparison.json").read_text(encoding="utf-8"))
    methods: dict[str, str] = stored["methods"]
    return methods


def build_grid(methods: Iterable[str | Setting] = (), keeps: Sequence[float | int] = KEEPS) -> list[Setting]:
    """Return one candidate per method (or stack) and keep.

    Args:
        methods: Methods, stacks or settings. Empty selects all registered methods except the comparison methods
            and methods that need a fitted file.
        keeps: Keeps to combine with each method.

    Raises:
        OptionError: If `keeps` is empty, or a setting is not valid.

    Examples:
        >>> [str(candidate) for candidate in build_grid(["divprune"], keeps=[0.5, 0.25])]
        ['divprune 0.5', 'divprune 0.25']
    """
    if not keeps:
        raise OptionError("the tuner needs at least one keep")
    candidates = []
    left_out = load_comparison_methods()
    names = [name for name in available_methods() if name not in left_out and not method_class(name).default_equals]
    for method in tuple(methods) or names:
        setting = method if isinstance(method, Setting) else Setting.from_text(method)
        candidates += [setting.with_keep(keep).with_defaults({}, seed=SEED) for keep in keeps]
    for candidate in candidates:
        candidate.steps()
    return list(dict.fromkeys(candidates))


__all__ = ["KEEPS", "build_grid", "explain_unfit", "load_comparison_methods"]
