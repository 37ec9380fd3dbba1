# SPDX-License-Identifier: Apache-2.0
"""Generation and conversations on a given cache, to compare kinds of caches, and a lossless quantized cache, which
differs from a dynamic cache only in its storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import QuantizedLayer

from oracle import close


def generate(model: Any, inputs: Any, steps: int = 6, **options: Any) -> Any:
    """Return the output of greedy decoding, with its logits."""
    fixed = dict(max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, output_logits=True)
    try:
        return model.generate(**inputs, **fixed | options)
    finally:
        vars(model).pop("_previous_max_cache_length", None)  # left by `generate`


def check_same(actual: Any, expected: Any, exact: bool = False) -> None:
    """Check that two outputs of `generate` have the same tokens and logits. exact: bit for bit."""
    assert torch.equal(actual.sequences, expected.sequences)
    check_logits(actual.logits, expected.logits, exact)


def check_logits(actual: Any, expected: Any, exact: bool = False) -> None:
    for actual_step, expected_step in zip(actual, expected, strict=True):
        assert not exact or torch.equal(actual_step, expected_step)
        close(actual_step, expected_step)


@torch.no_grad()
def talk(model: Any, first: Any, later: Any, cache: Any) -> list[Tensor]:
    """Return the logits of four turns on one cache: images, text, other images, a single token."""
    text = torch.full((len(first["input_ids"]), 3), 11)
    images = {name: value for name, value in later.items() if name != "attention_mask"}
    turns = [first, {"input_ids": text}, images, {"input_ids": text[:, :1]}]
    logits = [model(**turn, past_key_values=cache).logits for turn in turns]
    return [logits[0][:, -1], logits[1], logits[2][:, -1], logits[3]]


class Lossless(QuantizedLayer):
    """Cache layer that stores exact keys and values instead of quantized values."""

    def __init__(self) -> None:
        super().__init__(residual_length=3)  # quantizes again every third step

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, dict[str, Tensor]]:
        return tensor.clone(), {"scale": torch.ones(1)}

    def _dequantize(self, stored: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return stored[0]


def lossless(model: Any) -> Cache:
    return Cache(layers=[Lossless() for _ in range(model.config.get_text_config().num_hidden_layers)])
