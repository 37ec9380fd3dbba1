# SPDX-License-Identifier: Apache-2.0
"""A tiny random Qwen2.5-VL with a complete processor, saved as a folder for `--model`. Its answers are meaningless."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from processors import special_tokenizer
from zoo import FAMILIES

TEMPLATE = (
    "{% for m in messages %}user: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %} {{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_video_model(folder: Path, patch: int = 28) -> Path:
    """Write the model. A token covers 2 x 2 patches of `patch` pixels in two frames."""
    tokenizer = special_tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", start="<|vision_start|>", end="<|vision_end|>"
    )
    family = FAMILIES["qwen2_5_vl"]
    config = {"image_token_id": 0, "tie_word_embeddings": False} | copy.deepcopy(family.config)
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad", "vision_start_token_id": "vision_start"}
    for key, name in (names | {"vision_end_token_id": "vision_end"}).items():
        config[key] = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    config["text_config"] |= {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config["vision_config"] |= {"patch_size": patch, "window_size": 8 * patch}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING["qwen2_5_vl"](**config))
    limits = dict(patch_size=patch, size={"shortest_edge": 64, "longest_edge": 10**7})
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**limits), tokenizer, Qwen2VLVideoProcessor(**limits), chat_template=TEMPLATE
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
