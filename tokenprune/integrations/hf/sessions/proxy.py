# SPDX-License-Identifier: Apache-2.0
"""Measure the attention of a proxy question to the entries of a session, in a forward that does not change it."""

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
from tokenprune.integrations.hf.sessions.prompts import PromptWriter
from tokenprune.kernels.observation import Observation

# Sessions of several threads can share a model. Only one thread observes its attention at a time.
_OBSERVING = threading.Lock()


def get_proxy_ids(policy: Policy, writer: PromptWriter | None, adapter: Adapter) -> Tensor | None:
    """Return the token ids of a policy's proxy question.

    Args:
        policy: Policy of the session.
        writer: Writes text prompts. None for a session without a processor.
        adapter: Adapter of the model.

    Returns:
        Token ids, shape (1, tokens), int64, or None if the policy does not need a proxy.

    Raises:
        OptionError: If the proxy ids are empty or contain placeholders.
        SessionError: If the proxy is text and there is no processor, or if the template has no closing text.
    """
    if PROXY_ATTENTION not in policy.needs:
        return None
    query = policy.proxy_query
    if query is not None and not isinstance(query, str):
        ids = torch.tensor([list(query)], dtype=torch.long, device="cpu")
        if not ids.numel() or any((ids == token).any() for token in adapter.placeholders.values()):
            raise OptionError(f"{policy.name}: proxy={query!r} must be a non-empty list of text token ids")
        return ids
    if writer is None:
        raise SessionError(
            f"{policy.name} has a text proxy, which needs a processor. Use session(model, processor, ...), or pass "
            f"token ids: tokenprune.sessions.policy({policy.name!r}, proxy=[...])."
        )
    ids = writer.encode_closing() if query is None else writer.encode_text(query, closing=True)
    if not ids.numel():
        raise SessionError(
            f"{policy.name} uses the template's text between question and answer as its proxy, and it is empty. Pass "
            f"tokenprune.sessions.policy({policy.name!r}, proxy='Describe the video.')."
        )
    return ids


@contextmanager
def observe_attention(memory: Memory, adapter: Adapter) -> Iterator[dict[int, Tensor]]:
    """Observe the attention of this thread's first forward to the entries of a memory.

    Yields:
        A dict that the forward fills, by index of the layers with full attention: softmax attention, averaged over the
        tokens of the forward, shape (query heads, entries), float32.
    """
    held, thread = memory.held, threading.get_ident()
    attention: dict[int, Tensor] = {}

    def make_reader(layer: int) -> Callable[[Observation], None]:
        def read(observation: Observation) -> None:
            # Guidance runs a second forward, which is ignored.
            if threading.get_ident() == thread and layer not in attention:
                index = torch.arange(observation.query.shape[2], device=observation.query.device)[None]
                attention[layer] = observation.rows(index)[0, ..., :held].mean(1)

        return read

    with _OBSERVING, ExitStack() as observers:
        for layer in memory.full_layers:
            observers.enter_context(Observer(adapter.get_attention(layer), make_reader(layer)))
        yield attention


def measure_proxy_attention(memory: Memory, adapter: Adapter, run: Callable[[], Any]) -> tuple[list[Tensor], int]:
    """Measure the attention of a proxy question to the entries of each layer with full attention.

    Args:
        memory: Memory of the session. It is restored afterwards.
        adapter: Adapter of the model.
        run: Runs a forward of the proxy with the cache of the memory.

    Returns:
        Attention of each layer (see `observe_attention`), and the bytes of the cache with the proxy.
    """
    before = memory.copy()
    try:
        with observe_attention(memory, adapter) as attention:
            run()
        size = memory.bytes
    finally:
        memory.restore(before)
    return [attention[layer] for layer in memory.full_layers], size
