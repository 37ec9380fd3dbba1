# SPDX-License-Identifier: Apache-2.0
"""The plan of a benchmark: methods, keeps, seeds, and the batches of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tokenprune
from tokenprune.errors import OptionError
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting
from tokenprune_bench.profiling.patched import build_escalation, is_escalation
from tokenprune_bench.results import MARKS, UNPATCHED
from tokenprune_bench.two_pass import ESCALATE

BASELINES = tuple(MARKS)
DEFAULT_KEEPS = (0.5, 0.25, 0.11)
DEFAULT_IMAGES = 24
T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """A setting with a seed, with which all questions are asked.

    method: what records call it: the setting on one line, or of the unpatched model `UNPATCHED`. keep: what was asked
    for. setting: None for the unpatched model.
    """

    method: str
    keep: float | int
    seed: int | None = None
    setting: Setting | None = None

    @staticmethod
    def for_control(name: str) -> Pass:
        """Return the pass in which the unpatched model is asked what a control shows."""
        return Pass(f"{UNPATCHED}, {name}", 1.0)

    @property
    def key(self) -> dict[str, Any]:
        """Plain values that name the pass in the folder of a run."""
        return {"method": self.method, "keep": self.keep, "seed": self.seed}


@dataclass(frozen=True)
class BenchPlan:
    """The methods, keeps and seeds to run. The baselines are put in front of `methods`; () means all registered methods
    except those that choose between images unless `several` is set, and video methods unless `videos` is set.
    `ESCALATE` can be named beside them. Options and stacks are written on one line, or read already, and the plan
    has them in their one spelling (`methods`) and as objects (`settings`); every method of a stack gets the keep.

    several, videos: whether a question may have several images, or a video. images: how many held-out images (or
    videos, prompts), each with one question of every kind; 0: all. limit: the first of their questions to ask; 0: all.
    Questions of the caller's own are all asked. seeds:
    methods that draw at random (that have an option `seed`) answer once with each. repeats: timed runs of each (method,
    keep); 0: no timing. equal_cost: each of `keeps` is a share of the unpatched model's visual tokens, averaged over
    the decoder's layers, and each method gets a setting of its own that spends it (see equal_cost.py).
    """

    methods: tuple[str | Setting, ...] = ()
    keeps: tuple[float | int, ...] = DEFAULT_KEEPS
    images: int = DEFAULT_IMAGES
    limit: int = 0
    batch_size: int = 32
    seeds: tuple[int, ...] = (0, 1, 2)
    repeats: int = 7
    several: bool = False
    videos: bool = False
    equal_cost: bool = False

    def __post_init__(self) -> None:
        names = self.methods or tuple(name for name in tokenprune.available_methods() if self._fits(name))
        settings = {one.to_text(): one for one in map(_setting, (*BASELINES, *names))}  # raises with close matches
        stacks = [name for name, one in settings.items() if len(one.names) > 1] if self.equal_cost else []
        if stacks:
            raise OptionError(f"{stacks[0]} is a stack, whose parts could share a cost in many ways: name methods")
        object.__setattr__(self, "methods", tuple(settings))
        object.__setattr__(self, "_settings", settings)
        for keep in self.keeps:
            tokenprune.Budget.from_keep(keep)
            if self.equal_cost and not isinstance(keep, float):
                raise OptionError(
                    f"equal cost is a share of the unpatched model's visual tokens, such as 0.25, not {keep} tokens"
                )
        for name, low in (("images", 0), ("limit", 0), ("batch_size", 1), ("repeats", 0)):
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.keeps or not self.seeds:
            raise OptionError("a benchmark needs at least one keep and one seed")

    def _fits(self, name: str) -> bool:
        """Return True if a method can change anything on these questions."""
        info = tokenprune.method_info(name)
        choosing = issubclass(info.cls, ImageChooser)
        return (self.several or not choosing) and (self.videos or not info.for_videos)

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings, without a keep, by what records call them."""
        return self._settings

    def rows(self) -> list[tuple[str, float | int]]:
        """Return each (method, keep) that is run; a method that removes no tokens has one keep."""
        return [
            (name, keep)
            for name, setting in self.settings.items()
            for keep in (self.keeps if self.equal_cost or not _removes_nothing(setting) else (1.0,))
        ]

    def passes(self, name: str, keep: float | int) -> list[Pass]:
        """Return the passes of a method at a keep: one for each seed if it draws at random, else one."""
        setting = self.settings.get(name)
        if setting is None:
            return [Pass(name, keep)]
        drawn = not is_escalation(setting) and setting.draws_at_random
        at = setting.with_keep(keep)
        return [Pass(name, keep, seed, at.with_defaults({}, seed)) for seed in (self.seeds if drawn else (None,))]


def _setting(method: str | Setting) -> Setting:
    if isinstance(method, Setting):
        return method
    return build_escalation(1.0) if method == ESCALATE else Setting.from_text(method).validate()


def _removes_nothing(setting: Setting) -> bool:
    return not is_escalation(setting) and not any(method.removes for method in setting.methods)


def split_batches(items: Sequence[T], size: int, alone: Callable[[T], bool]) -> list[list[T]]:
    """Cut questions into batches in their order; one that is `alone` (about a video) shares its batch with none."""
    batches: list[list[T]] = []
    for item in items:
        if batches and len(batches[-1]) < size and not (alone(item) or alone(batches[-1][0])):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches
