# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tokenprune.integrations.hf.sessions.policies.base import PROXY_ATTENTION
from tokenprune.integrations.hf.sessions.policies.most_attended import MostAttended
from tokenprune.integrations.hf.sessions.policies.registry import register_policy


@register_policy("streammem")
@dataclass(frozen=True)
class StreamMem(MostAttended):
    """Keep the visual tokens that a proxy of a question attends to most, in each layer and KV head by itself
    (StreamMem, arXiv 2508.15717).

    The proxy are the tokens of the chat template between a question and its answer. They run after what is held
    whenever it is compressed, and leave no trace. A token's score is the softmax attention that it gets, averaged over
    the proxy's tokens and the query heads of a KV head, in float32; text and the proxy compete for it.
    proxy: None for the chat template's tokens; a text, which is put as a question; or ids, which a session without a
    processor needs. heads: "each" ranks in each KV head; "mean" has all heads of a layer keep the same.
    A reconstruction: the paper's text and tables were not read, only its abstract, its project page and two notes of
    readers, and no code was found. Our decisions: the mean over query heads, and which tokens compete. Differs from the
    notes: frames that are alike are not merged ahead of the model, since no threshold was found; frames get no merged
    prototype, since its place was not established; positions are not stretched by YaRN; it compresses when the memory
    is over, theirs after each clip (`target=1.0` is nearest).
    """

    proxy: str | Sequence[int] | None = None

    needs: ClassVar[frozenset[str]] = frozenset({PROXY_ATTENTION})

    @property
    def proxy_query(self) -> str | Sequence[int] | None:
        return self.proxy
