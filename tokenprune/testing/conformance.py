# SPDX-License-Identifier: Apache-2.0
"""Conformance check of methods on random tokens, without a model."""

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
from tokenprune.testing.rules import check_dataclass, prefix_errors, require, resolve_instance

LAYERS = 32  # decoder layers passed to `Method.stages`
_STAGES = 6  # number of checked stages; methods with more stages repeat them
_CHECKS: dict[type[Method], Any] = {
    FrameMerger: others.check_frames, UnitDropper: others.check_units, ResizeMethod: others.check_shares,
    ImageChooser: others.check_chosen_images, AttentionPattern: others.check_blocks,
}  # fmt: skip


def check_method(method: str | Method | type[Method], *, tower: Tower | None = None) -> None:
    """Raise ConformanceError (an AssertionError) if a method breaks a rule of the method interface.

    Every method must be a frozen dataclass with a docstring and a name, derive from the base class of its site, and
    need existing observables. A method that selects visual tokens must:

    - keep exactly its budget in every image, no padding, and all tokens with `keep=1.0`;
    - select the same tokens when called again, and for a single image or in a batch, for any values at padding;
    - work in float32, float16 and bfloat16, and with NaN values;
    - modify no input, and read only declared observables, the question only with `query_aware`.

    `tokenprune.testing.others` lists the rules of other methods.

    Args:
        method: A registered name, a class (checked with default options) or an instance.
        tower: Tower for a method that merges inside the vision tower. None uses a small random one.

    Raises:
        ConformanceError: If the method breaks a rule.

    Examples:
        >>> from tokenprune.testing import check_method
        >>> check_method("divprune")
    """
    instance = resolve_instance(method, Method, lambda name: build(name, {}))
    with prefix_errors(instance.name or type(instance).__name__):
        _check_class(instance)
        if isinstance(instance, EncoderMethod):
            others.check_merges(instance, tower)
        elif check := next((check for base, check in _CHECKS.items() if isinstance(instance, base)), None):
            check(instance)
        else:
            stages: list[Any] = [stage for stage, _ in instance.stages(Budget.from_keep(0.5), LAYERS)]
            for index in range(min(_STAGES, len(stages))):
                check_choices(stages[: index + 1])
        if isinstance(instance, DecodeMethod):
            others.check_rates(instance)


def _check_class(method: Method) -> None:
    check_dataclass(method, "register")
    problem = find_missing_base(type(method), method.site)
    require(problem is None, problem)
    unknown = sorted(set(method.needs) - set(available_observables()))
    require(not unknown, f"it needs unknown observables {unknown}. See available_observables().")
    options = [field.name for field in dataclasses.fields(method)]
    require(set(method.query_free) <= set(options), f"query_free={dict(method.query_free)} contains unknown options")
    less = dict(method.fallback_options)
    require(set(less) <= set(options), f"fallback_options={less} contains unknown options")
    needs = dataclasses.replace(method, **less).needs
    require(not less or needs <= method.needs, f"with {less} it needs {sorted(needs - set(method.needs))} too")
    if method.query_free and method.query_aware:
        free = dataclasses.replace(method, **method.query_free)
        require(not free.query_aware, f"query_aware must be False with {dict(method.query_free)}")
