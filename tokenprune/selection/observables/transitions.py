# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.selection.observable import Observable, ObservedAt, Recorder
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("transitions")
class Transitions(Observable):
    """float32 `[S, N, 2, 2]`: what the attention module and the MLP of the layer before the cut make of what they get:
    how many times as long it becomes, and its cosine to what it was."""

    where = ObservedAt.OWN
    axes = "SNMT"

    def attach(self, adapter: Any, layer: int) -> Recorder:
        return Recorder(adapter.modules_of(layer - 1), _change)

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.gather(torch.stack(source.get_recorded(self.name), dim=2), segments.position, segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        made = uniform(sizes.segments, sizes.tokens, 2, 2, generator=generator)
        top, bottom = torch.tensor([[3.0, 1.0], [0.0, -1.0]], dtype=torch.float32, device="cpu")
        return made * (top - bottom) + bottom


def _change(args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor:
    """Return float32 `[B, W, 2]`: how many times as long a module makes each token, and the cosine to what it was."""
    given = args[0] if args else kwargs["hidden_states"]
    before = given.float()
    after = (output[0] if isinstance(output, tuple) else output).view_as(given).float()
    lengths = before.norm(dim=-1), after.norm(dim=-1)
    tiny = torch.finfo(torch.float32).tiny
    cosine = (before * after).sum(-1) / (lengths[0] * lengths[1]).clamp(min=tiny)
    return torch.stack([lengths[1] / lengths[0].clamp(min=tiny), cosine], dim=-1)
