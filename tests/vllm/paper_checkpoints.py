# SPDX-License-Identifier: Apache-2.0
"""Families without weights: a config, a tokenizer and a processor, which are sufficient for the front end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

from checkpoints import HIDDEN, IDS, QWEN_IMAGE, VOCABULARY, text, tokenizer, vision
from more_checkpoints import GLM_IMAGE, MOE, WIDER, glm4v, glm4v_config, qwen3, qwen35_config, wider

# Stand-in for the code in InternVL's checkpoints.
INTERNVL_CODE = """
from transformers import PretrainedConfig, Qwen2Config


class Vision(PretrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"
    has_no_defaults_at_init = True

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        super().__init__(**kwargs)
        self.vision_config = Vision(**(vision_config or {}))
        self.llm_config = Qwen2Config(**(llm_config or {}))
"""


@dataclass(frozen=True)
class Paper:
    """Checkpoint without weights.

    Attributes:
        name: Architecture.
        image: Text of an image in a prompt.
        sizes: Sizes of the test images, (height, width).
        remote: Code of the config, if the checkpoint contains it. vLLM then uses its own processor.
    """

    name: str
    kind: str
    config: Callable[[], dict[str, Any]] = field(repr=False)
    processor: Callable[[], Any] = field(repr=False)
    image: str
    sizes: tuple[tuple[int, int], ...] = ((140, 196), (56, 84))
    remote: str | None = None

    def write(self, folder: Path) -> Path:
        self.processor().save_pretrained(folder)
        if self.remote is None:
            CONFIG_MAPPING[self.kind](**self.config(), architectures=[self.name]).save_pretrained(folder)
            return folder
        (folder / "configuration_own.py").write_text(self.remote)
        config = {"model_type": self.kind, "architectures": [self.name], **self.config()}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def with_experts(config: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    config["text_config"] |= {"model_type": kind, **MOE, **more}
    return config


def lfm2() -> Any:
    image = Lfm2VlImageProcessor(
        encoder_patch_size=14, tile_size=56, min_image_tokens=4, max_image_tokens=9, max_tiles=4, max_num_patches=64
    )
    tokens = wider(
        image_token="<image>", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
        image_thumbnail="<|img_thumbnail|>",
    )  # fmt: skip
    return Lfm2VlProcessor(image, tokens, chat_template="{{ messages }}")


def llama4() -> Any:
    tokens = tokenizer(LLAMA4, image_token="<|image|>")
    image = Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    return Llama4Processor(image, tokens, patch_size=14)


def gemma_tokens() -> Any:
    tokens = tokenizer(
        GEMMA, image_token="<|image|>", boi_token="<start_of_image>", eoi_token="<end_of_image>",
        audio_token="<|audio|>", boa_token="<|boa|>", eoa_token="<|eoa|>",
    )  # fmt: skip
    tokens.add_tokens(["\\n", "\\n\\n", "\\n\\n\\n", "\\n\\n\\n\\n"])
    return tokens


def gemma3n() -> Any:
    image = SiglipImageProcessor(size={"height": 56, "width": 56})
    return Gemma3nProcessor(Gemma3nAudioFeatureExtractor(), image, gemma_tokens(), image_seq_length=16)


def gemma4() -> Any:
    image = Gemma4ImageProcessor(patch_size=14, pooling_kernel_size=2, max_soft_tokens=70)
    clips = Gemma4VideoProcessor(patch_size=14, pooling_kernel_size=2, max_soft_tokens=70)
    return Gemma4Processor(Gemma4AudioFeatureExtractor(), image, gemma_tokens(), clips)


LLAMA4 = "<|image|> <|patch|> <|tile_x_separator|> <|tile_y_separator|> <|image_start|> <|image_end|>".split()
GEMMA = "<|image|> <|video|> <|audio|> <|boa|> <|eoa|>".split()


def get_token_id(names: list[str], name: str) -> int:
    return VOCABULARY + names.index(name)


GEMMA_IDS = dict(
    boi_token_id=IDS["<start_of_image>"], eoi_token_id=IDS["<end_of_image>"],
    image_token_id=get_token_id(GEMMA, "<|image|>"), audio_token_id=get_token_id(GEMMA, "<|audio|>"),
    boa_token_id=get_token_id(GEMMA, "<|boa|>"), eoa_token_id=get_token_id(GEMMA, "<|eoa|>"),
)  # fmt: skip
GEMMA_TEXT = dict(sliding_window=512, layer_types=["sliding_attention", "sliding_attention", "full_attention"])

PAPERS: list[Paper] = [
    Paper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
          lambda: with_experts(qwen35_config(), "qwen3_5_moe_text", shared_expert_intermediate_size=96),
          qwen3, QWEN_IMAGE, ((160, 224), (224, 160))),
    Paper("Glm4vMoeForConditionalGeneration", "glm4v_moe",
          lambda: with_experts(glm4v_config(), "glm4v_moe_text", n_routed_experts=4), glm4v, GLM_IMAGE),
    Paper("Lfm2VlForConditionalGeneration", "lfm2_vl",
          # transformers omits conv_dim and block_dim when it writes a config, but vLLM reads them.
          lambda: dict(text_config=text("lfm2", layer_types=["conv", "full_attention", "conv"], conv_dim=HIDDEN,
                                        block_dim=HIDDEN) | {"vocab_size": WIDER},
                       vision_config=vision(model_type="siglip2_vision_model", patch_size=14, num_patches=64),
                       projector_hidden_size=96, image_token_id=IDS["<image>"]),
          lfm2, "<image>", ((100, 160), (84, 84))),
    Paper("Llama4ForConditionalGeneration", "llama4",
          lambda: dict(text_config=text("llama4_text") | {"vocab_size": VOCABULARY + len(LLAMA4)},
                       vision_config=dict(hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2,
                                          num_attention_heads=2, image_size=56, patch_size=14,
                                          pixel_shuffle_ratio=0.5),
                       image_token_index=get_token_id(LLAMA4, "<|patch|>"),
                       boi_token_index=get_token_id(LLAMA4, "<|image_start|>"),
                       eoi_token_index=get_token_id(LLAMA4, "<|image_end|>")),
          llama4, "<|image|>", ((112, 112), (56, 56))),
    Paper("Gemma3nForConditionalGeneration", "gemma3n",
          lambda: dict(text_config=text("gemma3n_text", **GEMMA_TEXT) | {"vocab_size": VOCABULARY + len(GEMMA)},
                       vision_soft_tokens_per_image=16, **GEMMA_IDS),
          gemma3n, "<|image|>"),
    Paper("Gemma4ForConditionalGeneration", "gemma4",
          lambda: dict(text_config=text("gemma4_text", **GEMMA_TEXT) | {"vocab_size": VOCABULARY + len(GEMMA)},
                       vision_config=dict(model_type="gemma4_vision", hidden_size=HIDDEN, num_hidden_layers=2,
                                          patch_size=14, pooling_kernel_size=2, default_output_length=70), **GEMMA_IDS),
          gemma4, "<|image|>"),
    Paper("InternVLChatModel", "internvl_chat",
          lambda: dict(auto_map={"AutoConfig": "configuration_own.InternVLChatConfig"}, force_image_size=56,
                       downsample_ratio=0.5, max_dynamic_patch=3, min_dynamic_patch=1, dynamic_image_size=True,
                       use_thumbnail=True, ps_version="v2", select_layer=-1,
                       vision_config=vision(image_size=56, patch_size=14), llm_config=text("qwen2")),
          lambda: tokenizer(), "<image>", ((56, 112), (70, 70)), remote=INTERNVL_CODE),
    Paper("KimiVLForConditionalGeneration", "kimi_vl",
          lambda: dict(media_placeholder_token_id=IDS["<image>"],
                       vision_config=dict(hidden_size=HIDDEN, num_hidden_layers=2, patch_size=14,
                                          merge_kernel_size=[2, 2])),
          lambda: tokenizer(), "<image>", remote=""),
]  # fmt: skip
