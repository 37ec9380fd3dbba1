# SPDX-License-Identifier: Apache-2.0
"""Read what may differ from layer to layer of a decoder from its config: the one place where that is done.

A config of transformers gives such a value once for all layers, as a list, or through `per_layer_config`; where layers
differ, asking the config itself for it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get_layer_values(config: Any, name: str, default: Any = None) -> list[Any]:
    """Return the value of `name` in each decoder layer of `config`, `default` where it has none."""
    layers = config.num_hidden_layers
    own = getattr(config, "per_layer_config", None) if getattr(config, "is_heterogeneous", False) else None
    values = [getattr(config if own is None else own[layer], name, default) for layer in range(layers)]
    return [
        value[layer] if isinstance(value, (list, tuple)) and len(value) == layers else value
        for layer, value in enumerate(values)
    ]


def merge_equal(values: Sequence[Any]) -> Any:
    """Return the one value that all layers have, or a tuple of them all."""
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def get_config_value(config: Any, name: str, default: Any = None) -> Any:
    """Return the value of `name` in any config, a tuple with one for each layer where layers differ."""
    if getattr(config, "is_heterogeneous", False):
        return merge_equal(get_layer_values(config, name, default))
    return getattr(config, name, default)


def find_keyless_layers(config: Any) -> set[int]:
    """Return the layers that attend to keys and values of earlier ones, and make none of their own."""
    layers = config.num_hidden_layers
    return set(range(layers - (getattr(config, "num_kv_shared_layers", None) or 0), layers))


# Decoders whose MLPs are gated whatever their activation is.
_GATED = ("llama", "gemma", "bitnet", "zamba2")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation")


def count_mlp_matrices(config: Any) -> int:
    """Return how many matrices an MLP of the decoder has: 3 if it is gated (a gate, up, down), 2 if not (up, down).

    No config says it. The activation tells: SiLU stands in gated MLPs, others do not but in the families of `_GATED`.
    Without an activation in the config, it is the name of the MLP's width: GPT's kin do not say `intermediate_size`.
    """
    name = next((value for key in _ACTIVATIONS if isinstance(value := getattr(config, key, None), str)), None)
    if any(kind in (getattr(config, "model_type", None) or "") for kind in _GATED):
        return 3
    if name is None:
        return 3 if hasattr(config, "intermediate_size") else 2
    return 3 if any(part in name.lower() for part in ("silu", "swish", "glu", "gated")) else 2
