# SPDX-License-Identifier: Apache-2.0
"""A quantized cache that loses nothing: what differs from a dynamic one with it does so by where things are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import QuantizedLayer


class Lossless(QuantizedLayer):
    """Stores keys and values as they are, where a quantizer would store others."""

    def __init__(self) -> None:
        super().__init__(residual_length=3)  # quantized anew in every third step

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, dict[str, Tensor]]:
        return tensor.clone(), {"scale": torch.ones(1)}

    def _dequantize(self, stored: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return stored[0]


def lossless(model: Any) -> Cache:
    return Cache(layers=[Lossless() for _ in range(model.config.get_text_config().num_hidden_layers)])
