# SPDX-License-Identifier: Apache-2.0
"""The attention that a proxy of a question pays to what a session holds, read in one forward that leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import OptionError, SessionError
from tokenprune.integrations.hf.attention_observer import Observer
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.sessions.memory import Memory
from tokenprune.integrations.hf.sessions.policies.base import PROXY_ATTENTION, Policy
from tokenprune.integrations.hf.sessions.prompts import Words
from tokenprune.kernels.observation import Observation

# Sessions of several threads may share a model, whose attention one of them observes at a time.
_OBSERVING = threading.Lock()


def proxy_of(policy: Policy, words: Words | None, adapter: Adapter) -> Tensor | None:
    """Return the ids of a policy's proxy, long `[1, P]`, None for one that needs none; raises OptionError or
    SessionError."""
    if PROXY_ATTENTION not in policy.needs:
        return None
    query = policy.proxy_query
    if query is not None and not isinstance(query, str):
        ids = torch.tensor([list(query)], dtype=torch.long, device="cpu")
        if not ids.numel() or any((ids == token).any() for token in adapter.placeholders.values()):
            raise OptionError(f"{policy.name}: the proxy {query!r} must be ids of text, at least one")
        return ids
    if words is None:
        raise SessionError(
            f"{policy.name} asks by a proxy in words, and without a processor there are none: make the session with "
            f"session(model, processor, ...), or give ids, tokenprune.sessions.policy({policy.name!r}, proxy=[...])"
        )
    ids = words.closing() if query is None else words.said(query, closing=True)
    if not ids.numel():
        raise SessionError(
            f"the chat template writes nothing between a question and its answer, which {policy.name} takes for its "
            f"proxy: give a text, tokenprune.sessions.policy({policy.name!r}, proxy='Describe the video.')"
        )
    return ids


@contextmanager
def observed(memory: Memory, adapter: Adapter) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that this thread's first forward fills, for each layer with full attention: float32 `[Hq, n]`,
    softmax attention to the n entries that the memory holds, averaged over the forward's tokens."""
    held, thread = memory.held, threading.get_ident()
    found: dict[int, Tensor] = {}

    def reader(layer: int) -> Callable[[Observation], None]:
        def read(seen: Observation) -> None:
            if threading.get_ident() == thread and layer not in found:  # guidance runs a prompt of its own
                index = torch.arange(seen.query.shape[2], device=seen.query.device)[None]
                found[layer] = seen.rows(index)[0, ..., :held].mean(1)

        return read

    with _OBSERVING, ExitStack() as observers:
        for layer in memory.full:
            observers.enter_context(Observer(adapter.get_attention(layer), reader(layer)))
        yield found


def attention_of_proxy(memory: Memory, adapter: Adapter, run: Callable[[], Any]) -> tuple[list[Tensor], int]:
    """Return the attention of a proxy's tokens to what each layer with full attention holds, see `observed`; and the
    bytes of the cache meanwhile.

    run: a forward that writes the proxy into the memory's cache, from which it is taken off again.
    """
    before = memory.copy()
    try:
        with observed(memory, adapter) as found:
            run()
        size = memory.bytes
    finally:
        memory.take_back(before)
    return [found[layer] for layer in memory.full], size
