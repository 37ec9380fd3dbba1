# SPDX-License-Identifier: Apache-2.0
"""Answers of which each layer reads a part of what a session holds."""

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
from tokenprune.integrations.hf.sessions.proxy import observed


class Attending(LogitsProcessor):
    """Narrows the cache of a running `generate` after the question's own forward, which reads all that is held.

    `generate` calls it after each forward; logits stay as they are. Within the context it observes the question's
    attention, and the next forwards read the `keep` visual entries of each layer with full attention that get the most
    of it. Where all heads hold the same entries, they read the same. The caller puts the cache back.
    """

    def __init__(self, memory: Memory, adapter: Adapter, keep: int) -> None:
        self.memory, self.adapter, self.keep = memory, adapter, keep
        self._observing = ExitStack()
        self._found: dict[int, Tensor] | None = None

    def __enter__(self) -> Attending:
        self._found = self._observing.enter_context(observed(self.memory, self.adapter))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._observing.close()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._found is None:
            return scores
        self._observing.close()
        rows, self._found = [self._found[layer] for layer in self.memory.full], None
        narrow = copy.copy(self.memory)  # another table of the same cache
        table = narrow.tables[0]
        asked = self.memory.cache.layers[self.memory.full[0]].keys.shape[2] - self.memory.held
        narrow.append(torch.full((len(table), asked), -1, device=table.device))
        policy = MostAttended("each" if table.shape[1] > 1 else "mean")
        narrow.compress(policy, self.keep, step=0, seed=0, rows=rows)
        return scores
