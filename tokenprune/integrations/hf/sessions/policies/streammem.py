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
    """Keep the visual tokens with the most attention from a proxy question, in each layer and KV head (StreamMem).

    The proxy question consists of the chat template's tokens between a question and its answer. A forward with the
    proxy runs before each compression, and the cache is restored. The score of a token is its softmax attention
    (float32), averaged over the proxy's tokens and the query heads of a KV head. The softmax also covers text tokens
    and the proxy itself.

    This is a reconstruction from the abstract, the project page and two reviews. The full paper was not read, and no
    code was found. The average over query heads and the tokens of the softmax are our decisions.

    Args:
        heads: "each" selects per KV head. "mean" selects the same entries for all heads of a layer.
        proxy: None for the tokens of the chat template, a text question, or token ids. A session without a processor
            needs token ids.

    Source:
        StreamMem (arXiv 2508.15717).

    Differences from the paper:
        - Similar frames are not merged before the model, because no threshold was found.
        - Frames get no merged prototype, because its position was not found.
        - Positions are not scaled by YaRN.
        - The memory is compressed when it is full, and not after each clip. `target=1.0` is the closest setting.

    Examples:
        >>> tokenprune.sessions.policy("streammem", proxy="Describe the video.").proxy_query
        'Describe the video.'
    """

    proxy: str | Sequence[int] | None = None

    needs: ClassVar[frozenset[str]] = frozenset({PROXY_ATTENTION})

    @property
    def proxy_query(self) -> str | Sequence[int] | None:
        return self.proxy
