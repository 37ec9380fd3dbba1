# SPDX-License-Identifier: Apache-2.0
"""Model types that must be refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    EvollaConfig,
    EvollaForProteinText2Text,
    GPT2Config,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

# These types are missing from all auto-class mappings for image-text-to-text.
_BY_CLASS = {"colmodernvbert": "ColModernVBertForRetrieval", "phi4_multimodal": "Phi4MultimodalForCausalLM"}


@dataclasses.dataclass(frozen=True)
class Refused:
    """A model type refused by its name. The model is built at full size on the meta device, without memory."""

    kind: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        with torch.device("meta"):
            if self.kind == "evolla":  # in the mapping by name, but not in the auto class
                return EvollaForProteinText2Text(EvollaConfig())
            if self.kind == "vision-encoder-decoder":
                parts = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(), GPT2Config())
                return VisionEncoderDecoderModel(parts)
            if self.kind in _BY_CLASS:
                return getattr(transformers, _BY_CLASS[self.kind])(CONFIG_MAPPING[self.kind]())
            return AutoModelForImageTextToText.from_config(CONFIG_MAPPING[self.kind](**copy.deepcopy(self.config)))


_ALL_REFUSED = [
    Refused("blip"), *map(Refused, _BY_CLASS), Refused("dots3_note"), Refused("granite_docling"), Refused("inkling2"),
    Refused("inkling2_loop"),
    Refused("mistral_large4"),
    Refused("unlimited_ocr"),
    Refused("diffusion_gemma", dict(text_config=dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
                                     vision_config=dict(model_type="gemma4_vision"))),
    Refused("evolla"), Refused("florence2"), Refused("git"), Refused("glm5_next"), Refused("hy_v4_vl"),
    Refused("idefics"),
    Refused("inkling_mm_model"), Refused("kosmos-2"),
    Refused("kosmos-2.5"), Refused("minimax_m3_vl"), Refused("mistral4"), Refused("mllama"), Refused("pi0"),
    Refused("pix2struct"), Refused("pp_formulanet"),
    Refused("qwen4_exp", dict(text_config=dict(indexer_budget=8, indexer_compress_ratio=2, indexer_n_heads=2,
                                               indexer_kv_heads=1, indexer_head_dim=256))), Refused("t5gemma2"),
    Refused("udop"), Refused("vision-encoder-decoder"),
]  # fmt: skip

REFUSED: dict[str, Refused] = {refused.kind: refused for refused in _ALL_REFUSED}
