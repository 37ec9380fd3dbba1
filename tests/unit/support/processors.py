# SPDX-License-Identifier: Apache-2.0
"""Processors of transformers, created offline, and their actual token counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.deepseek_ocr2.image_processing_deepseek_ocr2 import DeepseekOcr2ImageProcessor
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
from transformers.models.glm46v.image_processing_glm46v import Glm46VImageProcessor
from transformers.models.glmga.image_processing_glmga import GlmgaImageProcessor
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor
from transformers.models.pixtral.processing_pixtral import PixtralProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor
from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor

from tokenprune_demo import MODELS

DEMO = MODELS["demo_vlm"]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def special_tokenizer(**extra: str) -> Any:
    """Return the shipped tokenizer with special tokens of another family."""
    return AutoTokenizer.from_pretrained(DEMO, extra_special_tokens=extra)


def llava() -> Any:
    """Return the LLaVA processor of the shipped model."""
    return AutoProcessor.from_pretrained(DEMO)


@cache
def demo_model() -> Any:
    """Return the shipped model. Tests must leave it unchanged."""
    return AutoModelForImageTextToText.from_pretrained(DEMO).eval()


def build_for(family: Any, processor: Any) -> Any:
    """Build the tiny model of a family with the placeholder of `processor`."""
    return replace(family, config={**family.config, "image_token_id": processor.image_token_id}).build()


# Qwen's processor with small patches, and limits that do not resize the images of the tests.
LIMITS = dict(patch_size=4, size={"shortest_edge": 64, "longest_edge": 10**6})


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Draw soft blobs with some grain."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 6, 6, generator=g)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)[0]
    values = smooth + 0.03 * torch.randn(3, height, width, generator=g)
    return Image.fromarray((values.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())


def asked(processor: Any, *images: Image.Image) -> dict[str, torch.Tensor]:
    """Return a batch with one image and one question per row."""
    return processor(
        images=list(images), text=["<image>what color is it?"] * len(images), padding=True, return_tensors="pt"
    )


def state(processor: Any) -> Any:
    """Return all state that a patch on a processor may change."""
    image = processor.image_processor if hasattr(processor, "image_processor") else processor
    return (type(image), type(processor)), dict(vars(image)), image.to_json_string()


@dataclass(frozen=True)
class Partial:
    """A processor reduced to the parts that counting reads, for families whose packages or tokens are not installed."""

    image_processor: Any
    image_seq_length: int = 4
    image_seq_len: int = 4
    patch_size: int = 4
    downsample_ratio: int = 2

    def __call__(self, images: Any, **kwargs: Any) -> Any:
        return self.image_processor(images, **kwargs)


def written(processor: Any, *images: torch.Tensor, **kwargs: Any) -> int:
    """Return the number of placeholders that a processor writes for a prompt with these images."""
    inputs = processor(images=[list(images)], text=["<image>" * len(images)], return_tensors="pt", **kwargs)
    return int((inputs["input_ids"] == tokenizer().convert_tokens_to_ids("<image>")).sum())


@dataclass(frozen=True)
class Counted:
    """A small image processor with countable tokens, and a function that returns its actual token count.

    different: minimum number of different counts that the random sizes of the test must produce.
    """

    make: Callable[..., Any]
    real: Callable[[Any, torch.Tensor], int]
    variants: Sequence[dict[str, Any]] = ({},)
    longest: int = 200
    different: int = 10


PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
GRID = [[32 * rows, 32 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def _next(**settings: Any) -> Any:
    settings = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}} | settings
    image = LlavaNextImageProcessor(image_grid_pinpoints=PINPOINTS, **settings)
    return LlavaNextProcessor(
        image, tokenizer(), patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _onevision(**settings: Any) -> Any:
    image = LlavaOnevisionImageProcessor(size={"height": 32, "width": 32}, image_grid_pinpoints=GRID)
    return LlavaOnevisionProcessor(
        image,
        tokenizer(),
        LlavaOnevisionVideoProcessor(),
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        **settings,
    )


def _lfm2(**settings: Any) -> Any:
    settings = dict(encoder_patch_size=4, tile_size=32, min_image_tokens=4, max_image_tokens=16) | settings
    return Lfm2VlProcessor(Lfm2VlImageProcessor(**settings), tokenizer())


def _pixtral(size: dict[str, int] | None = None, **settings: Any) -> Any:
    image = PixtralImageProcessor(patch_size=4, size=size or {"longest_edge": 300})
    return PixtralProcessor(image, tokenizer(), patch_size=4, image_token="<image>", **settings)


def _glm(cls: Any) -> Counted:
    return Counted(
        lambda **settings: cls(patch_size=4, **settings),
        lambda processor, image: int(processor(image)["image_grid_thw"].prod()) // 4,
        ({"size": {"shortest_edge": 16 * 128, "longest_edge": 128 * 128}}, {"temporal_patch_size": 1}),
    )


def _views(processor: Any, image: torch.Tensor) -> int:
    """Count the tokens of the views of DeepSeek-OCR 2's processor, at 8 pixels per token, and one separator."""
    outputs = processor(image)
    views = [*outputs["pixel_values"], *outputs.get("pixel_values_local", [])]
    return 1 + sum((view.shape[-1] // 8) ** 2 for view in views)


COUNTED: dict[str, Counted] = {
    "Qwen2VLImageProcessor": Counted(
        lambda **settings: Qwen2VLImageProcessor(patch_size=4, **settings),
        lambda processor, image: int(processor(image)["image_grid_thw"].prod()) // processor.merge_size**2,
        ({"size": {"shortest_edge": 16 * 64, "longest_edge": 128 * 64}}, {"merge_size": 1}),
    ),
    "Glm4vImageProcessor": _glm(Glm4vImageProcessor),
    "Glm46VImageProcessor": _glm(Glm46VImageProcessor),
    "GlmgaImageProcessor": _glm(GlmgaImageProcessor),
    "Gemma4ImageProcessor": Counted(
        lambda **settings: Gemma4ImageProcessor(patch_size=2, pooling_kernel_size=2, **settings),
        lambda processor, image: int(processor(image)["num_soft_tokens_per_image"][0]),
        ({"max_soft_tokens": 70}, {"max_soft_tokens": 280}),
    ),
    "DeepseekOcr2ImageProcessor": Counted(
        lambda **settings: Partial(
            DeepseekOcr2ImageProcessor(size={"height": 160, "width": 160}, tile_size=24, **settings)
        ),
        _views,
        ({}, {"max_patches": 4}),
        different=5,
    ),
    "Siglip2ImageProcessor": Counted(
        lambda **settings: Siglip2ImageProcessor(patch_size=4, **settings),
        lambda processor, image: int(processor(image, return_tensors="pt")["spatial_shapes"].prod()),
        ({"max_num_patches": 64}, {"max_num_patches": 41}),
        different=4,
    ),
    "Lfm2VlImageProcessor": Counted(
        _lfm2,
        written,
        (
            {},
            {"do_image_splitting": False},
            {"use_thumbnail": False, "max_tiles": 4},
            {"tile_size": 48, "min_tiles": 1},
        ),
    ),
    "PixtralImageProcessor": Counted(
        _pixtral, written, ({"spatial_merge_size": 2}, {"size": {"longest_edge": 160}}), different=20
    ),
    "LlavaNextImageProcessor": Counted(_next, written),
    "LlavaOnevisionImageProcessor": Counted(
        _onevision, written, ({}, {"vision_aspect_ratio": "anyres_max_4"}), different=20
    ),
    "GotOcr2ImageProcessor": Counted(
        lambda **settings: Partial(GotOcr2ImageProcessor(size={"height": 32, "width": 32}, **settings)),
        lambda processor, image: 4 * int(processor(image)["num_patches"][0]),
        ({"crop_to_patches": True}, {"crop_to_patches": True, "max_patches": 6}, {}),
        different=6,
    ),
    "Idefics3ImageProcessor": Counted(
        lambda **settings: Partial(Idefics3ImageProcessor(**{"max_image_size": {"longest_edge": 16}, **settings})),
        lambda processor, image: 4 * len(processor([[image]])["pixel_values"][0]),
        (
            {"size": {"longest_edge": 64}},
            {"size": {"longest_edge": 50}},
            {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 15}},
            {"do_image_splitting": False},
        ),
        different=5,
    ),
    "SmolVLMImageProcessor": Counted(
        lambda **settings: Partial(SmolVLMImageProcessor(max_image_size={"longest_edge": 16}, **settings)),
        lambda processor, image: 4 * len(processor([[image]])["pixel_values"][0]),
        ({"size": {"longest_edge": 64}}, {"size": {"longest_edge": 50}}),
        different=4,
    ),
}
