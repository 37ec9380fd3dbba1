# SPDX-License-Identifier: Apache-2.0
"""The repr of a method is the call that creates it, with the options that differ from their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

import tokenprune
from basics import METHODS
from each import each
from tokenprune import Method, Pruner
from tokenprune.methods import registry

CALLS = {name: partial(tokenprune.method, name) for name in METHODS}


@each("name", METHODS)
def test_repr_of_a_default_method_is_an_empty_call(name: str) -> None:
    assert repr(tokenprune.method(name)) == str(tokenprune.method(name)) == f"{name}()"


@each(
    "call",
    [
        "dart(pivot_image=8)",
        "dart(pivot_text=0, exact=False)",
        "vscan(stage2=False, local=0.25)",
        "tome(r=(8, -1))",
        "pevlm(sink_mode='text', dense_layers=(0, 1))",
        "dyrate(rate='schedule', schedule=(0.5, 0.9))",
    ],
)
def test_evaluating_the_repr_makes_an_equal_method(call: str) -> None:
    method = eval(call, {}, CALLS)
    assert repr(method) == call and eval(repr(method), {}, CALLS) == method


def test_an_option_with_the_default_value_is_left_out() -> None:
    default = tokenprune.method("dart").pivot_image
    assert repr(tokenprune.method("dart", pivot_image=default, layer=3)) == "dart(layer=3)"


def test_repr_of_a_list_contains_calls() -> None:
    assert repr([tokenprune.method("fastv", layer=3), tokenprune.method("divprune")]) == "[fastv(layer=3), divprune()]"


@pytest.fixture
def registered():
    yield tokenprune.register("loudest", paper="none")
    registry._METHODS.pop("loudest", None)


def test_a_method_of_a_third_party_gets_the_same_repr(registered) -> None:
    @registered
    @dataclass(frozen=True)
    class Loudest(Pruner):
        """Keep the loudest tokens."""

        power: float = 1.0
        weights: tuple = field(default_factory=tuple)
        table: np.ndarray | None = None  # == of arrays is elementwise
        cache: dict = field(default_factory=dict, repr=False)

    assert repr(Loudest()) == "loudest()"
    assert repr(Loudest(2.0, (1, 2), cache={1: 2})) == "loudest(power=2.0, weights=(1, 2))"
    assert repr(Loudest(table=np.arange(2))) == "loudest(table=array([0, 1]))"
    assert repr(Loudest(power=1)) == "loudest(power=1)"  # shown, because some options distinguish int and float


def test_options_without_default_are_shown_and_custom_repr_is_kept(registered) -> None:
    @dataclass(frozen=True)
    class Base(Method):
        side: int

        def __repr__(self) -> str:
            return "mine"

    @dataclass(frozen=True)
    class Child(Base):
        pass

    @dataclass(frozen=True)
    class Stage(Method):
        side: int

    assert repr(Base(1)) == repr(Child(1)) == "mine"
    assert repr(Stage(1)).endswith("Stage(side=1)")  # not registered, so its repr uses the class name
