# SPDX-License-Identifier: Apache-2.0
"""Copy a model without copying its weights."""

from __future__ import annotations

import copy
from itertools import chain

from torch import nn

from tokenprune.errors import UnsupportedSetupError

# Attributes that `generate` stores on a compiled model. They call the original model.
_COMPILED = ("_compiled_call", "_last_compile_config")


def share_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that shares all parameters and buffers, so it needs no memory.

    Modules, hooks, config and generation config are copied.

    Raises:
        UnsupportedSetupError: If weights of the model are offloaded.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedSetupError(
            "Some weights of the model are offloaded, and a draft cannot share them. Load all weights, or pass a "
            "smaller model as draft=."
        )
    tensors = chain(model.parameters(), model.buffers())
    draft = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module in draft.modules():
        for name in _COMPILED:
            module.__dict__.pop(name, None)
    return draft
