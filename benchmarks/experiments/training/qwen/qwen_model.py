# SPDX-License-Identifier: Apache-2.0
"""The second demo model: a Qwen2.5-VL checkpoint with 4.8 million parameters, its vocabulary and processor."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from qwen_vocabulary import ID, VOCAB

PATCH, MERGE, FRAMES = 8, 2, 2
CELL = PATCH * MERGE  # pixels per side of a visual token
WINDOW = 64  # pixels per side of an attention window of the tower


def build_model(seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Build the untrained model."""
    torch.manual_seed(seed)
    special = {"pad_token_id": ID["<pad>"], "bos_token_id": ID["<bos>"], "eos_token_id": ID["<eos>"]}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(VOCAB),
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "initializer_range": 0.04,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20.0, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": True,
            **special,
        },
        vision_config={
            "depth": 5,
            "hidden_size": 160,
            "intermediate_size": 432,
            "num_heads": 5,
            "out_hidden_size": 192,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "tokens_per_second": 24,
            "window_size": WINDOW,
            "fullatt_block_indexes": [2, 4],
            "in_channels": 3,
            "initializer_range": 0.04,
        },
        image_token_id=ID["<|image_pad|>"],
        video_token_id=ID["<|video_pad|>"],
        vision_start_token_id=ID["<|vision_start|>"],
        vision_end_token_id=ID["<|vision_end|>"],
        tie_word_embeddings=True,
        **special,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():  # both frames of a pair start with equal weights
        weight = model.model.visual.patch_embed.proj.weight
        torch.nn.init.normal_(weight, std=0.05)
        weight[:, :, 1] = weight[:, :, 0]
    return model


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %} {{ message['content'] }} "
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %} <|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %} <|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %} {{ part['text'] }}{% endif %}{% endfor %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def build_processor() -> Qwen2_5_VLProcessor:
    """Build a processor with a word-level tokenizer, image and video processors and the chat template."""
    words = Tokenizer(WordLevel(ID, unk_token="<unk>"))
    words.normalizer = Lowercase()
    words.pre_tokenizer = Split(Regex(r"\w+(?:-\w+)*|[^\w\s]"), behavior="removed", invert=True)
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ID["<bos>"])])
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    words.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=dict(zip(("vision_bos", "vision_eos", "image_token", "video_token"), marks, strict=True)),
        padding_side="left",
        model_max_length=4096,
    )
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    images = Qwen2VLImageProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 640 * 640}, **common)
    videos = Qwen2VLVideoProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 448 * 448}, **common)
    return Qwen2_5_VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=CHAT_TEMPLATE
    )


def export(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
    """Save model and processor. The folder is replaced atomically, so readers never see a partial checkpoint."""
    folder = Path(folder)
    fresh, old = (folder.with_name(f".{folder.name}.{tag}") for tag in ("new", "old"))
    for path in (fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(fresh)
    config = fresh / "config.json"  # has the dtype of the loaded model instead of the file's
    config.write_text(config.read_text(encoding="utf-8").replace('"bfloat16"', '"float32"'), encoding="utf-8")
    build_processor().save_pretrained(fresh)
    readme = folder / "README.md"
    if readme.exists():
        shutil.copy(readme, fresh / "README.md")
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)
