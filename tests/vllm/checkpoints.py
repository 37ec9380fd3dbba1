# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints with real tokenizers and processors, written to a folder for vLLM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor
from transformers.models.pixtral.processing_pixtral import PixtralProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

HIDDEN = 64
SPECIAL = (
    "<pad> <s> </s> <image> <video> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> [IMG] [IMG_BREAK] "
    "[IMG_END] <IMG_CONTEXT> <img> </img> <start_of_image> <end_of_image> <image_soft_token> "
    "<fake_token_around_image> <global-img> <end_of_utterance>"
).split()
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL += ["\n", "\n\n", "\n\n\n", "\n\n\n\n"]  # vLLM's Gemma processor needs these tokens
TEXT = dict(
    hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False,
)  # fmt: skip


def vision(**extra: Any) -> dict[str, Any]:
    return dict(hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, **extra)


def tokenizer(more: Sequence[str] = (), **extra: Any) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with one token for each special name; `more` adds special names at the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters, *more])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **names, extra_special_tokens=extra)
    fast.add_special_tokens({"additional_special_tokens": [*SPECIAL[3:-4], *more]}, replace_extra_special_tokens=False)
    return fast


IDS = {name: index for index, name in enumerate(SPECIAL)}
VOCABULARY = len(SPECIAL) + 256


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tiny checkpoint of one model type.

    Attributes:
        image: Text of an image in a prompt.
        sizes: Sizes of the test images, (height, width).
        max_images: Largest number of images in a prompt.
        mixes: Whether transformers accepts images and a video in the same prompt.
        before: Start of each prompt in transformers, which vLLM adds itself.
        dtype: Dtype in vLLM.
        kind: Model type, if it differs from the name.
        transposed: Pattern of weights that checkpoints on the hub store transposed compared with transformers 5.
    """

    name: str
    config: Callable[[], dict[str, Any]] = field(repr=False)
    processor: Callable[[], Any] = field(repr=False)
    image: str
    sizes: tuple[tuple[int, int], ...] = ((56, 84), (84, 56), (70, 70))
    video: str | None = None
    mrope: bool = False
    rename: tuple[tuple[str, str], ...] = ()
    max_images: int = 2
    dtype: str = "float32"
    mixes: bool = True
    before: str = ""
    kind: str | None = None
    transposed: str | None = None

    def write(self, folder: Path) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[self.kind or self.name](**self.config()))
            wake(model)
        model.generation_config.do_sample = False
        model.float().eval().save_pretrained(folder)
        self.processor().save_pretrained(folder)
        if self.rename or self.transposed:
            weights = load_file(folder / "model.safetensors")
            for name in weights:
                if self.transposed and re.search(self.transposed, name):
                    weights[name] = weights[name].transpose(1, 2).contiguous()
            for pattern, new in self.rename:
                weights = {re.sub(pattern, new, name): value for name, value in weights.items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def prompt(self, images: int, text: str = "what is it? ", video: bool = False) -> str:
        placeholders = ([self.video] if video else []) + [self.image] * images
        return "look: " + " and ".join(placeholders) + " " + text

    def clip(self, seed: int = 0) -> Any:
        """Return six frames in vLLM's format of a video."""
        height, width = self.sizes[0]
        frames = np.random.default_rng(seed).integers(0, 256, (6, height, width, 3), dtype=np.uint8)
        if not self.mrope:
            return frames
        metadata = dict(
            fps=2.0, duration=3.0, total_num_frames=6, frames_indices=list(range(6)), video_backend="opencv"
        )
        return frames, metadata | {"do_sample_frames": False}

    def cases(self, *requests: tuple[int, Any]) -> list[tuple]:
        """Return prompt, images and override of each request, given its number of images and its override."""
        return [(self.prompt(n, f"case {n}? "), self.images(n, seed=n), override) for n, override in requests]

    def video_case(self, override: Any) -> tuple:
        """Return prompt, image, override and video of a request."""
        return self.prompt(1, video=True), self.images(1), override, [self.clip()]

    def images(self, count: int, seed: int = 0) -> list[Image.Image]:
        return [photo(*self.sizes[(seed + index) % len(self.sizes)], seed=seed + index) for index in range(count)]


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def page(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return a white page whose upper third is noise."""
    pixels = np.asarray(photo(height, width, seed)).copy()
    pixels[height // 3 :] = 255
    return Image.fromarray(pixels)


SMALL = ("gemma3", "paligemma", "lfm2_vl")  # they scale embeddings, or compute logits with them


@torch.no_grad()
def wake(model: PreTrainedModel) -> None:
    """Set weights large enough for every input to affect the logits."""
    for name, p in model.named_parameters():
        if p.dim() < 2:
            p.add_(torch.randn_like(p), alpha=0.1)
        elif "embed_tokens" in name:
            p.normal_(std=HIDDEN**-0.5 if model.config.model_type in SMALL else 1.0)
        else:
            p.normal_(std=1.2 / math.sqrt(p[0].numel()))
    model.get_output_embeddings().weight[: len(SPECIAL)] = 0
    model.get_output_embeddings().weight[VOCABULARY:] = 0  # see more_checkpoints.py


def text(model_type: str, **extra: Any) -> dict[str, Any]:
    return dict(model_type=model_type, vocab_size=VOCABULARY, **TEXT | extra)


def llava(side: int = 84, strategy: str = "default") -> Any:
    image = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return LlavaProcessor(
        image, tokenizer(image_token="<image>"), patch_size=14, vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(strategy == "default"),
    )  # fmt: skip


PINPOINTS = [[56, 112], [112, 56], [112, 112]]


def llava_next() -> Any:
    image = LlavaNextImageProcessor(
        image_grid_pinpoints=PINPOINTS, size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    return LlavaNextProcessor(
        image, tokenizer(image_token="<image>"), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def onevision() -> Any:
    return LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size={"height": 56, "width": 56}, image_grid_pinpoints=PINPOINTS),
        tokenizer(image_token="<image>", video_token="<video>"),
        LlavaOnevisionVideoProcessor(size={"height": 56, "width": 56}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


QWEN_TOKENS = dict(
    image_token="<|image_pad|>", video_token="<|video_pad|>", vision_bos_token="<|vision_start|>",
    vision_eos_token="<|vision_end|>",
)  # fmt: skip
QWEN_IDS = dict(
    image_token_id=IDS["<|image_pad|>"], video_token_id=IDS["<|video_pad|>"],
    vision_start_token_id=IDS["<|vision_start|>"], vision_end_token_id=IDS["<|vision_end|>"],
)  # fmt: skip


def qwen(processor: Any, video: Any, patch: int) -> Any:
    # vLLM normalizes images and videos together on the device, so both need the same mean and deviation.
    common = dict(patch_size=patch, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    image = Qwen2VLImageProcessor(size={"shortest_edge": 4 * patch**2, "longest_edge": 256 * 256}, **common)
    clips = video(size={"shortest_edge": 4 * patch**2, "longest_edge": 32 * 256 * 256}, **common)
    return processor(image, tokenizer(**QWEN_TOKENS), clips, chat_template="{{ messages }}")


def qwen_config(kind: str, section: list[int], vision: dict[str, Any], layers: int = 3, **rope: Any) -> dict[str, Any]:
    return dict(
        text_config=text(
            kind,
            num_hidden_layers=layers,
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=section, **rope),
        ),
        vision_config=vision,
        tie_word_embeddings=False,
        **QWEN_IDS,
    )


def internvl() -> Any:
    tokens = tokenizer(
        context_image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", video_token="<video>"
    )
    image = GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=3)
    clips = InternVLVideoProcessor(size={"height": 56, "width": 56})
    return InternVLProcessor(image, tokens, clips, image_seq_length=4)


def gemma3() -> Any:
    image = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    tokens = tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    return Gemma3Processor(image, tokens, image_seq_length=16)


def idefics(processor: Any, image: Any, *clips: Any) -> Any:
    tokens = tokenizer(
        image_token="<image>", fake_image_token="<fake_token_around_image>", global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )  # fmt: skip
    images = image(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    return processor(images, tokens, *clips, image_seq_len=4, chat_template="{{ messages }}")


def pixtral(longest: int = 224, merge: int = 2) -> Any:
    image = PixtralImageProcessor(patch_size=14, size={"longest_edge": longest})
    tokens = tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    return PixtralProcessor(image, tokens, patch_size=14, spatial_merge_size=merge)


CLIP = vision(model_type="clip_vision_model", image_size=84, patch_size=14, projection_dim=32)
SIGLIP = vision(model_type="siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False)
# Weight names of a tower in transformers 4, which most checkpoints use. The other checkpoints here have
# the names of transformers 5.
TOWER = ((r"vision_tower\.(?!vision_model)", "vision_tower.vision_model."),)
QWEN3_TOWER = dict(
    depth=4, num_heads=2, patch_size=16, hidden_size=HIDDEN, intermediate_size=96, out_hidden_size=HIDDEN,
    num_position_embeddings=64, deepstack_visual_indexes=[0, 1, 2],
)  # fmt: skip
QWEN_IMAGE, QWEN_VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"

CHECKPOINTS: dict[str, Checkpoint] = {
    checkpoint.name: checkpoint
    for checkpoint in [
        Checkpoint(
            "llava",
            lambda: dict(text_config=text("llama"), vision_config=CLIP, image_token_index=IDS["<image>"],
                         image_seq_length=36, tie_word_embeddings=False),
            llava, "<image>",
        ),
        Checkpoint(
            "llava_siglip",
            lambda: dict(text_config=text("llama"), vision_config=SIGLIP, image_token_index=IDS["<image>"],
                         image_seq_length=16, vision_feature_layer=-1, vision_feature_select_strategy="full",
                         tie_word_embeddings=False),
            lambda: llava(56, "full"), "<image>", rename=TOWER, kind="llava",
        ),
        Checkpoint(
            "qwen2_5_vl",
            lambda: qwen_config("qwen2_5_vl_text", [4, 6, 6], dict(
                depth=4, num_heads=2, patch_size=14, hidden_size=HIDDEN, intermediate_size=96, out_hidden_size=HIDDEN,
                window_size=56, fullatt_block_indexes=[1, 3], tokens_per_second=1)),
            lambda: qwen(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, 14),
            QWEN_IMAGE, video=QWEN_VIDEO, mrope=True, sizes=((140, 196), (196, 140), (168, 168)),
        ),
        Checkpoint(
            "qwen2_vl",
            lambda: qwen_config("qwen2_vl_text", [4, 6, 6], dict(
                depth=3, num_heads=2, patch_size=14, embed_dim=HIDDEN, hidden_size=HIDDEN, mlp_ratio=2)),
            lambda: qwen(Qwen2VLProcessor, Qwen2VLVideoProcessor, 14),
            QWEN_IMAGE, video=QWEN_VIDEO, mrope=True, sizes=((140, 196), (196, 140), (168, 168)),
        ),
        Checkpoint(
            "qwen3_vl",
            lambda: qwen_config("qwen3_vl_text", [6, 5, 5], QWEN3_TOWER, mrope_interleaved=True),
            lambda: qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16),
            QWEN_IMAGE, video=QWEN_VIDEO, mrope=True, sizes=((160, 224), (224, 160), (192, 192)),
        ),
        Checkpoint(
            "llava_onevision",
            lambda: dict(text_config=text("qwen2"), vision_config=SIGLIP, image_grid_pinpoints=PINPOINTS,
                         image_token_index=IDS["<image>"], video_token_index=IDS["<video>"],
                         tie_word_embeddings=False),
            onevision, "<image>", video="<video>",
        ),
        Checkpoint(
            "llava_next",
            lambda: dict(text_config=text("llama"), vision_config=CLIP | {"image_size": 56}, image_seq_length=16,
                         image_grid_pinpoints=PINPOINTS, image_token_index=IDS["<image>"], tie_word_embeddings=False),
            llava_next, "<image>",
        ),
        Checkpoint(
            "internvl",
            lambda: dict(text_config=text("qwen2"), image_seq_length=4, image_token_id=IDS["<IMG_CONTEXT>"],
                         vision_config=vision(model_type="internvl_vision", image_size=[56, 56], patch_size=[14, 14],
                                              layer_scale_init_value=1.0), tie_word_embeddings=False),
            internvl, "<IMG_CONTEXT>",
        ),
        Checkpoint(
            "gemma3",
            lambda: dict(text_config=text("gemma3_text", query_pre_attn_scalar=32, sliding_window=512,
                                          layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
                         vision_config=SIGLIP, mm_tokens_per_image=16, boi_token_index=IDS["<start_of_image>"],
                         eoi_token_index=IDS["<end_of_image>"], image_token_index=IDS["<image_soft_token>"],
                         tie_word_embeddings=False),
            gemma3, "<start_of_image>",
        ),
        Checkpoint(
            "smolvlm",
            lambda: dict(text_config=text("llama"), image_token_id=IDS["<image>"], scale_factor=2, pad_token_id=0,
                         vision_config=vision(model_type="smolvlm_vision", image_size=56, patch_size=14),
                         tie_word_embeddings=False),
            lambda: idefics(SmolVLMProcessor, SmolVLMImageProcessor, SmolVLMVideoProcessor()), "<image>",
        ),
        Checkpoint(
            "idefics3",
            lambda: dict(text_config=text("llama"), image_token_id=IDS["<image>"], scale_factor=2, pad_token_id=0,
                         vision_config=vision(model_type="idefics3_vision", image_size=56, patch_size=14),
                         tie_word_embeddings=False),
            lambda: idefics(Idefics3Processor, Idefics3ImageProcessor), "<image>",
        ),
        Checkpoint(
            "pixtral",
            lambda: dict(text_config=text("mistral"), image_token_index=IDS["[IMG]"], vision_feature_layer=-1,
                         vision_feature_select_strategy="full", tie_word_embeddings=False,
                         vision_config=vision(model_type="pixtral", image_size=112, patch_size=14, head_dim=32)),
            lambda: pixtral(longest=112, merge=1), "[IMG]", sizes=((70, 98), (98, 70), (84, 84)), kind="llava",
        ),
        Checkpoint(
            "mistral3",
            lambda: dict(text_config=text("mistral"), image_token_index=IDS["[IMG]"], spatial_merge_size=2,
                         vision_config=vision(model_type="pixtral", image_size=224, patch_size=14, head_dim=32),
                         tie_word_embeddings=False),
            pixtral, "[IMG]", sizes=((140, 196), (196, 140), (168, 168)),
        ),
    ]
}  # fmt: skip

# For cuts inside the decoder: full attention, enough layers, and images of several KV cache blocks.
DEEP: dict[str, Checkpoint] = {
    checkpoint.name: checkpoint
    for checkpoint in [
        Checkpoint(
            "llava_deep",
            lambda: dict(text_config=text("llama", num_hidden_layers=4), vision_config=CLIP | {"image_size": 140},
                         image_token_index=IDS["<image>"], image_seq_length=100, tie_word_embeddings=False),
            lambda: llava(140), "<image>", rename=TOWER, sizes=((140, 140),), kind="llava",
        ),
        Checkpoint(
            "mistral3_deep",
            lambda: dict(text_config=text("mistral", sliding_window=None), image_token_index=IDS["[IMG]"],
                         spatial_merge_size=2, tie_word_embeddings=False,
                         vision_config=vision(model_type="pixtral", image_size=224, patch_size=14, head_dim=32)),
            pixtral, "[IMG]", sizes=((224, 224),), kind="mistral3",
        ),
        Checkpoint(
            "qwen3_vl_deep",
            lambda: qwen_config("qwen3_vl_text", [6, 5, 5], QWEN3_TOWER, layers=5, mrope_interleaved=True),
            lambda: qwen(Qwen3VLProcessor, Qwen3VLVideoProcessor, 16),
            QWEN_IMAGE, video=QWEN_VIDEO, mrope=True, sizes=((256, 256),), kind="qwen3_vl",
        ),
    ]
}  # fmt: skip
