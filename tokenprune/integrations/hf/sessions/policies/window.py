# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Ge

from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
from tokenprune.integrations.hf.sessions.policies.registry import register_policy

if TYPE_CHECKING:
    from torch import Tensor


@register_policy("window")
@dataclass(frozen=True)
class WindowPolicy(Policy):
    """Keep the first visual tokens of the stream (the sink) and the latest (the window).

    Args:
        sink: Number of visual tokens of the sink.

    Source:
        Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).

    Differences from the paper:
        - Text, including the first prompt, is never dropped and not part of the sink or the window.
        - Tokens keep their positions. The paper uses positions within the cache.

    Examples:
        >>> tokenprune.sessions.policy("window", sink=0).pinned
        0
    """

    sink: Annotated[int, Ge(0)] = 64

    shared: ClassVar[bool] = True

    @property
    def pinned(self) -> int:
        return self.sink

    def select(self, view: PolicyView, keep: int) -> Tensor:
        sink = min(self.sink, keep)
        latest = torch.arange(view.count - keep + sink, view.count, device=view.keys.device)
        return torch.cat([torch.arange(sink, device=view.keys.device), latest])
