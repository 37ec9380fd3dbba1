# SPDX-License-Identifier: Apache-2.0
"""Models of published shapes for vLLM: config, processor and tokenizer, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_WHAT = "What is in the image? ASSISTANT:"
WORDS = {
    "llava": f"USER: <image> {_WHAT}",
    "qwen": f"USER: <|vision_start|><|image_pad|><|vision_end|> {_WHAT}",
}
_SMALL = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip


def image_of(shape: str, seed: int, tiny: bool) -> Image.Image:
    """Return a noise image: 576 tokens in LLaVA, 2,116 in Qwen2.5-VL."""
    side = 336 if shape == "llava" else 448 if tiny else 1288
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def write_model(shape: str, folder: Path, tiny: bool) -> None:
    """Write a model without weights. With `tiny`, a small one of the same type."""
    config, processor = {"llava": _llava, "qwen": _qwen, "qwen3": _qwen3}[shape](tiny)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def llava_config(tiny: bool = False, **more: Any) -> Any:
    """Return the config of LLaVA-1.5-7B."""
    from transformers import LlavaConfig

    text = dict(
        model_type="llama", vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
    )  # fmt: skip
    tower = dict(
        model_type="clip_vision_model", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
        num_attention_heads=16, image_size=336, patch_size=14, projection_dim=768,
    )  # fmt: skip
    if tiny:
        text |= _SMALL
        tower |= dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2)
    config = LlavaConfig(
        text_config=text, vision_config=tower, image_seq_length=576, vision_feature_layer=-2,
        vision_feature_select_strategy="default", tie_word_embeddings=False, **more,
    )  # fmt: skip
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def qwen_config(tiny: bool = False, **more: Any) -> Any:
    """Return the config of Qwen2.5-VL-7B."""
    from transformers import Qwen2_5_VLConfig

    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 6, 6] if tiny else [16, 24, 24])
    text = dict(
        model_type="qwen2_5_vl_text", vocab_size=152064, hidden_size=3584, intermediate_size=18944,
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
        tie_word_embeddings=False, rope_parameters=rope,
    )  # fmt: skip
    tower = dict(
        depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584, patch_size=14,
        window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    if tiny:
        text |= _SMALL
        tower |= dict(depth=4, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=128)
        tower |= dict(fullatt_block_indexes=[1, 3])
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **more)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def qwen3_config(tiny: bool = False, **more: Any) -> Any:
    """Return the config of Qwen3-VL-2B."""
    from transformers import Qwen3VLConfig

    section = [6, 5, 5] if tiny else [24, 20, 20]
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=section, mrope_interleaved=True)
    text = dict(
        model_type="qwen3_vl_text", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=32768,
        tie_word_embeddings=True, rope_parameters=rope,
    )  # fmt: skip
    tower = dict(
        depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=2048, patch_size=16,
        spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304, deepstack_visual_indexes=[5, 11, 17],
    )  # fmt: skip
    if tiny:
        text |= _SMALL | dict(head_dim=32, vocab_size=512)
        tower |= dict(depth=4, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=128)
        tower |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0, 1, 2])
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **more)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def _llava(tiny: bool) -> tuple[Any, Any]:
    import checkpoints

    return llava_config(tiny, image_token_index=checkpoints.IDS["<image>"]), checkpoints.llava(336)


def _qwen(tiny: bool) -> tuple[Any, Any]:
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    import checkpoints

    common = dict(patch_size=14, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    common |= dict(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 2500})
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**common), checkpoints.tokenizer(**checkpoints.QWEN_TOKENS),
        Qwen2VLVideoProcessor(**common), chat_template="{{ messages }}",
    )  # fmt: skip
    return qwen_config(tiny, **checkpoints.QWEN_IDS), processor


def _qwen3(tiny: bool) -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    import checkpoints

    common = dict(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 4096 * 4096}, **common),
        checkpoints.tokenizer(**checkpoints.QWEN_TOKENS),
        Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 25165824}, **common),
        chat_template="{{ messages }}",
    )  # fmt: skip
    return qwen3_config(tiny, **checkpoints.QWEN_IDS), processor
