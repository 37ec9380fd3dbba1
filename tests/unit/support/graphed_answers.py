# SPDX-License-Identifier: Apache-2.0
"""Generation with CUDA graphs, and comparisons of outputs and caches."""

from __future__ import annotations

from typing import Any

import torch

import tokenprune
from oracle import close
from tokenprune.integrations.hf.graphs.decoder import GraphedDecoder

STEPS = 6


def generate(model: Any, inputs: Any, **options: Any) -> Any:
    defaults = dict(max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        return model.generate(**inputs, **defaults | options)


def same_logits(actual: Any, expected: Any) -> None:
    assert torch.equal(actual.sequences, expected.sequences)
    for actual_logits, expected_logits in zip(actual.logits, expected.logits, strict=True):
        close(actual_logits, expected_logits)


def same(actual: Any, expected: Any) -> None:
    """Compare tokens, logits, and the keys and values of each layer."""
    same_logits(actual, expected)
    same_cache(actual.past_key_values, expected.past_key_values)


def same_cache(actual: Any, expected: Any) -> None:
    for actual_layer, expected_layer in zip(actual.layers, expected.layers, strict=True):
        assert actual_layer.keys.shape == expected_layer.keys.shape and type(actual_layer) is type(expected_layer)
        assert getattr(actual_layer, "cumulative_length", None) == getattr(expected_layer, "cumulative_length", None)
        close(actual_layer.keys, expected_layer.keys)
        close(actual_layer.values, expected_layer.values)


def counts(model: Any) -> Any:
    return tokenprune.stats(model).graphs


def get_part(model: Any) -> GraphedDecoder:
    parts = tokenprune.api.get_attachment(model).engine.parts
    return next(part for part in parts if isinstance(part, GraphedDecoder))


def continue_turn(model: Any, first: Any, inputs: Any, new: Any = (5, 6, 7), **options: Any) -> Any:
    """Ask a second question on the cache of a first answer."""
    rows = len(inputs["input_ids"])
    added = torch.cat([first.sequences[:, inputs["input_ids"].shape[1] :], torch.tensor([list(new)] * rows)], 1)
    ids = torch.cat([inputs["input_ids"], added], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(added)], 1)
    return generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=first.past_key_values, **options)
