# SPDX-License-Identifier: Apache-2.0
"""The demo model: a LLaVA checkpoint with about 4 million parameters, its processor and tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from tokenprune_demo.scenes import COLORS, LARGE, POSITIONS, SIZE, TINY, WORDS

PATCH = 14
GRID = SIZE // PATCH
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>")
PLAIN = (
    "user assistant : ? . , ! a an the is are there in this picture image what which where how many who color colour "
    "digit written does sign say left right upper lower tiny yes no of and one word number"
).split()
VOCAB = [*SPECIAL, *PLAIN, *COLORS, *LARGE, *(f"{k}s" for k in LARGE), *TINY, *POSITIONS, *map(str, range(10)), *WORDS]
ID = {word: i for i, word in enumerate(VOCAB)}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %} {{ message['content'] }} "
    "{% else %}{% for part in message['content'] if part['type'] == 'image' %} <image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %} {{ part['text'] }}{% endfor %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def build_model(seed: int = 0) -> LlavaForConditionalGeneration:
    """Build the untrained model."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=6,
        image_size=SIZE,
        patch_size=PATCH,
        projection_dim=192,
    )
    text = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        initializer_range=0.04,
        pad_token_id=ID["<pad>"],
        bos_token_id=ID["<bos>"],
        eos_token_id=ID["<eos>"],
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=ID["<image>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=GRID**2,
        pad_token_id=ID["<pad>"],
        bos_token_id=ID["<bos>"],
        eos_token_id=ID["<eos>"],
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.pad_token_id = ID["<pad>"]
    model.generation_config.bos_token_id = ID["<bos>"]
    model.generation_config.eos_token_id = ID["<eos>"]
    return model


def build_processor() -> LlavaProcessor:
    """Build a processor with a word-level tokenizer, the CLIP image processor and the chat template."""
    words = Tokenizer(WordLevel(ID, unk_token="<unk>"))
    words.normalizer = Lowercase()
    words.pre_tokenizer = Split(Regex(r"\w+(?:-\w+)*|[^\w\s]"), behavior="removed", invert=True)
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ID["<bos>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        model_max_length=2048,
    )
    images = CLIPImageProcessor(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
    )


def prompt(question: str) -> str:
    """Return the processor's text for a single question. The tokenizer adds ``<bos>``."""
    return f"user: <image> {question} assistant:"


def export(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Save model and processor. The folder is replaced atomically, so readers never see a partial checkpoint."""
    folder = Path(folder)
    fresh, old = (folder.with_name(f".{folder.name}.{tag}") for tag in ("new", "old"))
    for path in (fresh, old):
        shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(fresh)
    build_processor().save_pretrained(fresh)
    readme = folder / "README.md"
    if readme.exists():
        shutil.copy(readme, fresh / "README.md")
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)
