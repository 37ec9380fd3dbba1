# SPDX-License-Identifier: Apache-2.0
"""Check that a method keeps the word that every method gives, on made-up tokens: no model is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.methods.registry import build, find_missing_base
from tokenprune.selection.method import Method
from tokenprune.selection.observable_registry import available_observables
from tokenprune.selection.sites.attention import AttentionPattern
from tokenprune.selection.sites.decode import DecodeMethod
from tokenprune.selection.sites.encoder import EncoderMethod, Tower
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.testing import others
from tokenprune.testing.choices import check_choices
from tokenprune.testing.rules import check_dataclass, made, naming, require

LAYERS = 32  # of the decoder that a method hears of
_STAGES = 6  # of a method are checked; what has more does the same at each
_CHECKS: dict[type[Method], Any] = {
    FrameMerger: others.check_frames, UnitDropper: others.check_units, ResizeMethod: others.check_shares,
    ImageChooser: others.check_chosen_images, AttentionPattern: others.check_blocks,
}  # fmt: skip


def check_method(method: str | Method | type[Method], *, tower: Tower | None = None) -> None:
    """Raise ConformanceError, which is an AssertionError, if a method breaks a rule that all methods keep.

    method: a registered name, a class (its default options are checked) or an instance.
    tower:  for a method that merges in the vision tower, the one that it is checked on; None: a made-up one.

    Of all: it is a frozen dataclass with a docstring, has a name, derives from the base class of its site, and needs
    observables that there are. Of one that chooses among visual tokens: it keeps exactly its budget in every image, no
    padding and all tokens where everything is to be kept; it chooses for an image in a batch what it chooses for it
    alone, whatever the padding holds; the same twice; in float32, float16 and bfloat16, and with a NaN among its
    values; it changes nothing that it reads, reads nothing that it did not declare, and not the question unless it says
    `query_aware`. Of others what goes for them: see `tokenprune.testing.others`.
    """
    one = made(method, Method, lambda name: build(name, {}))
    with naming(one.name or type(one).__name__):
        _check_class(one)
        if isinstance(one, EncoderMethod):
            others.check_merges(one, tower)
        elif check := next((check for base, check in _CHECKS.items() if isinstance(one, base)), None):
            check(one)
        else:
            stages: list[Any] = [stage for stage, _ in one.stages(Budget.from_keep(0.5), LAYERS)]
            for number in range(min(_STAGES, len(stages))):
                check_choices(stages[: number + 1])
        if isinstance(one, DecodeMethod):
            others.check_rates(one)


def _check_class(method: Method) -> None:
    check_dataclass(method, "register")
    problem = find_missing_base(type(method), method.site)
    require(problem is None, problem)
    unknown = sorted(set(method.needs) - set(available_observables()))
    require(not unknown, f"it needs {unknown}, which are no observables; known are {available_observables()}")
    own = [field.name for field in dataclasses.fields(method)]
    require(set(method.query_free) <= set(own), f"query_free={dict(method.query_free)} names options that it has not")
    less = dict(method.fallback_options)
    require(set(less) <= set(own), f"fallback_options={less} names options that it has not")
    needs = dataclasses.replace(method, **less).needs
    require(not less or needs <= method.needs, f"with {less} it needs {sorted(needs - set(method.needs))} too")
    if method.query_free and method.query_aware:
        free = dataclasses.replace(method, **method.query_free)
        require(not free.query_aware, f"with {dict(method.query_free)} it still says query_aware")
