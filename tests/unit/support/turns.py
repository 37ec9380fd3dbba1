# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns on one cache, compared with the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tokenprune
from oracle import close, generate_logits
from pruned import hide_dropped
from tokenprune import Stats
from zoo import FIRST_TEXT_ID, VOCAB, Family


def words(batch: int, count: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_ID, VOCAB, (batch, count), generator=g)


def longer(inputs: Any, family: Family, sequences: Tensor, more: Tensor) -> dict[str, Tensor]:
    """Return the arguments of the next turn of a chat: the text so far, without images."""
    ids = torch.cat([sequences, more], 1)
    new = ids.shape[1] - inputs["input_ids"].shape[1]
    turn = {"input_ids": ids, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1)}
    if family.types == "mm_token_type_ids":
        turn[family.types] = torch.nn.functional.pad(inputs[family.types], (0, new))
    return turn


def check_turns(
    family: Family, model: Any, inputs: Any, method: Any, keep: Any = 0.4, steps: tuple[int, ...] = (2, 2), **later: Any
) -> Stats:
    """Check the logits of several turns of text on one cache, and return the statistics of the first turn.

    steps: new tokens of each turn. later: arguments of later turns.
    """
    more = words(len(inputs["input_ids"]), 4)

    def talk(forced: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        logits, written, call, cache = [], [], inputs, {}
        for count, tokens in zip(steps, forced, strict=True):
            step_logits, new, output = generate_logits(model, call, count, tokens=tokens, **cache)
            logits.append(step_logits), written.append(new)
            call = longer(inputs, family, output.sequences, more) | later
            cache = {"past_key_values": output.past_key_values}
        return logits, written

    with tokenprune.patched(model, method, keep=keep, record=True):
        actual, tokens = talk([None] * len(steps))
        stats = tokenprune.stats(model)
    with hide_dropped(family, model, stats.cuts, inputs["input_ids"].shape[1]):
        expected, _ = talk(tokens)
    for actual_logits, expected_logits in zip(actual, expected, strict=True):
        close(actual_logits, expected_logits)
    return stats
