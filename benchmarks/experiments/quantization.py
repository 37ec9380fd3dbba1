# SPDX-License-Identifier: Apache-2.0
"""Measure pruning, quantization and cache compression together, and compute their memory for 7B models.

    python benchmarks/experiments/quantization.py          # measure (minutes; needs bitsandbytes and optimum-quanto)
    python benchmarks/experiments/quantization.py --page   # write the tables into docs/results/memory.md

The closed forms count the decoder's matrices, embeddings and head (`DecoderShape`), and the scales of quantized
numbers. Vision tower, activations and allocator overhead are not counted. The raw file is
results/cpu/quantization.jsonl.
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
# Bytes per number: weights in groups of 128 and keys in groups of 64 have a scale and a zero point of 2 bytes each.
# int8 weights have one scale per matrix row, which is negligible.
WEIGHTS = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
CACHES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Setting:
    """A combination.

    Attributes:
        method: Method that prunes to `KEEP`, or None.
        weights: Storage of the weights.
        cache: Storage of the cache.
        compressed: Whether half of the keys of each layer and head are dropped after the prompt.
    """

    method: str | None
    weights: str
    cache: str
    compressed: bool

    @property
    def cells(self) -> list[str]:
        return [self.method or "–", self.weights, self.cache, "half" if self.compressed else "–"]


COLUMNS = ("pruning", "weights", "cache", "compression")
# Each technique by itself, then combinations.
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


# -- closed forms


def weight_bytes(config: Any, kind: str) -> float:
    """Return the bytes of a decoder's weights. Embeddings and head are not quantized."""
    shape = DecoderShape.from_config(config)
    return shape.num_weights * WEIGHTS[kind] + 2 * config.vocab_size * config.hidden_size * WEIGHTS["bf16"]


def cache_bytes(shape: DecoderShape, visual: int, setting: Setting) -> float:
    """Return the bytes of the keys and values of a prompt with `visual` visual tokens."""
    kept = int(visual * KEEP)
    first = {None: shape.layers, "divprune": 0, "fastv": LAYER}[setting.method]  # first layer with fewer tokens
    tokens = [TEXT + (visual if layer < first else kept) for layer in range(shape.layers)]
    if setting.compressed:
        tokens = [count // 2 for count in tokens]
    return shape.kv_bytes(tokens, 1) * CACHES[setting.cache]


def closed_form(label: str, config: Any, visual: int) -> Table:
    """Return the table of a model's shape for prompts with `visual` tokens."""
    shape, rows = DecoderShape.from_config(config), []
    uncompressed = cache_bytes(shape, visual, CLOSED[0])
    for setting in CLOSED:
        weights, cache = weight_bytes(config, setting.weights), cache_bytes(shape, visual, setting)
        prompts = int((CARD - weights) / cache)
        figures = (f"{weights / 2**30:.1f}", f"{cache / 2**20:.0f}", f"{cache / uncompressed:.1%}", str(prompts))
        rows.append([Cell(text) for text in (*setting.cells, *figures)])
    columns = (*COLUMNS, "weights, GiB", "cache of a prompt, MiB", "of all", "prompts in 24 GiB")
    return Table(f"{label}, {visual} visual tokens and {TEXT} of text (closed form)", columns, rows)


def closed_forms() -> list[Table]:
    configs = {shape.label: shape for shape in SHAPES}
    image_shape, video_shape = configs["LLaVA-NeXT-7B, 5 views"], configs["Qwen2.5-VL-7B, 1024 tokens"]
    return [
        closed_form("LLaVA-NeXT-7B", image_shape.build_config().get_text_config(), 2880),
        closed_form("Qwen2.5-VL-7B", video_shape.build_config().get_text_config(), 16384),
    ]


# -- measured


@contextmanager
def halved(model: nn.Module) -> Iterator[None]:
    """Keep the half of each layer's and head's keys with the smallest norm after the prompt (kvpress's KnormPress)."""

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        cache, index = compat.get_cache(kwargs), module.layer_idx
        layer, width = cache.layers[index], kwargs["hidden_states"].shape[1]
        if layer.get_seq_length() != width:
            return  # a decoding step
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
    """Replace the decoder's linear layers by 8-bit layers of bitsandbytes."""
    import bitsandbytes

    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and "language_model" in path:
            layer = bitsandbytes.nn.Linear8bitLt(
                module.in_features, module.out_features, module.bias is not None, has_fp16_weights=False
            )
            layer.load_state_dict(module.state_dict())
            model.set_submodule(path, layer.to("cpu"))


def stored_weights(model: nn.Module) -> int:
    """Return the bytes of the decoder's parameters and of their scales."""
    decoder = model.model.language_model
    scales = [getattr(getattr(module, "state", None), "SCB", None) for module in decoder.modules()]
    return sum(tensor.nbytes for tensor in (*decoder.parameters(), *scales) if tensor is not None)


def measure(subjects: dict[str, Model], setting: Setting, questions: list[Any]) -> dict[str, Any]:
    """Return the stored bytes and the right answers of a setting."""
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
        all_inputs = [subject.inputs([question.images], [question.question]) for question in questions]
        answers = [subject.generate(inputs, **cache())[0] for inputs in all_inputs]
        out = model.generate(**all_inputs[0], max_new_tokens=1, return_dict_in_generate=True, **cache())
        stored = sum(count_layer_bytes(layer) for layer in out.past_key_values.layers)
        reported = tokenprune.stats(model).kv_bytes if setting.method else stored
    right = sum(question.is_right(answer) for question, answer in zip(questions, answers, strict=True))
    return {
        **vars(setting), "right": right, "asked": len(questions), "kv_bytes": stored, "kv_bytes_told": reported,
        "weight_bytes": stored_weights(model), "tokens": all_inputs[0]["input_ids"].shape[1],
    }  # fmt: skip


def measured(path: Path) -> Table:
    """Return the table of a raw file."""
    about, lines = read(path)
    rows = []
    for line in lines:
        setting = Setting(line["method"], line["weights"], line["cache"], line["compressed"])
        weights, cache = f"{line['weight_bytes'] / 2**20:.2f}", f"{line['kv_bytes'] / 2**10:.0f}"
        share, right = line["kv_bytes"] / lines[0]["kv_bytes"], line["right"] / line["asked"]
        figures = (weights, cache, f"{share:.1%}", f"{right:.0%}")
        rows.append([Cell(text) for text in (*setting.cells, *figures)])
    note = f"{lines[0]['asked']} held-out questions, prompts of {lines[0]['tokens']} tokens, CPU, {about['date']}."
    columns = (*COLUMNS, "decoder, MiB", "cache of a prompt, KiB", "of all", "right")
    return Table(f"{about['model']} (measured)", columns, rows, (note,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_vlm")
    parser.add_argument("--images", type=int, default=16, help="number of held-out images, each with its questions")
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
