# SPDX-License-Identifier: Apache-2.0
"""Families whose visual tokens are Q-Former queries. The model with the language head merges them into the prompt."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from families.plain import LLAMA
from zoo import HIDDEN, IMAGE, PAD, TEXT, VIDEO, VISION, Family, InputImage, noise

QUERIES = 16
OPT = dict(model_type="opt", ffn_dim=96, do_layer_norm_before=True, dropout=0.0, tie_word_embeddings=False)
OPT |= {name: size for name, size in TEXT.items() if name not in ("intermediate_size", "num_key_value_heads")}
# As in the smallest OPT: each norm follows its sublayer, and the final norm is missing.
OPT_WITHOUT_NORM = {**OPT, "do_layer_norm_before": False}


def blip_image(size: int, g: torch.Generator, _: int) -> InputImage:
    return InputImage([IMAGE] * QUERIES, {"pixel_values": noise(1, 3, size, size, g=g)})


def instruct_image(size: int, g: torch.Generator, _: int) -> InputImage:
    """Build an image and the instruction that the Q-Former also reads; its last word is padding."""
    pixels = {
        "pixel_values": noise(1, 3, size, size, g=g),
        "qformer_input_ids": torch.randint(1, 32, (1, 5), generator=g),
        "qformer_attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
    }
    return InputImage([IMAGE] * QUERIES, pixels)


def instruct_video(size: int, g: torch.Generator, _: int) -> InputImage:
    pixels = instruct_image(size, g, 1).pixels
    return InputImage([VIDEO] * (3 * QUERIES), pixels | {"pixel_values": noise(1, 3, 3, size, size, g=g)})


def generate_as_asked(model: PreTrainedModel) -> None:
    """Set the generation config of the language model, which overrides the outer one; see `Family.build`."""
    config = model.language_model.generation_config
    config.eos_token_id, config.pad_token_id, config.do_sample = None, PAD, False


def _families() -> list[Family]:
    vision = dict(
        hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
        patch_size=4,
    )  # fmt: skip
    queries = dict(
        vocab_size=32, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        encoder_hidden_size=VISION, cross_attention_frequency=1, max_position_embeddings=32,
    )  # fmt: skip
    parts = dict(vision_config=vision, qformer_config=queries, num_query_tokens=QUERIES)

    def family(name: str, text: dict, image, **extra) -> Family:
        config, decoder = {**parts, "text_config": text}, "language_model.model"
        decoder += ".decoder" if text["model_type"] == "opt" else ""
        return Family(name, config | extra.pop("config", {}), image, (16,), decoder=decoder,
                      settle=generate_as_asked, eager=("qformer_config",), **extra)  # fmt: skip

    return [
        family("blip-2", OPT, blip_image),
        family("blip-2_without_norm", OPT_WITHOUT_NORM, blip_image, model_type="blip-2"),
        family("instructblip", LLAMA, instruct_image),
        family("instructblip_opt", OPT, instruct_image, model_type="instructblip"),
        family("instructblipvideo", LLAMA, instruct_video, config=dict(video_token_index=VIDEO)),
    ]


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
