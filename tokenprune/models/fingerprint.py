# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of vision towers, to detect that calibration data belongs to another model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenprune.models.per_layer import get_config_value

if TYPE_CHECKING:
    from torch import nn

# Settings of a config that weights do not show.
_SETTINGS = ("num_attention_heads", "num_heads", "hidden_act", "layer_norm_eps", "spatial_merge_size", "window_size")
_NOT_THERE = object()
_SAMPLES = 16  # sampled values per parameter: training changes all values


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a vision tower.

    Args:
        kind: Class name of the tower.
        dtype: dtype of the weights.
        digest: Hash of shapes and weights.
    """

    kind: str
    dtype: str
    digest: str

    @staticmethod
    def from_module(module: nn.Module, **facts: int) -> Fingerprint:
        """Create the fingerprint of a tower.

        Ignores names and order of parameters, because transformers changes them between versions.

        Args:
            module: The tower.
            facts: Other values that affect calibration and are not weights.

        Examples:
            >>> Fingerprint.from_module(torch.nn.Linear(2, 2)).kind
            'Linear'
        """
        parameters = list(module.parameters())
        config = getattr(module, "config", None)
        if config is None:
            settings = {"heads": [m.num_heads for m in module.modules() if hasattr(m, "num_heads")]}
        else:
            settings = {name: get_config_value(config, name, _NOT_THERE) for name in _SETTINGS}
            settings = {name: value for name, value in settings.items() if value is not _NOT_THERE}
        parts = sorted(_digest(parameter) for parameter in parameters)
        text = repr((type(module).__name__, sorted((settings | facts).items()), parts))
        dtype = str(parameters[0].dtype).removeprefix("torch.")
        return Fingerprint(type(module).__name__, dtype, hashlib.sha256(text.encode()).hexdigest()[:32])


def _digest(parameter: torch.Tensor) -> str:
    flat = parameter.detach().flatten()
    places = torch.linspace(0, len(flat) - 1, min(_SAMPLES, len(flat)), dtype=torch.float64, device="cpu").long()
    sample = flat[places.to(flat.device)].double().cpu().numpy().tobytes()
    return hashlib.sha256(f"{tuple(parameter.shape)}".encode() + sample).hexdigest()


def compute_fingerprint(module: nn.Module) -> str:
    """Return dtype and digest of the `Fingerprint` of `module` as a string."""
    fingerprint = Fingerprint.from_module(module)
    return f"{fingerprint.dtype}:{fingerprint.digest}"
