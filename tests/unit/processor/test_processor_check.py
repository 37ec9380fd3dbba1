# SPDX-License-Identifier: Apache-2.0
"""The processor of another model is refused. Each processor that may belong to the model is accepted."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

import tokenprune
from basics import snapshot
from each import each
from families import FAMILIES as ALL
from processors import COUNTED, LIMITS, build_for, photo, special_tokenizer, state
from tokenprune import OptionError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.processor_check import check_processor
from tokenprune_bench.two_pass import escalate
from zoo import FAMILIES

MATCHING = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "Glm4vImageProcessor": "glm4v",
    "Glm46VImageProcessor": "glm46v",
    "GlmgaImageProcessor": "glmga",
    "Gemma4ImageProcessor": "gemma4",
    "DeepseekOcr2ImageProcessor": "deepseek_ocr2",
    "Siglip2ImageProcessor": "lfm2_vl",
    "Lfm2VlImageProcessor": "lfm2_vl",
    "PixtralImageProcessor": "mistral3",
    "LlavaNextImageProcessor": "llava_next",
    "LlavaOnevisionImageProcessor": "llava_onevision",
    "GotOcr2ImageProcessor": "internvl",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
}
SHIPPED = ("demo_vlm", "demo_qwen", "demo_video")


@cache
def load_shipped(name: str) -> tuple[Any, Any]:
    return tokenprune.demo_model(name, device="cpu")


def load_vlm() -> tuple[Any, Any, Any]:
    """Return the shipped LLaVA, its processor, and the processor of the shipped Qwen2.5-VL."""
    (model, processor), (_, other) = load_shipped("demo_vlm"), load_shipped("demo_qwen")
    return model, processor, other


def check(processor: Any, model: Any) -> None:
    check_processor(processor, get_adapter(model))


@each("name", SHIPPED)
def test_shipped_models_accept_their_processors(name: str) -> None:
    model, processor = load_shipped(name)
    for part in (processor, processor.tokenizer, processor.image_processor, None):
        check(part, model)
    for options in ({"method": "downsample"}, {"method": "divprune", "guard": "auto"}):
        with tokenprune.patched(model, processor=processor, **options):
            pass


@each("name", COUNTED)
def test_families_accept_their_processors(name: str) -> None:
    assert MATCHING.keys() == COUNTED.keys()
    family = ALL[MATCHING[name]]
    for variant in COUNTED[name].variants:
        processor = COUNTED[name].make(**variant)
        model = build_for(family, processor) if hasattr(processor, "image_token_id") else family.build()
        check(processor, model)


def test_vocabularies_of_other_sizes_are_accepted() -> None:
    model, processor, _ = load_vlm()
    check(processor, build_for(FAMILIES["llava"], processor))  # 160 embeddings for 97 tokens
    processor = copy.deepcopy(processor)
    processor.tokenizer.add_tokens([f"<new{index}>" for index in range(200)])
    assert len(processor.tokenizer) > model.config.text_config.vocab_size
    check(processor, model)


def build_gemma() -> Any:
    tokenizer = special_tokenizer(boi_token="<b>", eoi_token="<e>", image_token="<soft>")
    return Gemma3Processor(Gemma3ImageProcessor(), tokenizer)


def build_llama() -> Any:
    tokenizer = special_tokenizer(image_token="<|image|>", patch_token="<|patch|>")
    return Llama4Processor(Llama4ImageProcessor(), tokenizer, chat_template="")


def build_aya() -> Any:
    tokenizer = special_tokenizer(image_token="<image>", patch_token="<|IMG_PATCH|>")
    return AyaVisionProcessor(GotOcr2ImageProcessor(), tokenizer, chat_template="")


def build_internvl() -> Any:
    names = dict(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>")
    tokenizer = special_tokenizer(**names, video_token="<video>")
    return InternVLProcessor(GotOcr2ImageProcessor(), tokenizer, InternVLVideoProcessor(), chat_template="")


@each(
    "name, make, placeholder",
    [
        ("gemma3", build_gemma, "<soft>"),
        ("llama4", build_llama, "<|patch|>"),
        ("aya_vision", build_aya, "<|IMG_PATCH|>"),
        ("internvl", build_internvl, "<IMG_CONTEXT>"),
    ],
)
def test_placeholders_with_other_names_are_found(name: str, make: Any, placeholder: str) -> None:
    """In these families features replace another token than `image_token`."""
    processor, family = make(), ALL[name]
    token_id = processor.tokenizer.convert_tokens_to_ids(placeholder)
    key = "image_token_index" if "image_token_index" in family.config else "image_token_id"
    check(processor, replace(family, config={**family.config, key: token_id}).build())
    with pytest.raises(OptionError, match=f"expects id {token_id + 10}"):
        check(processor, replace(family, config={**family.config, key: token_id + 10}).build())


class Wrapper:
    """A custom processor that replaces `<image>` by the placeholder of the model."""

    image_token = "<image>"

    def __init__(self, processor: Any) -> None:
        self.tokenizer, self.image_processor = processor.tokenizer, processor.image_processor


@each("processor", [object(), SimpleNamespace(image_processor=None), SimpleNamespace(tokenizer=None), "a folder"])
def test_objects_without_information_are_accepted(processor: Any) -> None:
    check(processor, load_vlm()[0])


def test_custom_processors_are_accepted() -> None:
    model, processor, other = load_vlm()
    check(Wrapper(processor), model)

    class Custom(type(processor)):
        pass

    custom = copy.copy(processor)
    custom.__class__ = Custom
    check(custom, model)
    # Its `image_token` has id 4, but the id that it writes for a model with placeholder id 6 is unknown.
    check(Wrapper(processor), build_for(FAMILIES["llava"], other))


def list_arguments(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the arguments of `patch` that accept a processor."""
    file = tmp_path / "tokenprune.json"
    file.write_text(json.dumps({"method": "divprune", "keep": 0.5, "guard": "auto"}))
    return [
        dict(method="downsample", keep=0.5),
        dict(method="dynres", keep=0.5),
        dict(method="view_select"),
        dict(method="divprune", guard="auto"),
        dict(method="divprune", guard="warn"),
        dict(method="divprune", guard="off"),
        dict(method=["downsample", "divprune"]),
        dict(max_visual_tokens=64),
        dict(config={"method": "downsample", "keep": 0.5}),
        dict(config=file),
    ]


def test_the_processor_of_another_model_is_refused(tmp_path: Path) -> None:
    (vlm_model, vlm_processor), (qwen, qwen_processor) = load_shipped("demo_vlm"), load_shipped("demo_qwen")
    for model, processor, ids in ((vlm_model, qwen_processor, "6.*4"), (qwen, vlm_processor, "4.*6")):
        processor_before, model_before = state(processor), snapshot(model)
        for arguments in list_arguments(tmp_path):
            for part in (processor, processor.tokenizer):
                with pytest.raises(OptionError, match=f"not the processor of the model: .* id {ids}"):
                    tokenprune.patch(model, processor=part, **arguments)
            with pytest.raises(OptionError, match=r"image_grid_thw.*AutoProcessor.from_pretrained\("):
                tokenprune.patch(model, processor=processor.image_processor, **arguments)
        assert state(processor) == processor_before and snapshot(model) == model_before


def test_sessions_and_two_passes_check_the_processor() -> None:
    model, processor, other = load_vlm()
    with pytest.raises(OptionError, match="not the processor of the model"):
        escalate(model, other, images=[photo(64, 64)], text="<image>what?")
    with pytest.raises(OptionError, match="not the processor of the model"):
        tokenprune.integrations.hf.sessions.session(model, other, memory=512)
    tokenprune.integrations.hf.sessions.session(model, processor, memory=512)


def test_a_larger_vocabulary_is_refused() -> None:
    _, _, other = load_vlm()
    small = build_for(FAMILIES["qwen2_5_vl"], other)
    with pytest.raises(OptionError, match="tokenizer has 640 tokens, and 'qwen2_5_vl' has embeddings for 160"):
        check(other, small)


def test_packed_patches_require_models_that_accept_them() -> None:
    packed, square = Qwen2VLImageProcessor(**LIMITS), SiglipImageProcessor()
    for name, family in FAMILIES.items():
        is_packed = name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
        model = family.build()
        check(packed if is_packed else square, model)
        with pytest.raises(OptionError, match="returns no image_grid_thw" if is_packed else "returns image_grid_thw"):
            check(square if is_packed else packed, model)
