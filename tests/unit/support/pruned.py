# SPDX-License-Identifier: Apache-2.0
"""Runs of a patched model, and their comparison with the masked oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import tokenprune
from families import STATEFUL
from only_kept import only_kept
from oracle import close, generate_logits, reduced, survivors
from tokenprune import Stats
from zoo import Family


def hide_dropped(family: Family, model: PreTrainedModel, cuts: list[Any], length: int) -> Any:
    """Return the oracle of a family. Recurrent families need separate runs of each row, since masks do not affect
    states."""
    return (only_kept if family.name in STATEFUL else reduced)(family, model, cuts, length)


@torch.no_grad()
def run_pruned(model: PreTrainedModel, inputs: dict, method: Any, keep: Any = 0.5, **options: Any) -> tuple[Any, Stats]:
    """Return the output and the statistics of one forward, with its cuts recorded."""
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        return model(**inputs), tokenprune.stats(model)


def check_forward(
    family: Family, model: PreTrainedModel, inputs: dict, method: Any, keep: Any = 0.5, **options: Any
) -> Stats:
    """Check the logits of all tokens that survive the last cut, and return the statistics."""
    output, stats = run_pruned(model, inputs, method, keep, **options)
    length = inputs["input_ids"].shape[1]
    with hide_dropped(family, model, stats.cuts, length), torch.no_grad():
        expected = model(**inputs).logits
    alive = survivors(stats.cuts[-1], length)
    close(output.logits[alive], expected[alive])
    return stats


def check_generation(
    family: Family,
    model: PreTrainedModel,
    inputs: dict,
    method: Any,
    keep: Any = 0.5,
    steps: int = 3,
    tolerance: float = 1e-5,
    **options: Any,
) -> tuple[Tensor, Tensor, Stats]:
    """Check the logits of each step of `generate`. Return the logits, the written tokens, and the statistics."""
    with tokenprune.patched(model, method, keep=keep, record=True, **options):
        actual, tokens, _ = generate_logits(model, inputs, steps)
        stats = tokenprune.stats(model)
    with hide_dropped(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        expected, _, _ = generate_logits(model, inputs, steps, tokens=tokens)
    close(actual.float(), expected.float(), tolerance)
    return actual, tokens, stats
