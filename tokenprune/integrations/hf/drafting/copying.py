# SPDX-License-Identifier: Apache-2.0
"""A second model on the same weights."""

from __future__ import annotations

import copy
from itertools import chain

from torch import nn

from tokenprune.errors import UnsupportedSetupError

# What `generate` keeps on a model that it has compiled: calls of that model.
_COMPILED = ("_compiled_call", "_last_compile_config")


def share_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with modules, hooks, config and generation config of its own; each parameter and buffer
    is the very object that `model` has, so that it costs no memory.

    Raises UnsupportedSetupError for a model whose weights are not in memory.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedSetupError(
            "some weights of the model are offloaded, and come and go with its own forward: a draft cannot share them. "
            "Load the model onto its devices, or give a smaller model as draft="
        )
    tensors = chain(model.parameters(), model.buffers())
    draft = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module in draft.modules():
        for name in _COMPILED:
            module.__dict__.pop(name, None)
    return draft
