# SPDX-License-Identifier: Apache-2.0
"""The linear classifier that turns attention masses into a pruning rate, and its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from tokenprune.errors import OptionError
from tokenprune.selection.files import File, reason

_KIND = "tokenprune dyrate predictor"


@dataclass(frozen=True, eq=False)
class RatePredictor:
    """weight: float32 `[K, 4 H]`, bias: float32 `[K]`, over K rates 0, 1/K .. (K-1)/K and the masses of H heads.

    layer: the decoder layer at whose input tokens are dropped. model: `fingerprint` of the decoder it was fitted to.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    layer: int
    model: str

    @property
    def grid(self) -> int:
        """K, the number of rates."""
        return self.weight.shape[0]

    def predict(self, masses: torch.Tensor) -> torch.Tensor:
        """long `[B]`: the index of the rate for masses `[B, H, 4]`."""
        weight, bias = self.weight.to(masses.device), self.bias.to(masses.device)
        return (masses.float().flatten(1) @ weight.T + bias).argmax(dim=1)

    def save(self, path: str | Path) -> None:
        """Write the classifier to a safetensors file."""
        from safetensors.torch import save_file

        metadata = {"kind": _KIND, "layer": str(self.layer), "model": self.model}
        try:
            save_file({"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}, str(path), metadata)
        except (OSError, SafetensorError) as error:
            raise OptionError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> RatePredictor:
        """Read what `save` wrote; raises OptionError for any other file."""
        try:
            tensors, metadata = File.of(path).tensors()
            if metadata.get("kind") != _KIND:
                raise OptionError(f"{path} holds no predictor of `tokenprune fit dyrate`")
            return cls(tensors["weight"], tensors["bias"], int(metadata["layer"]), metadata["model"])
        except (OSError, KeyError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"cannot read a predictor from {path}: {reason(error)}") from error
