# SPDX-License-Identifier: Apache-2.0
"""Check that a method keeps the word that every method gives, on made-up tokens: no model is needed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenprune.base import AttentionPattern, ImageChooser, Method, ResizeMethod
from tokenprune.budget import Budget
from tokenprune.errors import ConformanceError
from tokenprune.registry import BASES, build
from tokenprune.sites.decode import DecodeMethod
from tokenprune.sites.encoder import EncoderMethod, Tower
from tokenprune.sites.units import UnitDropper
from tokenprune.testing import others
from tokenprune.testing.choices import check_choices
from tokenprune.testing.rules import require
from tokenprune.view.registry import available_observables

LAYERS = 32  # of the decoder that a method hears of
_STAGES = 6  # of a method are checked; what has more does the same at each


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
    made = _made(method)
    with _saying(made):
        _check_class(made)
        if isinstance(made, EncoderMethod):
            others.check_merges(made, tower)
        elif isinstance(made, UnitDropper):
            others.check_units(made)
        elif isinstance(made, ResizeMethod):
            others.check_shares(made)
        elif isinstance(made, ImageChooser):
            others.check_chosen_images(made)
        elif isinstance(made, AttentionPattern):
            others.check_blocks(made)
        else:
            stages: list[Any] = [stage for stage, _ in made.stages(Budget.of(0.5), LAYERS)]
            for number in range(min(_STAGES, len(stages))):
                check_choices(stages[: number + 1])
        if isinstance(made, DecodeMethod):
            others.check_rates(made)


@contextmanager
def _saying(method: Method) -> Iterator[None]:
    """Raise what a method does wrong, or fails with, as ConformanceError with its name."""
    name = method.name or type(method).__name__
    try:
        yield
    except ConformanceError as error:
        raise ConformanceError(f"{name}: {error}") from error.__cause__
    except Exception as error:
        raise ConformanceError(f"{name} raises {type(error).__name__}: {error}") from error


def _made(method: Any) -> Method:
    if isinstance(method, str):
        return build(method, {})
    if inspect.isclass(method) and issubclass(method, Method):
        try:
            return method()
        except TypeError as error:
            raise ConformanceError(
                f"{method.__name__}() fails: {error}. Every option needs a default; or check an instance"
            ) from error
    if isinstance(method, Method):
        return method
    raise ConformanceError(f"{method!r} is neither the name of a method, nor a Method, nor a class of them")


def _check_class(method: Method) -> None:
    cls = type(method)
    frozen = cls.__dict__.get("__dataclass_params__")
    require(frozen is not None and frozen.frozen, "decorate the class with @dataclass(frozen=True)")
    require(
        (cls.__doc__ or "").strip() and not (cls.__doc__ or "").startswith(f"{cls.__name__}("),
        "its class needs a docstring",
    )
    require(bool(method.name), "it has no name: decorate its class with @register(...)")
    bases = " or ".join(base.__name__ for base in BASES[method.site])
    require(isinstance(method, BASES[method.site]), f"a method of the site {method.site} must derive from {bases}")
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
