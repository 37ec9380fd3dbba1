# SPDX-License-Identifier: Apache-2.0
"""Answers with graphs, and comparisons of answers with their caches."""

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


def same_logits(got: Any, want: Any) -> None:
    """Compare tokens and logits."""
    assert torch.equal(got.sequences, want.sequences)
    for logits, expected in zip(got.logits, want.logits, strict=True):
        close(logits, expected)


def same(got: Any, want: Any) -> None:
    """Compare tokens, logits, and the keys and values of each layer."""
    same_logits(got, want)
    same_cache(got.past_key_values, want.past_key_values)


def same_cache(got: Any, want: Any) -> None:
    for layer, expected in zip(got.layers, want.layers, strict=True):
        assert layer.keys.shape == expected.keys.shape and type(layer) is type(expected)
        assert getattr(layer, "cumulative_length", None) == getattr(expected, "cumulative_length", None)
        close(layer.keys, expected.keys)
        close(layer.values, expected.values)


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
