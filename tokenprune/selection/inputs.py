# SPDX-License-Identifier: Apache-2.0
"""Inputs that a method needs from an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.budgets import Budget
from tokenprune.selection.method import Site
from tokenprune.selection.observable import Input
from tokenprune.selection.observable_registry import select_observables

if TYPE_CHECKING:
    from tokenprune.selection.method import Method

ANY_DEPTH = 32  # number of decoder layers for methods whose stages do not depend on it
_INPUTS = {
    Site.PRE_ENCODER: Input.PIXELS,
    Site.IN_ENCODER: Input.TOWER,
    Site.PRE_LLM: Input.FEATURES,
    Site.ATTENTION: Input.DECODER,
    Site.IN_LLM: Input.DECODER,
    Site.DECODE: Input.DECODER,
}


def list_inputs(method: Method) -> frozenset[Input]:
    """Return the inputs that the stages of a method need.

    Examples:
        >>> sorted(list_inputs(tokenprune.method("scope")))
        [<Input.FEATURES: 'features'>, <Input.TOWER_ATTENTION: 'tower_attention'>]
    """
    inputs = set()
    for stage, _ in method.stages(Budget.from_keep(0.5), ANY_DEPTH):
        inputs.add(_INPUTS[stage.site])
        inputs.update(observable.input for observable in select_observables(stage.needs))
        if stage.query_aware:
            inputs.add(Input.QUESTION)
    return frozenset(inputs)
