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
    """Keep visual tokens at even distances among those that are held: a baseline that forgets exponentially.

    Old tokens have been through more compressions than new ones: of M held and C kept, a share of about (C / M)^k is
    left of what has been through k of them.
    reservoir: keep instead the tokens whose index in the stream has the least hash. Of all tokens that were ever seen
    each is then held with the same chance, whatever its age (bottom-k sampling).
    """

    reservoir: bool = False

    shared: ClassVar[bool] = True

    def select(self, view: PolicyView, keep: int) -> Tensor:
        if self.reservoir:
            least = _hashed(view.index[0] + view.seed * 7_919).argsort(stable=True)[:keep]
            return least.sort().values
        places = torch.linspace(0, view.count - 1, keep, dtype=torch.float64, device="cpu")
        return places.round().long().to(view.keys.device)


def _hashed(numbers: Tensor) -> Tensor:
    """Return 32 mixed bits of each number, as long: the finalizer of MurmurHash3, which is public domain."""
    mixed = numbers & _MASK
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return mixed ^ (mixed >> 16)
