# SPDX-License-Identifier: Apache-2.0
"""Families whose decoder takes more inputs than the common contract, or that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedModel

from families import special_inputs as shown
from families.mrope import THINKER, omni_video
from zoo import (
    BREAK,
    END,
    HEAD_DIM,
    HIDDEN,
    IMAGE,
    MROPE,
    START,
    TEXT,
    TILE,
    VIDEO,
    VISION,
    Family,
    Inputs,
    anyres_collate,
    qwen_config,
    qwen_image,
    qwen_video,
    tower,
)

GRIDS = ((8, 12), (6, 10), (8, 8))

# Qwen3.5: every other layer is recurrent. The layer before a cut at layer 2 uses attention.
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"] * 2, linear_conv_kernel_dim=3, linear_key_head_dim=32,
    linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
QWEN3_VISION = dict(hidden_size=VISION, intermediate_size=64, out_hidden_size=HIDDEN, num_position_embeddings=64)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def calm_states(model: PreTrainedModel) -> None:
    """Scale the norm after linear attention down: it amplifies rounding where the output is close to zero, by an amount
    that depends on the processor."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            parameter.data.mul_(0.05)


def calm_scores(model: PreTrainedModel) -> None:
    """Scale the query norm down: Gemma 4 does not scale attention scores, so with unit norms rounding grows from layer
    to layer."""
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.q_norm.weight"):
            parameter.data.mul_(0.4)


def qwen35(name: str, **text: Any) -> Family:
    config = qwen_config([4, 2, 2], QWEN3_VISION, head_dim=HEAD_DIM, **LINEAR, **text)
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 1.0
    return Family(
        name, config, qwen_image, GRIDS, video=shown.stamped_video, types="mm_token_type_ids", settle=calm_states
    )


# Gemma 4: the patches of each image have a separate axis and 2-D position ids; 2 x 2 patches are averaged to a token.
# Videos are left out: the forward of transformers 5.19 loses the frame counts and raises.


GEMMA_TEXT = {**TEXT, "head_dim": HEAD_DIM, "sliding_window": 16}
BOTH_KINDS = ["sliding_attention", "full_attention"]


def gemma4(
    name: str,
    model_type: str = "gemma4",
    vision: dict[str, Any] | None = None,
    image: Any = shown.gemma4_image,
    sizes: tuple[Any, ...] = ((8, 12), (8, 6), (4, 12)),
    **text: Any,
) -> Family:
    vision = vision or dict(
        hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, patch_size=4, pooling_kernel_size=2, position_embedding_size=32,
    )  # fmt: skip
    text = {**GEMMA_TEXT, "layer_types": BOTH_KINDS * 2, "global_head_dim": HEAD_DIM, **text}
    config = dict(
        text_config=text, vision_config=vision, audio_config=None, video_token_id=VIDEO, audio_token_id=11,
        boi_token_id=START, eoi_token_id=END,
    )  # fmt: skip
    return Family(
        name,
        config,
        image,
        sizes,
        collate=shown.gemma4_collate,
        types="mm_token_type_ids",
        model_type=model_type,
        settle=calm_scores,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ErnieFamily(Family):
    """A family whose inputs also mark the tokens routed to the image experts: placeholders and their start and end
    ids."""

    def make_inputs(self, *args: Any, **kwargs: Any) -> Inputs:
        inputs = super().make_inputs(*args, **kwargs)
        ids = inputs["input_ids"]
        inputs["moe_mm_token_type_ids"] = sum((ids == token).long() for token in (IMAGE, VIDEO, START, END))
        return inputs


def _families() -> list[Family]:
    chunked = dict(
        text_config={
            **TEXT, "model_type": "llama4_text", "head_dim": HEAD_DIM, "intermediate_size_mlp": 96,
            "num_local_experts": 4, "attention_chunk_size": 16, "no_rope_layer_interval": 2, "moe_layers": [1, 3],
            "floor_scale": 8, "attn_scale": 0.5,
        },
        vision_config=dict(
            hidden_size=VISION, intermediate_size=4 * VISION, num_hidden_layers=2, num_attention_heads=2,
            image_size=32, patch_size=4, vision_output_dim=VISION, projector_input_dim=VISION,
            projector_output_dim=VISION, pixel_shuffle_ratio=0.5,
        ),
        boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    lfm2 = dict(
        text_config={
            **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
        },
        vision_config=dict(
            model_type="siglip2_vision_model", hidden_size=VISION, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, patch_size=4, num_patches=64, vision_use_head=False,
        ),
        projector_hidden_size=64,
    )  # fmt: skip
    ernie = qwen_config([2, 2, 4], dict(hidden_size=VISION, intermediate_size=64, in_channels=3))
    ernie["text_config"] |= dict(
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[2, 2, 4]),
        moe_intermediate_size=[32, 32], moe_num_experts=4, moe_k=2, mlp_layer_types=["dense"] + ["sparse"] * 3,
    )  # fmt: skip
    for name in ("vision_start_token_id", "vision_end_token_id"):
        del ernie[name]
    gemma3n = dict(
        text_config={
            **GEMMA_TEXT, "num_hidden_layers": 8, "layer_types": BOTH_KINDS * 4, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": TEXT["vocab_size"], "laurel_rank": 8,
            "altup_num_inputs": 3,
        },
        vision_config=dict(
            architecture="test_convnext", hidden_size=64, vocab_size=8, vocab_offset=1_000,
            model_args={"in_chans": 3},
        ),
        audio_config=dict(
            hidden_size=32, vocab_size=8, vocab_offset=2_000, conf_num_hidden_layers=1, conf_num_attention_heads=2,
            input_feat_size=16, sscp_conv_channel_size=[4, 4],
        ),
        vision_soft_tokens_per_image=16, boi_token_id=START, eoi_token_id=END, audio_token_id=11,
    )  # fmt: skip
    granite = dict(
        text_config={**TEXT, "attention_multiplier": 0.25, "embedding_multiplier": 1.5},
        # Newer versions give the resampler a head for each 64 channels of the tower.
        vision_config={**tower("siglip_vision_model", 32, vision_use_head=False), "hidden_size": 64},
        qformer_config=dict(
            num_hidden_layers=1, intermediate_size=64, hidden_size=64, num_attention_heads=2,
            encoder_hidden_size=64, cross_attention_frequency=1, use_qformer_text_input=False,
        ),
        image_grid_pinpoints=[[32, 64], [64, 32]], downsample_rate="1/2", deepstack_layer_map=[[1, 0], [2, 1]],
        spatial_target_layers=[2, 3], vision_feature_select_strategy="full",
    )  # fmt: skip
    kimi = dict(
        text_config={
            **TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
        },
        vision_config=dict(
            hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
            pos_emb_height=16, pos_emb_width=16,
        ),
        projection_hidden_size=VISION, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    vision = dict(hidden_size=VISION, intermediate_size=64, out_hidden_size=HIDDEN)
    window = dict(window_size=16, fullatt_block_indexes=[1, 3])
    deepstack = dict(**vision, num_position_embeddings=64, deepstack_visual_indexes=[0, 2])
    audio = dict(
        encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, d_model=16, num_mel_bins=8, output_dim=HIDDEN,
        downsample_hidden_size=8,
    )  # fmt: skip
    omni = qwen_config([4, 2, 2], deepstack, head_dim=HEAD_DIM, **EXPERTS)
    omni = {key: omni[key] for key in ("text_config", "vision_config", "video_token_id")}
    omni |= dict(audio_config=audio, audio_token_id=11, vision_start_token_id=START, vision_end_token_id=END)
    plain = dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0))
    exaone = dict(
        text_config={**TEXT, **plain, "model_type": "exaone4", "sliding_window": 16, "layer_types": BOTH_KINDS * 2},
        vision_config=dict(depth=4, num_heads=2, num_key_value_heads=2, patch_size=4, **vision, **window),
        video_token_id=VIDEO,
    )  # fmt: skip
    clova = dict(
        text_config={**TEXT, "model_type": "hyperclovax", "attention_multiplier": 0.25},
        vision_config=dict(depth=4, num_heads=2, patch_size=4, **vision, **window),
        video_token_id=VIDEO,
    )
    qwen35_text = qwen35("qwen3_5").config["text_config"]
    strip = dict(
        hidden_size=VISION, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=32,
        patch_size=4, insert_layer_id=1,
    )  # fmt: skip
    minicpm = dict(
        text_config={**qwen35_text, "model_type": "qwen3_5_text"}, vision_config=strip, video_token_id=VIDEO,
        insert_layer_id=1,
    )  # fmt: skip
    marks = dict(image_start_id=START, image_end_id=END, slice_start_id=TILE, slice_end_id=11, newline_id=BREAK)
    nemotron = dict(
        text_config={
            **TEXT, "head_dim": HEAD_DIM, "num_hidden_layers": 6,
            "layers_block_type": [kind for last in ("moe", "mlp") for kind in (*LINEAR["layer_types"][:2], last)],
            "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "expand": 1,
            "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 32,
        },
        vision_config=dict(
            hidden_size=VISION, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2.0, patch_size=4, image_size=32,
            max_img_size=64, video_temporal_patch_size=2, num_cls_tokens=2, num_registers=1,
        ),
        projector_hidden_size=64, vision_hidden_size=VISION, video_token_id=VIDEO,
    )  # fmt: skip
    cosmos = qwen_config([4, 2, 2], {**deepstack, "model_type": "qwen3_vl_vision"}, head_dim=HEAD_DIM)
    edge = dict(
        text_config={**TEXT, "head_dim": HEAD_DIM, "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}},
        vision_config=dict(
            hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=4,
            num_patches=64,
        ),
        projector_hidden_size=64, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    compass = qwen_config([4, 2, 2], deepstack, sliding_window=16, layer_types=BOTH_KINDS * 2)
    compass["text_config"]["rope_parameters"] = {
        kind: {**MROPE, "mrope_section": [4, 2, 2]} if kind == "sliding_attention" else None for kind in BOTH_KINDS
    }
    muse = dict(
        text_config={**TEXT, "head_dim": HEAD_DIM, "sliding_window": 16, "layer_types": BOTH_KINDS * 2,
                     "layer_rope_theta": [10_000.0, 0, 10_000.0, 0], "output_multiplier": 1.0},
        vision_config=dict(
            hidden_size=VISION, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, patch_size=4,
            pos_emb_height=4, pos_emb_width=4,
        ),
        out_hidden_size=4 * VISION, projector_hidden_size=64, video_token_id=VIDEO,
    )  # fmt: skip
    spark = {
        **muse,
        "text_config": {**muse["text_config"], "num_local_experts": 4, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 32, "moe_hidden_size": 32,
                        "qk_scale_factor": 2.0},  # sharper attention makes rounding grow
        "audio_config": dict(hidden_sizes=[8] * 4, depths=[1] * 4, out_hidden_size=HIDDEN),
    }  # fmt: skip
    lfm3 = dict(
        text_config={**TEXT, "model_type": "lfm3", "head_dim": HEAD_DIM, "sliding_window": 512, "conv_L_cache": 3,
                     "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
        vision_config=dict(hidden_size=VISION, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                           num_key_value_heads=1, patch_size=4),
        projector_hidden_size=64, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    step = dict(
        text_config={**TEXT, "head_dim": HEAD_DIM, "sliding_window": 16, "layer_types": BOTH_KINDS * 2,
                     "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 32, "share_expert_dim": 32,
                     "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
        vision_config=dict(
            hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=64,
            patch_size=4, mlp_ratio=2.0,
        ),
    )  # fmt: skip
    narrow = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, hidden_size=VISION, intermediate_size=64)
    molmo = dict(
        text_config={**TEXT, "head_dim": HEAD_DIM, "additional_vocab_size": 0},
        vision_config={**narrow, "num_hidden_layers": 3, "image_size": [16, 16], "patch_size": 4},
        adapter_config={**narrow, "vision_feature_layer": [-1, -2], "text_hidden_size": HIDDEN},
        image_patch_id=IMAGE,
    )
    emu = dict(
        text_config=TEXT,
        vq_config=dict(
            codebook_size=64, embed_dim=4, latent_channels=4, base_channels=32, channel_multiplier=[1, 1, 1],
            num_res_blocks=1, hidden_size=32, attn_resolutions=[],
        ),
        vocabulary_map={"<image>": IMAGE, "<|extra_200|>": BREAK}
        | {f"<|visual token {code:06d}|>": 64 + code for code in range(64)},
    )  # fmt: skip
    apertus = dict(
        text_config={**TEXT, "hidden_act": "xielu"},
        vision_config=dict(
            codebook_size=32, embed_dim=4, latent_channels=4, base_channels=32, channel_multiplier=[1, 1, 1],
            num_res_blocks=1, attn_resolutions=[],
        ),
        audio_config=dict(
            model_type="wavtokenizer_encoder", num_filters=4, upsampling_ratios=[2, 2], num_lstm_layers=1,
            hidden_size=8, codebook_size=32, codebook_dim=8,
        ),
        audio_token_id=TILE, image_token_offset=64, audio_token_offset=96,
    )  # fmt: skip
    chameleon = dict(
        **TEXT,
        vq_config=dict(
            num_embeddings=64, embed_dim=4, latent_channels=4, base_channels=32, channel_multiplier=[1, 1, 1],
            num_res_blocks=1, resolution=16,
        ),
        # Code indices are written in letters: A is 0.
        vocabulary_map={"<image>": IMAGE}
        | {f"IMGIMG{chr(65 + code // 10)}{chr(65 + code % 10)}Z": 64 + code for code in range(64)},
    )  # fmt: skip
    return [
        qwen35("qwen3_5"),
        qwen35("qwen3_5_moe", **EXPERTS, shared_expert_intermediate_size=32),
        gemma4("gemma4", hidden_size_per_layer_input=8, vocab_size_per_layer_input=TEXT["vocab_size"],
               num_kv_shared_layers=2, num_hidden_layers=8, layer_types=BOTH_KINDS * 4),
        gemma4("gemma4_bidirectional", hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
        # Full-attention layers have another head width and head count, and use keys as values.
        gemma4("gemma4_per_layer", hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
               global_head_dim=2 * HEAD_DIM, num_global_key_value_heads=1, attention_k_eq_v=True),
        gemma4("gemma4_moe", hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
               moe_intermediate_size=32),
        Family("llama4", chunked, shown.llama4_image, (1, 2, 0), decoder="language_model.model"),
        Family("lfm2_vl", lfm2, shown.lfm2_image, GRIDS, collate=shown.lfm2_collate),
        Family("gemma3n", gemma3n, shown.gemma3n_image, (128,)),
        gemma4("gemma4_unified", "gemma4_unified",
               dict(patch_size=4, pooling_kernel_size=2, mm_embed_dim=VISION, mm_posemb_size=32,
                    output_proj_dims=VISION),
               image=shown.unified_image, sizes=((4, 6), (4, 3), (2, 6))),
        Family("granite4_vision", granite, shown.granite_image, ((16, 32), (32, 8), (8, 32)), collate=anyres_collate),
        Family("kimi_k25", kimi, shown.kimi_image, GRIDS),
        Family("qwen3_omni_moe_thinker", omni, qwen_image, GRIDS, decoder=THINKER, video=omni_video),
        Family("exaone4_5", exaone, qwen_image, GRIDS, video=qwen_video),
        Family("hyperclovax_vision_v2", clova, qwen_image, GRIDS, video=qwen_video),
        Family("minicpmv4_6", minicpm, shown.minicpm_image, ((16, 16),), collate=shown.minicpm_collate,
               settle=calm_states),
        Family("minicpmv4_7", {**minicpm, **marks}, shown.minicpm_image, ((16, 16),), collate=shown.minicpm_collate,
               settle=calm_states, types="mm_token_type_ids"),
        Family("nemotron_h_omni", nemotron, shown.nemotron_image, GRIDS, decoder="language_model.model"),
        Family("cosmos3_omni", cosmos, qwen_image, GRIDS, video=shown.stamped_video, types="mm_token_type_ids"),
        Family("cosmos3_edge", edge, shown.ernie_image, GRIDS, video=shown.edge_video, types="mm_token_type_ids"),
        Family("cohere_compass", compass, qwen_image, GRIDS, types="mm_token_type_ids"),
        Family("muse_glimmer", muse, qwen_image, GRIDS, video=qwen_video),
        Family("minicpm_ocr", minicpm, shown.minicpm_ocr_image, ((8, 8),), collate=shown.minicpm_collate,
               settle=calm_states),
        Family("muse_spark", spark, qwen_image, GRIDS, video=qwen_video),
        Family("lfm3_vl", lfm3, qwen_image, GRIDS, video=qwen_video),
        Family("molmo2", molmo, shown.molmo_image, (2, 1), video=shown.molmo_video, collate=shown.molmo_collate,
               types="mm_token_type_ids", mixes=False),
        Family("step3p7", step, shown.step_image, (2, 0, 3)),
        Family("emu3", emu, shown.emu_image, ((16, 24), (24, 16), (16, 16)), decoder="model.text_model"),
        Family("apertus1p5", apertus, shown.apertus_image, ((16, 24), (24, 16), (16, 16)),
               eager=("vision_config", "audio_config")),
        Family("chameleon", chameleon, shown.chameleon_image, (16,), decoder="model"),
        Family("chameleon_swin", {**chameleon, "swin_norm": True}, shown.chameleon_image, (16,), decoder="model",
               model_type="chameleon"),
        ErnieFamily("ernie4_5_vl_moe", ernie, shown.ernie_image, GRIDS, video=shown.ernie_video,
                    types="mm_token_type_ids"),
    ]  # fmt: skip


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
# Families with recurrent layers, which ignore attention masks: they need another oracle.
STATEFUL = set("qwen3_5 qwen3_5_moe lfm2_vl lfm3_vl minicpmv4_6 minicpmv4_7 minicpm_ocr nemotron_h_omni".split())
