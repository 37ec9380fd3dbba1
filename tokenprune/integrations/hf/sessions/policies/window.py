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
    """Keep the first visual tokens that were ever seen, and the latest: sink and window (StreamingLLM, arXiv
    2309.17453).

    sink: int >= 0, visual tokens that stay from the beginning; the window is the rest.
    Differs from the paper: text, the prompt at the beginning among it, is no part of sink or window, and stays; and
    tokens keep their positions, where the paper counts them within the cache.
    """

    sink: Annotated[int, Ge(0)] = 64

    shared: ClassVar[bool] = True

    @property
    def pinned(self) -> int:
        return self.sink

    def select(self, view: PolicyView, keep: int) -> Tensor:
        sink = min(self.sink, keep)
        late = torch.arange(view.count - keep + sink, view.count, device=view.keys.device)
        return torch.cat([torch.arange(sink, device=view.keys.device), late])
