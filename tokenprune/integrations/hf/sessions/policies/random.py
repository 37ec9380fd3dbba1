# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
from tokenprune.integrations.hf.sessions.policies.registry import register_policy

if TYPE_CHECKING:
    from torch import Tensor


@register_policy("random")
@dataclass(frozen=True)
class RandomPolicy(Policy):
    """Keep visual tokens drawn at random among those that are held: the baseline that every policy must beat.

    The draw depends on the session's seed and on how often it has compressed; questions do not change it.
    """

    shared: ClassVar[bool] = True

    def select(self, view: PolicyView, keep: int) -> Tensor:
        drawn = torch.randperm(view.count, generator=view.generator(), device="cpu")[:keep]
        return drawn.sort().values.to(view.keys.device)
