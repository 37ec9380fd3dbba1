# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 bits on the CPU, in place; a test without the library that does it is skipped."""

from __future__ import annotations

import pytest
from torch import nn


def torchao(model: nn.Module) -> None:
    """All linear layers, by torchao."""
    quantization = pytest.importorskip(
        "torchao.quantization",
        reason="torchao is not installed (pip install torchao): transformers imports it at once, noisily",
    )
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def bitsandbytes(model: nn.Module) -> None:
    """The linear layers of the decoder, by bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "language_model" in path:
            made = bnb.nn.Linear8bitLt(module.in_features, module.out_features, module.bias is not None,
                                       has_fp16_weights=False)  # fmt: skip
            made.load_state_dict(module.state_dict())
            model.set_submodule(path, made.to("cpu"))
