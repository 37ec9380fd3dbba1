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
    """Keep random visual tokens. This is the baseline that every policy must beat.

    The selection depends on the seed of the session and the number of compressions. Questions do not change it.

    Examples:
        >>> session = tokenprune.sessions.session(model, processor, memory=512, policy="random", seed=1)
        >>> session.policy
        random()
    """

    shared: ClassVar[bool] = True

    def select(self, view: PolicyView, keep: int) -> Tensor:
        indices = torch.randperm(view.count, generator=view.generator(), device="cpu")[:keep]
        return indices.sort().values.to(view.keys.device)
