# SPDX-License-Identifier: Apache-2.0
"""Pruning, quantization and compression of the cache together: the memory of weights and of keys and values, by closed
forms at the size of 7B models, and measured on the model that ships, with its right answers.

    python benchmarks/experiments/quantization.py          # measure (minutes; needs bitsandbytes and optimum-quanto)
    python benchmarks/experiments/quantization.py --page   # write the tables into docs/results/memory.md

Closed forms: matrices of the decoder, embeddings and head by `DecoderShape`; of quantized numbers the scales count.
Vision tower, activations and what an allocator wastes are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import fill_page, header, read, results_path, write
from limits import SHAPES
from torch import nn
from transformers import QuantizedCache

import tokenprune
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.layer_storage import count_layer_bytes, is_quantized, read_keys, read_values
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.tables import Cell, Table, to_markdown
from tokenprune_demo.heldout import load_heldout

PAGE = Path(__file__).parents[2] / "docs/results/memory.md"
BEGIN, END = "<!-- quantization:begin (benchmarks/experiments/quantization.py --page) -->", "<!-- quantization:end -->"
TEXT, KEEP, LAYER, CARD = 64, 0.25, 2, 24 * 2**30
# Bytes a number takes: weights in groups of 128 and keys in groups of 64 have a scale and a zero point of 2 bytes each;
# int8 weights one scale for each row of a matrix, which is next to nothing.
WEIGHTS = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
CACHES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Setting:
    """method: None, or what prunes to `KEEP`. weights, cache: how they are stored. compressed: whether half of the keys
    of each layer and head go behind the prompt."""

    method: str | None
    weights: str
    cache: str
    compressed: bool

    @property
    def cells(self) -> list[str]:
        return [self.method or "–", self.weights, self.cache, "half" if self.compressed else "–"]


COLUMNS = ("pruning", "weights", "cache", "compression")
# Each alone, then one more at a time.
CLOSED = [
    Setting(None, "bf16", "bf16", False), Setting("divprune", "bf16", "bf16", False),
    Setting("fastv", "bf16", "bf16", False), Setting(None, "int4", "bf16", False), Setting(None, "bf16", "fp8", False),
    Setting(None, "bf16", "int4", False), Setting(None, "bf16", "bf16", True),
    Setting("divprune", "bf16", "int4", False), Setting("divprune", "int4", "bf16", False),
    Setting("divprune", "int4", "int4", False), Setting("divprune", "int4", "int4", True),
]  # fmt: skip
MEASURED = [
    Setting(None, "float32", "float32", False), Setting("divprune", "float32", "float32", False),
    Setting("fastv", "float32", "float32", False), Setting(None, "int8", "float32", False),
    Setting(None, "float32", "int4", False), Setting(None, "float32", "float32", True),
    Setting("divprune", "float32", "int4", False), Setting("divprune", "int8", "float32", False),
    Setting("divprune", "int8", "int4", False), Setting("divprune", "int8", "int4", True),
]  # fmt: skip


# -- by closed forms


def weight_bytes(config: Any, kind: str) -> float:
    """Bytes of a decoder's weights; embeddings and head, a matrix each, stay as they are."""
    shape = DecoderShape.from_config(config)
    return shape.num_weights * WEIGHTS[kind] + 2 * config.vocab_size * config.hidden_size * WEIGHTS["bf16"]


def cache_bytes(shape: DecoderShape, visual: int, setting: Setting) -> float:
    """Bytes of the keys and values of a prompt with so many visual tokens."""
    kept = int(visual * KEEP)
    first = {None: shape.layers, "divprune": 0, "fastv": LAYER}[setting.method]  # layer that sees fewer
    tokens = [TEXT + (visual if layer < first else kept) for layer in range(shape.layers)]
    if setting.compressed:
        tokens = [number // 2 for number in tokens]
    return shape.kv_bytes(tokens, 1) * CACHES[setting.cache]


def closed_form(label: str, config: Any, visual: int) -> Table:
    """Return the table of a model's shape for prompts of `visual` tokens."""
    shape, rows = DecoderShape.from_config(config), []
    whole = cache_bytes(shape, visual, CLOSED[0])
    for setting in CLOSED:
        weights, cache = weight_bytes(config, setting.weights), cache_bytes(shape, visual, setting)
        prompts = int((CARD - weights) / cache)
        figures = (f"{weights / 2**30:.1f}", f"{cache / 2**20:.0f}", f"{cache / whole:.1%}", str(prompts))
        rows.append([Cell(text) for text in (*setting.cells, *figures)])
    columns = (*COLUMNS, "weights, GiB", "cache of a prompt, MiB", "of all", "prompts in 24 GiB")
    return Table(f"{label}, {visual} visual tokens and {TEXT} of text (closed form)", columns, rows)


def closed_forms() -> list[Table]:
    configs = {shape.label: shape for shape in SHAPES}
    image, video = configs["LLaVA-NeXT-7B, 5 views"], configs["Qwen2.5-VL-7B, 1024 tokens"]
    return [
        closed_form("LLaVA-NeXT-7B", image.made().get_text_config(), 2880),
        closed_form("Qwen2.5-VL-7B", video.made().get_text_config(), 16384),
    ]


# -- measured


@contextmanager
def halved(model: nn.Module) -> Iterator[None]:
    """Leave of each layer's and head's keys the half of the smallest norm, behind the prompt (kvpress's KnormPress)."""

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        cache, index = compat.get_cache(kwargs), module.layer_idx
        layer, width = cache.layers[index], kwargs["hidden_states"].shape[1]
        if layer.get_seq_length() != width:
            return  # a step
        keys, values = read_keys(cache, index), read_values(cache, index)
        kept = keys.norm(dim=-1).topk(width // 2, largest=False).indices[..., None].expand(-1, -1, -1, keys.shape[-1])
        keys, values = keys.gather(2, kept), values.gather(2, kept)
        if not is_quantized(layer):
            layer.keys, layer.values = keys, values
            return
        layer._quantized_keys = layer._quantize(keys, axis=layer.axis_key)
        layer._quantized_values = layer._quantize(values, axis=layer.axis_value)
        layer.cumulative_length = keys.shape[-2]

    layers = model.model.language_model.layers
    hooks = [layer.self_attn.register_forward_hook(leave, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def quantize_weights(model: nn.Module) -> None:
    """Store the decoder's matrices in 8 bits, in place, by bitsandbytes."""
    import bitsandbytes

    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "language_model" in path:
            made = bitsandbytes.nn.Linear8bitLt(
                module.in_features, module.out_features, module.bias is not None, has_fp16_weights=False
            )
            made.load_state_dict(module.state_dict())
            model.set_submodule(path, made.to("cpu"))


def stored_weights(model: nn.Module) -> int:
    """Bytes of a decoder's parameters, and of the scales of those that are quantized."""
    decoder = model.model.language_model
    scales = [getattr(getattr(module, "state", None), "SCB", None) for module in decoder.modules()]
    return sum(one.nbytes for one in (*decoder.parameters(), *scales) if one is not None)


def measure(subjects: dict[str, Model], setting: Setting, questions: list[Any]) -> dict[str, Any]:
    """Return what a setting stores, and how many questions it answers."""
    subject = subjects[setting.weights]
    model, config = subject.model, subject.model.config.get_text_config()

    def cache() -> dict[str, Any]:
        if setting.cache == "float32":
            return {}
        return {"past_key_values": QuantizedCache("quanto", config, nbits=4, q_group_size=config.head_dim)}

    with ExitStack() as stack:
        if setting.method is not None:
            options = {} if setting.method == "divprune" else {"layer": LAYER}
            stack.enter_context(tokenprune.patched(model, setting.method, keep=KEEP, **options))
        if setting.compressed:
            stack.enter_context(halved(model))
        asked = [subject.inputs([one.images], [one.question]) for one in questions]
        answers = [subject.generate(inputs, **cache())[0] for inputs in asked]
        out = model.generate(**asked[0], max_new_tokens=1, return_dict_in_generate=True, **cache())
        stored = sum(count_layer_bytes(layer) for layer in out.past_key_values.layers)
        told = tokenprune.stats(model).kv_bytes if setting.method else stored
    right = sum(one.is_right(answer) for one, answer in zip(questions, answers, strict=True))
    return {
        **vars(setting), "right": right, "asked": len(questions), "kv_bytes": stored, "kv_bytes_told": told,
        "weight_bytes": stored_weights(model), "tokens": asked[0]["input_ids"].shape[1],
    }  # fmt: skip


def measured(path: Path) -> Table:
    """Return the table of a file of results."""
    about, lines = read(path)
    rows = []
    for one in lines:
        setting = Setting(one["method"], one["weights"], one["cache"], one["compressed"])
        weights, cache = f"{one['weight_bytes'] / 2**20:.2f}", f"{one['kv_bytes'] / 2**10:.0f}"
        share, right = one["kv_bytes"] / lines[0]["kv_bytes"], one["right"] / one["asked"]
        figures = (weights, cache, f"{share:.1%}", f"{right:.0%}")
        rows.append([Cell(text) for text in (*setting.cells, *figures)])
    note = f"{lines[0]['asked']} held-out questions, prompts of {lines[0]['tokens']} tokens, CPU, {about['date']}."
    columns = (*COLUMNS, "decoder, MiB", "cache of a prompt, KiB", "of all", "right")
    return Table(f"{about['model']} (measured)", columns, rows, (note,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_vlm")
    parser.add_argument("--images", type=int, default=16, help="of the held-out set, each with its questions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/cpu/quantization.jsonl")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/results/memory.md")
    args = parser.parse_args()
    path = args.json or results_path(torch.device("cpu"), "quantization")
    if args.page:
        text = "\n".join(map(to_markdown, [*closed_forms(), measured(path)]))
        fill_page(PAGE, BEGIN, END, text)
        return
    torch.set_num_threads(args.threads)
    subjects = {kind: load_model(args.model) for kind in ("float32", "int8")}
    quantize_weights(subjects["int8"].model)
    questions = load_heldout(limit=args.images, folder=subjects["float32"].heldout)
    lines = [measure(subjects, setting, questions) for setting in MEASURED]
    write(path, [header(torch.device("cpu"), model=args.model, keep=KEEP), *lines])


if __name__ == "__main__":
    main()
