# SPDX-License-Identifier: Apache-2.0
"""What a benchmark runs: methods, keeps, seeds, and the batches that questions are asked in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenprune
from tokenprune.base import ImageChooser
from tokenprune.bench.results import MARKS, UNPATCHED
from tokenprune.errors import OptionError
from tokenprune.registry import method_class

BASELINES = tuple(MARKS)
DEFAULT_KEEPS = (0.5, 0.25, 0.11)
DEFAULT_PICTURES = 24


@dataclass(frozen=True)
class Plan:
    """What to run. The baselines are put in front of `methods`; () means all registered ones that choose within a
    picture.

    pictures: how many held-out pictures, each with one question of every kind; 0: all. Questions that are given are all
    asked. seeds: methods that draw at random (that have an option `seed`) answer once with each. repeats: timed runs of
    each (method, keep); 0: no timing.
    """

    methods: tuple[str, ...] = ()
    keeps: tuple[float | int, ...] = DEFAULT_KEEPS
    pictures: int = DEFAULT_PICTURES
    batch_size: int = 32
    seeds: tuple[int, ...] = (0, 1, 2)
    repeats: int = 7

    def __post_init__(self) -> None:
        # Every question here has one picture, so that nothing is left to a method that chooses between pictures.
        fitting = (name for name in tokenprune.available_methods() if not issubclass(method_class(name), ImageChooser))
        names = self.methods or tuple(fitting)
        for name in names:
            method_class(name)  # raises with close matches
        ordered = tuple(dict.fromkeys((*BASELINES, *names)))
        object.__setattr__(self, "methods", ordered)
        for keep in self.keeps:
            tokenprune.Budget.of(keep)
        for name, low in (("pictures", 0), ("batch_size", 1), ("repeats", 0)):
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.keeps or not self.seeds:
            raise OptionError("a benchmark needs at least one keep and one seed")


def seeds_of(name: str, seeds: Sequence[int]) -> list[dict[str, int]]:
    """Return the options of each pass: one for each seed, or one pass without options."""
    if name != UNPATCHED and "seed" in tokenprune.method_info(name).options:
        return [{"seed": seed} for seed in seeds]
    return [{}]


def batched(examples: Sequence[Any], size: int) -> list[list[Any]]:
    """Cut questions into batches in their order; one about a video is alone."""
    batches: list[list[Any]] = []
    for example in examples:
        if batches and len(batches[-1]) < size and not (example.is_film or batches[-1][0].is_film):
            batches[-1].append(example)
        else:
            batches.append([example])
    return batches
