# SPDX-License-Identifier: Apache-2.0
"""Export the shipped Qwen2.5-VL in the format of OpenVINO GenAI's VLMPipeline, for openvino_cdpruner.py.

optimum-intel exports the models that it supports. This export is by hand: it needs no package except `openvino-genai`,
and the language model can be replaced by one that reports its inputs (`probe`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import openvino_tokenizers
import torch
from openvino._offline_transformations import apply_make_stateful_transformation
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

FIRST_CODE = 10  # smallest token id in the probe's answers; smaller ids are special tokens
_TYPES = {torch.float32: ov.Type.f32, torch.int64: ov.Type.i64, torch.int32: ov.Type.i32}
LONGEST = 576  # maximum value of a probe answer; the vocabulary has 640 tokens


class Merger(nn.Module):
    """The vision tower after its patch embedding. The pipeline computes the windows."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower, self.unit = tower, tower.spatial_merge_unit

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, window_attention_mask: Tensor, window_index: Tensor,
        rotary_pos_emb: Tensor,
    ) -> Tensor:  # fmt: skip
        x = self._in_windows(hidden_states, window_index)
        angles = self._in_windows(rotary_pos_emb, window_index)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(0)
        for index, block in enumerate(self.tower.blocks):
            mask = attention_mask if index in self.tower.fullatt_block_indexes else window_attention_mask
            x = x + self._attend(block.attn, block.norm1(x), angles, mask)
            x = x + block.mlp(block.norm2(x))
        return self.tower.merger(x)[torch.argsort(window_index)]

    def _in_windows(self, x: Tensor, window_index: Tensor) -> Tensor:
        return x.reshape(-1, self.unit, x.shape[-1])[window_index].flatten(0, 1)

    def _attend(self, attention: Any, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        heads = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)
        q, k = apply_rotary_pos_emb(heads[0], heads[1], angles.cos(), angles.sin())
        out = nn.functional.scaled_dot_product_attention(q, k, heads[2], mask.unsqueeze(0))
        return attention.proj(out[0].transpose(0, 1).flatten(1))


class Decoder(nn.Module):
    """The language model from embeddings to logits. Keys and values of each layer are extra arguments and results."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head = model.model.language_model, model.lm_head

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor, beam_idx: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        x, before = inputs_embeds, past[0].shape[2]
        cos, sin = self.decoder.rotary_emb(x, position_ids)
        indices = torch.arange(attention_mask.shape[1])
        causal = indices[None] <= indices[before:, None]
        mask = torch.where(causal & attention_mask.bool()[:, None, None], 0.0, torch.finfo(torch.float32).min)
        now: list[Tensor] = []
        for index, layer in enumerate(self.decoder.layers):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            for new, old in zip((k, v), past[2 * index : 2 * index + 2], strict=True):
                now.append(torch.cat((old.index_select(0, beam_idx), new), dim=2))
            repeated = (
                states.unsqueeze(2).expand(-1, -1, attention.num_key_value_groups, -1, -1).flatten(1, 2)
                for states in now[-2:]
            )
            out = nn.functional.scaled_dot_product_attention(q, *repeated, mask)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.decoder.norm(x)), *now


def export(model: Any, processor: Any, folder: Path) -> None:
    """Write a float32 Qwen2.5-VL and its processor into an empty folder."""
    tower, text = model.model.visual, model.config.text_config
    width, patches = tower.config.hidden_size, 32
    channels = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    mask = torch.zeros(1, patches, patches)
    angles = torch.zeros(patches, width // tower.config.num_heads // 2)
    write = _Writer(folder)
    write("vision_embeddings", tower.patch_embed, {"hidden_states": (torch.zeros(patches, channels), [-1, channels])})
    write(
        "vision_embeddings_merger",
        Merger(tower),
        {
            "hidden_states": (torch.zeros(patches, width), [-1, width]),
            "attention_mask": (mask, [1, -1, -1]),
            "window_attention_mask": (mask, [1, -1, -1]),
            "window_index": (torch.arange(patches // tower.spatial_merge_unit), [-1]),
            "rotary_pos_emb": (angles, [-1, angles.shape[1]]),
        },
    )
    ids = torch.zeros(1, 3, dtype=torch.long)
    write("text_embeddings", model.get_input_embeddings(), {"input": (ids, [-1, -1])})
    heads, head = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
    past = {
        f"past_key_values.{index}.{kind}": (torch.zeros(1, heads, 2, head), [-1, heads, -1, head])
        for index in range(text.num_hidden_layers)
        for kind in ("key", "value")
    }
    arguments = {
        "inputs_embeds": (torch.zeros(1, 3, text.hidden_size), [-1, -1, text.hidden_size]),
        "attention_mask": (torch.ones(1, 5, dtype=torch.long), [-1, -1]),
        "position_ids": (torch.zeros(3, 1, 3, dtype=torch.long), [3, -1, -1]),
        "beam_idx": (torch.zeros(1, dtype=torch.int), [-1]),
    }
    language = write.converted(Decoder(model), arguments | past)
    ov.save_model(_stateful(language, list(past)), folder / "openvino_language_model.xml", compress_to_fp16=False)
    _write_configs(model, processor, folder)
    _write_tokenizer(processor.tokenizer, folder)


class _Writer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def converted(self, module: nn.Module, arguments: dict[str, tuple[Tensor, list[int]]]) -> ov.Model:
        """Convert a module. `arguments` maps names to an example and a shape, with -1 for variable sizes."""
        examples = tuple(example for example, _ in arguments.values())
        with torch.no_grad():
            model = ov.convert_model(module.eval(), example_input=examples)
        for port, (name, (example, shape)) in zip(model.inputs, arguments.items(), strict=True):
            port.get_tensor().set_names({name})
            node = port.get_node()
            node.set_friendly_name(name)
            node.set_partial_shape(ov.PartialShape(shape))
            node.set_element_type(_TYPES[example.dtype])
        model.validate_nodes_and_infer_types()
        return model

    def __call__(self, name: str, module: nn.Module, arguments: dict[str, tuple[Tensor, list[int]]]) -> None:
        model = self.converted(module, arguments)
        ov.save_model(model, self.folder / f"openvino_{name}_model.xml", compress_to_fp16=False)


def _stateful(model: ov.Model, past: list[str]) -> ov.Model:
    """Keep keys and values as state of the model, initially empty."""
    model.outputs[0].get_tensor().set_names({"logits"})
    names = {}
    for old, port in zip(past, model.outputs[1:], strict=True):
        names[old] = old.replace("past_key_values", "present")
        port.get_tensor().set_names({names[old]})
    apply_make_stateful_transformation(model, names)
    batch = ops.gather(ops.shape_of(model.input("inputs_embeds"), output_type="i64"), [0], 0)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, head = node.get_output_partial_shape(0)
            shape = ops.concat([batch, np.array([heads.get_length(), 0, head.get_length()], dtype=np.int64)], 0)
            node.set_arguments([ops.broadcast(np.float32(0), shape)])
    model.validate_nodes_and_infer_types()
    return model


def probe(width: int, vocabulary: int, first: int, columns: int) -> ov.Model:
    """Build a language model that answers with its inputs, as codes from FIRST_CODE on.

    The first code is the number of prompt tokens. Each further code is the grid index of a visual token that the model
    received: row * columns + column.

    Args:
        width: Size of an embedding.
        vocabulary: Number of logits.
        first: Position of the first visual token.
        columns: Columns of the image's token grid.
    """
    embeds = ops.parameter([-1, -1, width], np.float32, name="inputs_embeds")
    mask = ops.parameter([-1, -1], np.int64, name="attention_mask")
    positions = ops.parameter([3, -1, -1], np.int64, name="position_ids")
    beams = ops.parameter([-1], np.int32, name="beam_idx")
    inputs = [embeds, mask, positions, beams]
    for node in inputs:
        node.output(0).get_tensor().set_names({node.get_friendly_name()})
    # Store the prompt's positions as a state, in float32 for the CPU plugin. Later steps do not change them.
    prompt_positions = ops.read_value(ops.convert(positions, "f32"), "seen", np.float32, [3, -1, -1])
    tokens = ops.gather(ops.shape_of(prompt_positions, "i32"), np.int32(2), np.int32(0))
    step = ops.subtract(ops.gather(ops.shape_of(mask, "i32"), np.int32(1), np.int32(0)), tokens)
    index = ops.unsqueeze(ops.add(step, np.int32(first - 1)), np.int32(0))
    position = ops.squeeze(ops.gather(prompt_positions, index, np.int32(2)), np.int32([2]))  # [3, batch]
    row, column = (
        ops.subtract(ops.gather(position, np.int32(axis), np.int32(0)), np.float32(first)) for axis in (1, 2)
    )
    value = ops.add(ops.multiply(row, np.float32(columns)), column)
    beginning = ops.broadcast(ops.convert(tokens, "f32"), ops.shape_of(value))
    value = ops.clamp(ops.select(ops.equal(step, np.int32(0)), beginning, value), 0.0, float(LONGEST))
    code = ops.unsqueeze(ops.convert(ops.add(value, np.float32(FIRST_CODE)), "i32"), np.int32(1))
    logits = ops.one_hot(code, np.int32(vocabulary), np.float32(9), np.float32(0), -1)
    # The pipeline sets these inputs, and unused inputs would be removed.
    unused = ops.multiply(ops.add(ops.reduce_sum(embeds, np.int64([0, 1, 2])),
                                  ops.convert(ops.reduce_sum(beams, np.int64([0])), "f32")), np.float32(0))  # fmt: skip
    result = ops.result(ops.add(logits, unused), name="logits")
    result.output(0).get_tensor().set_names({"logits"})
    return ov.Model([result], [ops.assign(prompt_positions, "seen")], inputs, "probe")


def _write_configs(model: Any, processor: Any, folder: Path) -> None:
    image = processor.image_processor
    vision = model.config.vision_config
    configs = {
        "config": {
            "model_type": "qwen2_5_vl",
            "hidden_size": model.config.text_config.hidden_size,
            "vision_config": {"patch_size": vision.patch_size, "window_size": vision.window_size},
        },
        "preprocessor_config": {
            "patch_size": image.patch_size,
            "temporal_patch_size": image.temporal_patch_size,
            "merge_size": image.merge_size,
            "min_pixels": image.size["shortest_edge"],
            "max_pixels": image.size["longest_edge"],
            "image_mean": list(image.image_mean),
            "image_std": list(image.image_std),
        },
        "generation_config": {"eos_token_id": model.generation_config.eos_token_id},
    }
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the word-level tokenizer as WordPiece without continuations, a kind that OpenVINO supports.

    Ids are equal.
    """
    same = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    vocabulary = json.loads(same.to_str())["model"]["vocab"]
    same.model = models.WordPiece(vocabulary, unk_token=tokenizer.unk_token)
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=same, **special)
    converted = openvino_tokenizers.convert_tokenizer(wrapped, with_detokenizer=True)
    for name, model in zip(("tokenizer", "detokenizer"), converted, strict=True):
        ov.save_model(model, folder / f"openvino_{name}.xml")
