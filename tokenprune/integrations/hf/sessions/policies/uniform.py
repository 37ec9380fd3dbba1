# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
from tokenprune.integrations.hf.sessions.policies.registry import register_policy

if TYPE_CHECKING:
    from torch import Tensor

_MASK = 0xFFFFFFFF


@register_policy("uniform")
@dataclass(frozen=True)
class UniformPolicy(Policy):
    """Keep evenly spaced visual tokens. This baseline forgets exponentially.

    After k compressions from M to C tokens, a share of about (C / M)^k of the tokens of a frame remains.

    Args:
        reservoir: Keep the tokens whose stream index has the smallest hash instead (bottom-k sampling). Every token of
            the stream is then kept with the same probability, independent of its age.

    Examples:
        >>> tokenprune.sessions.policy("uniform", reservoir=True)
        uniform(reservoir=True)
    """

    reservoir: bool = False

    shared: ClassVar[bool] = True

    def select(self, view: PolicyView, keep: int) -> Tensor:
        if self.reservoir:
            smallest = _hash(view.index[0] + view.seed * 7_919).argsort(stable=True)[:keep]
            return smallest.sort().values
        indices = torch.linspace(0, view.count - 1, keep, dtype=torch.float64, device="cpu")
        return indices.round().long().to(view.keys.device)


def _hash(values: Tensor) -> Tensor:
    """Hash each value to 32 bits with the finalizer of MurmurHash3 (public domain)."""
    mixed = values & _MASK
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return mixed ^ (mixed >> 16)
