# SPDX-License-Identifier: Apache-2.0
"""Quantization of a model to 8-bit weights on the CPU. Tests skip if the library is not installed."""

from __future__ import annotations

import pytest
from torch import nn


def torchao(model: nn.Module) -> None:
    """Quantize all linear layers with torchao."""
    quantization = pytest.importorskip(
        "torchao.quantization",
        reason="torchao is not installed (pip install torchao): transformers imports it at once, noisily",
    )
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def bitsandbytes(model: nn.Module) -> None:
    """Quantize the linear layers of the decoder with bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "language_model" in path:
            quantized = bnb.nn.Linear8bitLt(module.in_features, module.out_features, module.bias is not None,
                                       has_fp16_weights=False)  # fmt: skip
            quantized.load_state_dict(module.state_dict())
            model.set_submodule(path, quantized.to("cpu"))
