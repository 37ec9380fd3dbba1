# SPDX-License-Identifier: Apache-2.0
"""Write the shipped model demo_qwen as GGUF files for llama.cpp: python tests/llama_cpp/demo_gguf.py FOLDER

    decoder.gguf   architecture qwen2vl, with M-RoPE
    plain.gguf     the same weights as architecture qwen2, with one position per token
    mmproj.gguf    the vision tower

llama.cpp fixes the window of this tower at 112 pixels, and demo_qwen has 64. `load_reference` returns the transformers
model with this window, which computes the same. Its blocks with full attention do not follow the pattern of llama.cpp,
so an identity block is inserted. The tokenizer splits into words, which the unigram tokenizer does with these pieces.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import tokenprune

WINDOW = 112  # pixels
PATTERN = 3  # every third block has full attention
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %} {{ message['content'] }} "
    "{% else %}{% for part in message['content'] %} {{ part['text'] }}{% endfor %} {% endif %}{% endfor %}assistant:"
)
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_BLOCK = {
    "attn.proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "norm1": "ln1", "norm2": "ln2",
}  # fmt: skip


def load_reference() -> tuple[Any, Any]:
    """Return demo_qwen with the window of llama.cpp, and its processor."""
    model, processor = tokenprune.demo_model("demo_qwen")
    model.model.visual.window_size = WINDOW
    return model, processor


def write_decoder(path: Path, model: Any, processor: Any, architecture: str, quantize: bool = False) -> None:
    """Write the decoder and the tokenizer."""
    text, decoder = model.config.text_config, model.model.language_model
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("demo_qwen")
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_parameters["rope_theta"])
    if architecture == "qwen2vl":
        writer.add_rope_dimension_sections([*text.rope_parameters["mrope_section"], 0])
    _add_tokenizer(writer, processor.tokenizer, text.vocab_size)
    for name, tensor in decoder.state_dict().items():
        values = np.ascontiguousarray(tensor.float().numpy())
        target = _decoder_name(name)
        if quantize and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    _close(writer)


def _decoder_name(name: str) -> str:
    if name.startswith("embed_tokens"):
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, layer, rest = name.split(".", 2)
    module, _, parameter = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[module]}.{parameter}"


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Add a unigram vocabulary: words start with a space, and punctuation does not."""
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_tokens) | {word for word in words.values() if word.startswith("<|")}
    pieces, kinds = [], []
    for index in range(size):
        word = words.get(index, f"<unused{index}>")
        is_special = word in special or index not in words
        pieces.append(word if is_special or not word[0].isalnum() else f"\u2581{word}")
        kinds.append(
            gguf.TokenType.UNKNOWN
            if word == "<unk>"
            else gguf.TokenType.CONTROL
            if is_special
            else gguf.TokenType.NORMAL
        )
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([-1.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_remove_extra_whitespaces(True)
    writer.add_chat_template(TEMPLATE)


def write_tower(path: Path, model: Any) -> None:
    """Write the vision tower."""
    vision, tower = model.config.vision_config, model.model.visual
    blocks: list[int | None] = []  # None is an identity block
    for index in range(vision.depth):
        is_full = index in vision.fullatt_block_indexes
        while is_full != ((len(blocks) + 1) % PATTERN == 0):
            blocks.append(None)
        blocks.append(index)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen2.5vl_merger")
    writer.add_bool("clip.use_silu", True)
    numbers = {
        "image_size": 112, "patch_size": vision.patch_size, "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size, "block_count": len(blocks),
        "attention.head_count": vision.num_heads, "projection_dim": vision.out_hidden_size,
        "spatial_merge_size": vision.spatial_merge_size, "n_wa_pattern": PATTERN,
    }  # fmt: skip
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)
    state = {name: tensor.float().numpy() for name, tensor in tower.state_dict().items()}
    kernel = state["patch_embed.proj.weight"]  # a still image is joined with itself
    for frame, suffix in enumerate(("", ".1")):
        writer.add_tensor(f"v.patch_embd.weight{suffix}", np.ascontiguousarray(kernel[:, :, frame]))
    writer.add_tensor("v.post_ln.weight", state["merger.ln_q.weight"])
    for layer in (0, 2):
        for part in ("weight", "bias"):
            writer.add_tensor(f"mm.{layer}.{part}", state[f"merger.mlp.{layer}.{part}"])
    for target, index in enumerate(blocks):
        for name, values in _block_tensors(state, index).items():
            writer.add_tensor(f"v.blk.{target}.{name}", np.ascontiguousarray(values))
    _close(writer)


def _block_tensors(state: dict[str, np.ndarray], index: int | None) -> dict[str, np.ndarray]:
    """Return the tensors of a block. In an identity block, both residual branches are 0."""
    prefix = f"blocks.{index or 0}."
    tensors = {}
    for name, values in state.items():
        if not name.startswith(prefix):
            continue
        module, _, part = name.removeprefix(prefix).rpartition(".")
        if module == "attn.qkv":
            for target, third in zip("qkv", np.split(values, 3), strict=True):
                tensors[f"attn_{target}.{part}"] = third
        else:
            is_output = module in ("attn.proj", "mlp.down_proj")
            tensors[f"{_BLOCK[module]}.{part}"] = values * 0 if index is None and is_output else values
    return tensors


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def write_all(folder: Path, quantize: bool = False) -> Path:
    """Write all files into a folder, and return it."""
    model, processor = load_reference()
    folder.mkdir(parents=True, exist_ok=True)
    write_decoder(folder / "decoder.gguf", model, processor, "qwen2vl", quantize)
    write_decoder(folder / "plain.gguf", model, processor, "qwen2", quantize)
    write_tower(folder / "mmproj.gguf", model)
    return folder


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
