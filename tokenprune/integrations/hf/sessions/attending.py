# SPDX-License-Identifier: Apache-2.0
"""Answers that read only a part of the visual entries of a session."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor
from transformers import LogitsProcessor

from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.sessions.memory import Memory
from tokenprune.integrations.hf.sessions.policies.most_attended import MostAttended
from tokenprune.integrations.hf.sessions.proxy import observe_attention


class Attending(LogitsProcessor):
    """Narrows the cache of a running `generate` to the entries that the question attends to most.

    `generate` calls it after each forward. The first forward reads the question and all entries, and its attention is
    observed. The next forwards read only `keep` visual entries in each layer with full attention. If all heads hold the
    same entries, they also read the same entries. Logits do not change. The caller restores the cache.

    Args:
        memory: Memory of the session.
        adapter: Adapter of the model.
        keep: Number of visual entries to read.
    """

    def __init__(self, memory: Memory, adapter: Adapter, keep: int) -> None:
        self.memory, self.adapter, self.keep = memory, adapter, keep
        self._observing = ExitStack()
        self._attention: dict[int, Tensor] | None = None

    def __enter__(self) -> Attending:
        self._attention = self._observing.enter_context(observe_attention(self.memory, self.adapter))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._observing.close()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._attention is None:
            return scores
        self._observing.close()
        rows, self._attention = [self._attention[layer] for layer in self.memory.full_layers], None
        narrow = copy.copy(self.memory)  # new tables for the same cache
        table = narrow.tables[0]
        num_new = self.memory.cache.layers[self.memory.full_layers[0]].keys.shape[2] - self.memory.held
        narrow.append(torch.full((len(table), num_new), -1, device=table.device))
        policy = MostAttended("each" if table.shape[1] > 1 else "mean")
        narrow.compress(policy, self.keep, step=0, seed=0, rows=rows)
        return scores
