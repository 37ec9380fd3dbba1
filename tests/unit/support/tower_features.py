# SPDX-License-Identifier: Apache-2.0
"""Use the features of patched towers in unpatched models, as the reference for the decoder."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenprune
from oracle import close, generate_logits, reduced, survivors
from zoo import Family

ARGUMENTS = {
    "image": (
        "pixel_values", "pixel_attention_mask", "image_sizes", "batch_num_images", "image_grid_thw", "spatial_shapes"
    ),
    "video": ("pixel_values_videos", "video_grid_thw"),
}  # fmt: skip


def base_of(model: Any) -> Any:
    return model.model if hasattr(model.model, "get_image_features") else model


def encode(model: Any, inputs: Any, **options: Any) -> dict[str, Any]:
    """Return the features of the images and videos of a batch."""
    outputs = {}
    for modality, names in ARGUMENTS.items():
        if inputs.get(names[0]) is not None:
            arguments = {name: inputs[name] for name in names if inputs.get(name) is not None}
            outputs[modality] = getattr(base_of(model), f"get_{modality}_features")(**arguments, **options)
    return outputs


@contextmanager
def as_encoded(model: Any, outputs: dict[str, Any]) -> Iterator[None]:
    """Return the image and video features of a patched tower from the unpatched model within this context."""
    base = base_of(model)
    for modality, output in outputs.items():
        name = f"get_{modality}_features"

        @functools.wraps(getattr(base, name))  # generate() reads the signature
        def features(*args: Any, output: Any = output, **kwargs: Any) -> Any:
            return copy.copy(output)

        setattr(base, name, features)
    try:
        yield
    finally:
        for modality in outputs:
            delattr(base, f"get_{modality}_features")


@dataclass(frozen=True)
class PatchedRun:
    """A forward pass of a patched model, the features of its tower, and a generation if `step_logits` is not None."""

    logits: Tensor
    stats: Any
    outputs: dict[str, Any]
    step_logits: Tensor | None = None
    tokens: Tensor | None = None
    step_cuts: Any = None


@torch.no_grad()
def run_patched(model: Any, inputs: Any, method: Any, keep: Any, steps: int = 3, **options: Any) -> PatchedRun:
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        logits, stats = model(**inputs).logits, tokenprune.stats(model)
        if not steps:
            return PatchedRun(logits, stats, encode(model, inputs))
        step_logits, tokens, _ = generate_logits(model, inputs, steps)
        # generate() uses other masks, so a selection that depends on the last bit may differ.
        step_cuts = tokenprune.stats(model).cuts
        return PatchedRun(logits, stats, encode(model, inputs), step_logits, tokens, step_cuts)


@torch.no_grad()
def check_decoder(family: Family, model: Any, inputs: Any, run: PatchedRun, oracle: Callable = reduced) -> None:
    """Compare a run with the unpatched model on the same features, with the columns of dropped tokens masked."""
    length = inputs["input_ids"].shape[1]
    alive = survivors(run.stats.cuts[-1], length) if run.stats.cuts else inputs["attention_mask"].bool()
    with as_encoded(model, run.outputs):
        with oracle(family, model, run.stats.cuts, length):
            close(run.logits[alive], model(**inputs).logits[alive])
        if run.step_logits is not None:
            with oracle(family, model, run.step_cuts, length):
                expected, _, _ = generate_logits(model, inputs, run.step_logits.shape[1], tokens=run.tokens)
            close(run.step_logits, expected)
