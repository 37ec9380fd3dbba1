# SPDX-License-Identifier: Apache-2.0
"""Linear classifier that predicts the pruning rate of `dyrate` from attention masses, and its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from tokenprune.errors import OptionError
from tokenprune.selection.files import File, describe_error

_KIND = "tokenprune dyrate predictor"


@dataclass(frozen=True, eq=False)
class RatePredictor:
    """Linear classifier over K pruning rates 0, 1/K ... (K-1)/K.

    Args:
        weight: Weights for the 4 attention masses of H heads, float32 (K, 4 H).
        bias: Bias, float32 (K,).
        layer: Decoder layer whose input is pruned.
        model: `fingerprint` of the decoder that it was fitted to.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    layer: int
    model: str

    @property
    def grid(self) -> int:
        """Number of rates, K."""
        return self.weight.shape[0]

    def predict(self, masses: torch.Tensor) -> torch.Tensor:
        """Return the index of the predicted rate of each row, long (B,).

        Args:
            masses: Attention per head to each `TokenType` (system text, image, instruction, answer), (B, H, 4).
        """
        weight, bias = self.weight.to(masses.device), self.bias.to(masses.device)
        return (masses.float().flatten(1) @ weight.T + bias).argmax(dim=1)

    def save(self, path: str | Path) -> None:
        """Write the classifier to a safetensors file.

        Raises:
            OptionError: If the file cannot be written.
        """
        from safetensors.torch import save_file

        metadata = {"kind": _KIND, "layer": str(self.layer), "model": self.model}
        try:
            save_file({"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}, str(path), metadata)
        except (OSError, SafetensorError) as error:
            raise OptionError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> RatePredictor:
        """Read a file written by `save`.

        Raises:
            OptionError: If the file is missing, damaged or of another kind.
        """
        try:
            tensors, metadata = File.from_path(path).tensors()
            if metadata.get("kind") != _KIND:
                raise OptionError(f"{path} was not written by `tokenprune fit dyrate`")
            return cls(tensors["weight"], tensors["bias"], int(metadata["layer"]), metadata["model"])
        except (OSError, KeyError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"cannot read a predictor from {path}: {describe_error(error)}") from error
