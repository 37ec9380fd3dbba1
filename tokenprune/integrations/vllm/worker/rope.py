# SPDX-License-Identifier: Apache-2.0
"""Worker: a decoder with rope, made to read the first of three axes of positions."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import StageMissingLayer

from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.vllm.setting.position_checks import longest
from tokenprune.integrations.vllm.setting.settings import KEY


def prepare_decoder(decoder: nn.Module, model_config: Any) -> None:
    """Check that every rope of a decoder reads the first axis alone, and have torch.compile take the last dimension of
    positions `[3, n]` for the one that changes. Raises UnsupportedModelError."""
    if isinstance(decoder, StageMissingLayer):
        return  # a server that encodes alone
    ropes = [module for module in decoder.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not ropes or not all(_reads_first_axis(rope, longest(model_config)) for rope in ropes):
        raise UnsupportedModelError(
            f'{KEY}: "positions": "original" does not go with {type(decoder).__name__}, whose rope does not take '
            "positions of several axes: leave positions out, and kept tokens are counted anew"
        )
    for module in decoder.modules():
        # vLLM marks these when it compiles. Of Llama and others it names the first dimension, which is the last one too
        # where positions are [n].
        dims = getattr(module, "_dynamic_arg_dims", None) or {}
        if (marked := dims.get("positions")) is not None:
            dims["positions"] = {-1: next(iter(marked.values()))} if isinstance(marked, dict) else -1


def _reads_first_axis(rope: RotaryEmbeddingBase, longest: int) -> bool:
    if not isinstance(rope, MRotaryEmbedding) or rope.mrope_interleaved:
        return False
    return list(rope.mrope_section or ()) == [rope.rotary_dim // 2, 0, 0] and len(rope.cos_sin_cache) >= longest
