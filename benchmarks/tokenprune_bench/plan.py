# SPDX-License-Identifier: Apache-2.0
"""Plan of a benchmark: methods, keeps, seeds, and batches of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tokenprune
from tokenprune.errors import OptionError
from tokenprune.selection.method import Site
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting
from tokenprune.settings.max_visual_tokens import LIMITER, check_limit
from tokenprune_bench.profiling.patched import build_escalation, is_escalation
from tokenprune_bench.results import MARKS, UNPATCHED
from tokenprune_bench.two_pass import ESCALATE

BASELINES = tuple(MARKS)
DEFAULT_KEEPS = (0.5, 0.25, 0.11)
DEFAULT_IMAGES = 24
T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """One run over all questions with a setting and a seed.

    Attributes:
        method: Name in records: the setting on one line, or `UNPATCHED`.
        keep: The requested keep.
        seed: Seed of a random method.
        setting: The setting. None for the unpatched model.
    """

    method: str
    keep: float | int
    seed: int | None = None
    setting: Setting | None = None

    @staticmethod
    def for_control(name: str) -> Pass:
        """Return the pass of the unpatched model over the inputs of a control."""
        return Pass(f"{UNPATCHED}, {name}", 1.0)

    @property
    def key(self) -> dict[str, Any]:
        """Plain values that identify the pass in a run folder."""
        return {"method": self.method, "keep": self.keep, "seed": self.seed}


@dataclass(frozen=True)
class BenchPlan:
    """Methods, keeps and seeds to run.

    The baselines are added before `methods`. Settings and stacks may be given on one line or as objects. `methods` has
    them in normalized spelling, `settings` as objects. All methods of a stack get the keep. Questions of the user's own
    data are all asked.

    Args:
        methods: Methods to run, including `ESCALATE`. Empty selects all registered methods, except image choosers
            unless `several` is set, and video methods unless `videos` is set.
        keeps: Keeps to run.
        images: Number of held-out images (or videos, prompts), with one question of every kind each. 0 for all.
        limit: Maximum number of their questions. 0 for all.
        batch_size: Largest number of questions per batch.
        seeds: Seeds of random methods.
        repeats: Timed runs per method and keep. 0 for no timing.
        several: Whether a question can have several images.
        videos: Whether a question can have a video.
        equal_cost: Each keep is a share of the unpatched visual tokens, averaged over the decoder's layers, and each
            method gets its own setting for this share (see equal_cost.py).
        max_visual_tokens: Maximum number of tokens per image before a method selects tokens. None: no limit. The
            baseline `downsample` then has one row, for the limit alone.

    Raises:
        OptionError: If a method or value is not valid.
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
    max_visual_tokens: int | None = None

    def __post_init__(self) -> None:
        names = self.methods or tuple(name for name in tokenprune.available_methods() if self._fits(name))
        settings = {
            setting.to_text(): setting for setting in map(_parse_setting, (*BASELINES, *names))
        }  # raises for unknown names
        self._check_limit([setting for name, setting in settings.items() if name not in BASELINES])
        stacks = [name for name, setting in settings.items() if len(setting.names) > 1] if self.equal_cost else []
        if stacks:
            raise OptionError(
                f"{stacks[0]} is a stack, and its methods could share the cost in many ways. Use single methods."
            )
        object.__setattr__(self, "methods", tuple(settings))
        object.__setattr__(self, "_settings", settings)
        for keep in self.keeps:
            tokenprune.Budget.from_keep(keep)
            if self.equal_cost and not isinstance(keep, float):
                raise OptionError(f"--equal-cost needs shares of the visual tokens, such as 0.25, not {keep} tokens.")
        for name, low in (("images", 0), ("limit", 0), ("batch_size", 1), ("repeats", 0)):
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}, not {getattr(self, name)}.")
        if not self.keeps or not self.seeds:
            raise OptionError("A benchmark needs at least one keep and one seed.")

    def _check_limit(self, settings: Sequence[Setting]) -> None:
        """Raise OptionError or BudgetError if these settings cannot run with `max_visual_tokens`."""
        if self.max_visual_tokens is None:
            return
        if self.equal_cost:
            raise OptionError("--equal-cost compares shares of all visual tokens. Leave out --max-visual-tokens.")
        if self.videos:
            raise OptionError("--max-visual-tokens limits images, and a question is about a video. Leave it out.")
        for setting in settings:
            if is_escalation(setting):
                raise OptionError(f"{ESCALATE} does not support --max-visual-tokens. Leave out one.")
            check_limit(self.max_visual_tokens, setting.names)

    def _fits(self, name: str) -> bool:
        """Return True if a method can have another effect on these questions than the others."""
        info = tokenprune.method_info(name)
        if self.max_visual_tokens is not None and info.cls.site is Site.PRE_ENCODER:
            return False
        choosing = issubclass(info.cls, ImageChooser)
        is_own = info.cls.default_equals is None
        return is_own and (self.several or not choosing) and (self.videos or not info.for_videos)

    @property
    def settings(self) -> dict[str, Setting]:
        """Settings without a keep, by their name in records."""
        return self._settings

    def rows(self) -> list[tuple[str, float | int]]:
        """Return each (method, keep) to run. A method that drops no tokens has one keep, and so has the limit."""
        return [(name, keep) for name, setting in self.settings.items() for keep in self._get_keeps(setting)]

    def _get_keeps(self, setting: Setting) -> tuple[float | int, ...]:
        if self.max_visual_tokens is not None and setting.name == LIMITER:
            return (self.max_visual_tokens,)
        return self.keeps if self.equal_cost or not _removes_nothing(setting) else (1.0,)

    def passes(self, name: str, keep: float | int) -> list[Pass]:
        """Return the passes of a method at a keep: one per seed for a random method, else one."""
        setting = self.settings.get(name)
        if setting is None:
            return [Pass(name, keep)]
        is_random = not is_escalation(setting) and setting.draws_at_random
        setting_at_keep = setting.with_keep(keep)
        if self.max_visual_tokens is not None and setting.name != LIMITER:
            setting_at_keep = replace(setting_at_keep, max_visual_tokens=self.max_visual_tokens)
        return [
            Pass(name, keep, seed, setting_at_keep.with_defaults({}, seed))
            for seed in (self.seeds if is_random else (None,))
        ]


def _parse_setting(method: str | Setting) -> Setting:
    if isinstance(method, Setting):
        return method
    return build_escalation(1.0) if method == ESCALATE else Setting.from_text(method).validate()


def _removes_nothing(setting: Setting) -> bool:
    return not is_escalation(setting) and not any(method.removes for method in setting.methods)


def split_batches(items: Sequence[T], size: int, is_alone: Callable[[T], bool]) -> list[list[T]]:
    """Split items into batches in order. An item with `is_alone` gets its own batch."""
    batches: list[list[T]] = []
    for item in items:
        if batches and len(batches[-1]) < size and not (is_alone(item) or is_alone(batches[-1][0])):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches
