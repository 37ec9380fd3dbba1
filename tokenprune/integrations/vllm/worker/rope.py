# SPDX-License-Identifier: Apache-2.0
"""Decoders with one axis of positions, served as models with M-RoPE whose rope reads the first of three axes."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import StageMissingLayer

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.position_checks import count_positions


def prepare_decoder(decoder: nn.Module, model_config: Any) -> None:
    """Check that every rope of a decoder reads only the first axis, and adapt vLLM's marks for torch.compile.

    The marks then name the last dimension of positions, shape (3, n), as dynamic.

    Raises:
        UnsupportedModelError: If a rope reads other axes.
    """
    if isinstance(decoder, StageMissingLayer):
        return  # this server only encodes images
    ropes = [module for module in decoder.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not ropes or not all(_reads_first_axis(rope, count_positions(model_config)) for rope in ropes):
        raise UnsupportedModelError(
            f'{KEY}: "positions": "original" is not supported for {type(decoder).__name__}, whose rope does not take '
            "several axes. Leave positions out to renumber the kept tokens."
        )
    for module in decoder.modules():
        # vLLM marks the first dimension of positions as dynamic for Llama and others, which assume the shape (n,).
        dims = getattr(module, "_dynamic_arg_dims", None) or {}
        if (marked := dims.get("positions")) is not None:
            dims["positions"] = {-1: next(iter(marked.values()))} if isinstance(marked, dict) else -1


def _reads_first_axis(rope: RotaryEmbeddingBase, num_positions: int) -> bool:
    if not isinstance(rope, MRotaryEmbedding) or rope.mrope_interleaved:
        return False
    return list(rope.mrope_section or ()) == [rope.rotary_dim // 2, 0, 0] and len(rope.cos_sin_cache) >= num_positions
