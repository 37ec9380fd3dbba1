# SPDX-License-Identifier: Apache-2.0
"""Config values that may differ between decoder layers. All code reads them through this module.

A transformers config stores such a value once, as a list, or in `per_layer_config`. If layers differ, reading the value
from the config itself raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def get_layer_values(config: Any, name: str, default: Any = None) -> list[Any]:
    """Return the value of `name` in each decoder layer of `config`, or `default` if it is missing."""
    layers = config.num_hidden_layers
    layer_configs = getattr(config, "per_layer_config", None) if getattr(config, "is_heterogeneous", False) else None
    values = [
        getattr(config if layer_configs is None else layer_configs[layer], name, default) for layer in range(layers)
    ]
    return [
        value[layer] if isinstance(value, (list, tuple)) and len(value) == layers else value
        for layer, value in enumerate(values)
    ]


def merge_equal(values: Sequence[Any]) -> Any:
    """Return the common value if all layers are equal, or a tuple of all values.

    Examples:
        >>> merge_equal([8, 8]), merge_equal([8, 4])
        (8, (8, 4))
    """
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def get_config_value(config: Any, name: str, default: Any = None) -> Any:
    """Return the value of `name` in any config. A tuple if layers differ."""
    if getattr(config, "is_heterogeneous", False):
        return merge_equal(get_layer_values(config, name, default))
    return getattr(config, name, default)


def find_keyless_layers(config: Any) -> set[int]:
    """Return the indices of layers that use the keys and values of earlier layers."""
    layers = config.num_hidden_layers
    return set(range(layers - (getattr(config, "num_kv_shared_layers", None) or 0), layers))


# Decoders with gated MLPs and any activation.
_GATED = ("llama", "gemma", "bitnet", "zamba2")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation")


def count_mlp_matrices(config: Any) -> int:
    """Return the number of matrices in an MLP of the decoder: 3 with a gate (gate, up, down), 2 without (up, down).

    Configs do not contain this number. SiLU activations imply gated MLPs; others do not, except in the families of
    `_GATED`. Without an activation, configs with `intermediate_size` have gated MLPs, and GPT-like configs do not.
    """
    name = next((value for key in _ACTIVATIONS if isinstance(value := getattr(config, key, None), str)), None)
    if any(kind in (getattr(config, "model_type", None) or "") for kind in _GATED):
        return 3
    if name is None:
        return 3 if hasattr(config, "intermediate_size") else 2
    return 3 if any(part in name.lower() for part in ("silu", "swish", "glu", "gated")) else 2
