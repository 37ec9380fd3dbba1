# SPDX-License-Identifier: Apache-2.0
"""Costs of answers: visual tokens, FLOPs of prefill, bytes of the KV cache."""

from __future__ import annotations

from typing import Any

from tokenprune.api import stats
from tokenprune.errors import UnsupportedModelError
from tokenprune.integrations.hf import compat
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.models.tower_shape import TowerShape
from tokenprune.settings.cost import CostModel, Load
from tokenprune.statistics import Stats
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.two_pass import escalate


def spent(subject: Model, inputs: dict[str, Any], kv_bytes: int | None = None) -> Stats:
    """Return what the batch that just ran spent. kv_bytes: what its cache held after prefill, if the model was not
    patched."""
    if kv_bytes is None:
        return stats(subject.model) if subject.visual_tokens(inputs) else Stats()
    rows, length = inputs["input_ids"].shape
    return unpatched(subject.shape, rows, length, subject.visual_tokens(inputs), kv_bytes)


def unpatched(shape: DecoderShape, rows: int, length: int, visual: int, kv_bytes: int) -> Stats:
    """Return what a model without a patch spends on `rows` prompts of `length` slots with `visual` visual tokens in
    all. kv_bytes: what its cache holds after prefill."""
    flops = rows * shape.prefill_flops([length] * shape.layers)
    return Stats(
        visual,
        visual,
        [visual] * shape.layers,
        prefill_flops=flops,
        prefill_flops_full=flops,
        kv_bytes=kv_bytes,
        kv_bytes_full=kv_bytes,
    )


def closed_forms(subject: Model) -> CostModel:
    """Return those of a model; without a tower where that of its family is not known."""
    try:
        return CostModel(subject.shape, TowerShape.from_config(subject.model.config))
    except UnsupportedModelError:
        return CostModel(subject.shape)


def load_of(subject: Model, inputs: dict[str, Any]) -> Load:
    """Return the load of a prompt, unpatched; without views where the family's tower is not known."""
    visual = subject.visual_tokens(inputs)
    if closed_forms(subject).tower is None:
        return Load((), visual, inputs["input_ids"].numel() - visual)
    return Load.from_inputs(subject.model.config, inputs, visual)


def escalated(subject: Model, batch: list[Any], keep: float | int) -> tuple[list[str], dict[str, Any]]:
    """Answer one question by `two_pass.escalate` with its own defaults, and return the answer and what it cost.

    Both passes count as paid where there were two: their visual tokens and FLOPs (closed form) are added. The cache is
    that of the pass that counted.
    """
    (question,) = batch
    images, labels, shape = list(question.images), getattr(question, "labels", ()), subject.shape
    whole = subject.inputs([images], [question.question], [labels] if labels else ())
    visual = subject.visual_tokens(whole)
    text = whole["input_ids"].shape[1] - visual
    prompt = subject.prompt(images, question.question, labels)
    options: dict[str, Any] = {"max_new_tokens": subject.max_new_tokens, "do_sample": False, "num_beams": 1}
    made = escalate(subject.model, subject.processor, images=images, text=prompt, keep=keep, **options)
    paid = sum(made.visual_tokens)
    flops = sum(shape.prefill_flops([text + tokens] * shape.layers) for tokens in made.visual_tokens)
    size = subject.model.dtype.itemsize
    left, full = (shape.kv_bytes([text + tokens] * shape.layers, size) for tokens in (made.visual_tokens[-1], visual))
    cost = Stats(
        visual,
        round(paid),
        [paid] * shape.layers,  # type: ignore[list-item]  # the first pass is an average over layers
        prefill_flops=flops,
        prefill_flops_full=shape.prefill_flops([text + visual] * shape.layers),
        kv_bytes=round(left),
        kv_bytes_full=round(full),
        overhead_ms=None,
    )
    return [made.text], cost.sums()


def record(cost: Stats, whole: Stats) -> dict[str, Any]:
    """Return fields of `Stats` as plain values, with all ratios taken against the unpatched model on the same
    questions, which spent `whole`: a method that acts on pixels does not know what it saved."""
    plain = cost.sums() | {"visual_tokens_in": whole.visual_tokens_in, "kv_bytes_full": whole.kv_bytes}
    flops, _ = plain.pop("prefill_flops"), plain.pop("prefill_flops_full")
    plain["visual_tokens_average"] = cost.visual_tokens_average
    plain["keep_ratio"] = cost.visual_tokens_out / max(1, whole.visual_tokens_in)
    plain["prefill_flops_ratio"] = flops / whole.prefill_flops if whole.prefill_flops else None
    return plain


class Prefill:
    """Reads from the cache itself how many bytes the last prefill left in it."""

    def __init__(self, subject: Model) -> None:
        self.decoder, self.kv_bytes = subject.adapter.decoder, 0

    def __enter__(self) -> Prefill:
        self._handle = self.decoder.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _look(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        embeds, cache = kwargs.get("inputs_embeds"), compat.cache_in(kwargs)
        if embeds is not None and embeds.shape[1] > 1 and cache is not None:
            tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
            self.kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
