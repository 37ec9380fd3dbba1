# SPDX-License-Identifier: Apache-2.0
"""Observable of the changes that the modules of a decoder layer make."""

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
    """Change of each token in the attention module and in the MLP of the layer before the cut, (S, N, 2, 2), float32.

    The last axis is the ratio of output norm to input norm, and the cosine of input and output.
    """

    where = ObservedAt.OWN
    axes = "SNMT"

    def attach(self, adapter: Any, layer: int) -> Recorder:
        return Recorder(adapter.get_attention_and_mlp(layer - 1), _measure_change)

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.gather(torch.stack(source.get_recorded(self.name), dim=2), segments.position, segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        values = uniform(sizes.segments, sizes.tokens, 2, 2, generator=generator)
        top, bottom = torch.tensor([[3.0, 1.0], [0.0, -1.0]], dtype=torch.float32, device="cpu")
        return values * (top - bottom) + bottom


def _measure_change(args: tuple, kwargs: dict[str, Any], output: Any) -> Tensor:
    """Return the norm ratio and the cosine of output and input of a module, shape (B, W, 2), float32."""
    hidden = args[0] if args else kwargs["hidden_states"]
    before = hidden.float()
    after = (output[0] if isinstance(output, tuple) else output).view_as(hidden).float()
    norms = before.norm(dim=-1), after.norm(dim=-1)
    tiny = torch.finfo(torch.float32).tiny
    cosine = (before * after).sum(-1) / (norms[0] * norms[1]).clamp(min=tiny)
    return torch.stack([norms[1] / norms[0].clamp(min=tiny), cosine], dim=-1)
