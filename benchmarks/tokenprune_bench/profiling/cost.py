# SPDX-License-Identifier: Apache-2.0
"""Costs of answers: visual tokens, prefill FLOPs, and bytes of the KV cache."""

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


def get_batch_cost(subject: Model, inputs: dict[str, Any], kv_bytes: int | None = None) -> Stats:
    """Return the cost of the batch that just ran.

    Args:
        subject: The model.
        inputs: Arguments of the batch.
        kv_bytes: Cache size after prefill, for the unpatched model. None reads the statistics of the patch.
    """
    if kv_bytes is None:
        return stats(subject.model) if subject.visual_tokens(inputs) else Stats()
    rows, length = inputs["input_ids"].shape
    return compute_unpatched_cost(subject.shape, rows, length, subject.visual_tokens(inputs), kv_bytes)


def compute_unpatched_cost(shape: DecoderShape, rows: int, length: int, visual: int, kv_bytes: int) -> Stats:
    """Return the cost of the unpatched model.

    Args:
        shape: Shape of the decoder.
        rows: Number of prompts.
        length: Padded length of each prompt.
        visual: Number of visual tokens of all prompts.
        kv_bytes: Cache size after prefill.
    """
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


def build_cost_model(subject: Model) -> CostModel:
    """Return the closed-form cost model, without a tower if the family's tower is not known."""
    try:
        return CostModel(subject.shape, TowerShape.from_config(subject.model.config))
    except UnsupportedModelError:
        return CostModel(subject.shape)


def build_load(subject: Model, inputs: dict[str, Any]) -> Load:
    """Return the unpatched load of a prompt, without views if the family's tower is not known."""
    visual = subject.visual_tokens(inputs)
    if build_cost_model(subject).tower is None:
        return Load((), visual, inputs["input_ids"].numel() - visual)
    return Load.from_inputs(subject.model.config, inputs, visual)


def answer_with_escalation(subject: Model, batch: list[Any], keep: float | int) -> tuple[list[str], dict[str, Any]]:
    """Answer one question with `two_pass.escalate` and its defaults, and return the answer and the cost.

    Visual tokens and FLOPs (closed form) of both passes are added. The cache size is that of the last pass.
    """
    (question,) = batch
    images, labels, shape = list(question.images), getattr(question, "labels", ()), subject.shape
    unpatched_inputs = subject.inputs([images], [question.question], [labels] if labels else ())
    visual = subject.visual_tokens(unpatched_inputs)
    text = unpatched_inputs["input_ids"].shape[1] - visual
    prompt = subject.prompt(images, question.question, labels)
    options: dict[str, Any] = {"max_new_tokens": subject.max_new_tokens, "do_sample": False, "num_beams": 1}
    escalation = escalate(subject.model, subject.processor, images=images, text=prompt, keep=keep, **options)
    paid = sum(escalation.visual_tokens)
    flops = sum(shape.prefill_flops([text + tokens] * shape.layers) for tokens in escalation.visual_tokens)
    size = subject.model.dtype.itemsize
    kept_bytes, full_bytes = (
        shape.kv_bytes([text + tokens] * shape.layers, size) for tokens in (escalation.visual_tokens[-1], visual)
    )
    cost = Stats(
        visual,
        round(paid),
        [paid] * shape.layers,  # type: ignore[list-item]  # the first pass is an average over layers
        prefill_flops=flops,
        prefill_flops_full=shape.prefill_flops([text + visual] * shape.layers),
        kv_bytes=round(kept_bytes),
        kv_bytes_full=round(full_bytes),
        overhead_ms=None,
    )
    return [escalation.text], cost.sums()


def build_cost_record(cost: Stats, unpatched: Stats) -> dict[str, Any]:
    """Return a cost as plain values, with ratios to the unpatched cost of the same questions.

    `unpatched` is needed because the statistics of a method that resizes images contain only the resized images.
    """
    plain = cost.sums() | {"visual_tokens_in": unpatched.visual_tokens_in, "kv_bytes_full": unpatched.kv_bytes}
    flops, _ = plain.pop("prefill_flops"), plain.pop("prefill_flops_full")
    plain["visual_tokens_average"] = cost.visual_tokens_average
    plain["keep_ratio"] = cost.visual_tokens_out / max(1, unpatched.visual_tokens_in)
    plain["prefill_flops_ratio"] = flops / unpatched.prefill_flops if unpatched.prefill_flops else None
    return plain


class CacheMeter:
    """Context that measures the bytes in the cache after the last prefill."""

    def __init__(self, subject: Model) -> None:
        self.decoder, self.kv_bytes = subject.adapter.decoder, 0

    def __enter__(self) -> CacheMeter:
        self._handle = self.decoder.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _look(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        embeds, cache = kwargs.get("inputs_embeds"), compat.get_cache(kwargs)
        if embeds is not None and embeds.shape[1] > 1 and cache is not None:
            tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
            self.kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
