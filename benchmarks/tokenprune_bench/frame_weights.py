# SPDX-License-Identifier: Apache-2.0
"""Weights of video frames for a prompt, from the attention of a (small) model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenprune.api import patched
from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@torch.no_grad()
def frame_weights(model: Any, *, layers: Sequence[int] | None = None, **inputs: Any) -> list[tuple[float, ...]]:
    """Return a weight per frame for each video of a prompt, from the attention of the prompt's last token.

    Pass the weights to `Budget.by_frame_weights`, for this model or for another model that sees the same frames. The
    model runs once over the prompt without generating. The attention to a video is averaged over heads, over the tokens
    of each frame, and over layers.

    Args:
        model: An unpatched transformers model with known frames (docs/guides/video.md), such as a small model of the
            family.
        layers: Indices of decoder layers, at least 1. None selects the last third.
        inputs: Model arguments, as the processor returns them.

    Returns:
        One tuple per video in batch order. The weights of a video sum to 1.

    Raises:
        OptionError: If a layer does not exist, or the prompt has no video.
        UnsupportedSetupError: If the frames are not known.

    Source:
        DyToK, "Less Is More, but Where? Dynamic Token Compression via LLM-Guided Keyframe Prior" (arXiv 2512.06866,
        NeurIPS 2025), from the authors' code for LLaVA-OneVision.

    Differences from the paper:
        - Supports any family, batches, and several videos with separate weights.
    """
    method = _WeighFrames(None if layers is None else tuple(layers))
    forward = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in forward and "logits_to_keep" not in inputs else {}
    with patched(model, method, keep=0.5):  # every stage observes and keeps all tokens
        model(**inputs, **last)
    if not method.captured:
        raise OptionError("frame_weights needs a prompt with a video. Pass the video's pixels and placeholders.")
    per_video = method.captured.values()
    means = [torch.stack(of_layers).mean(0) for of_layers in per_video]
    return [tuple((mean / mean.sum()).tolist()) for mean in means]


@dataclass(frozen=True)
class _WeighFrames(Pruner):
    """Observe several layers.

    Attributes:
        captured: For each video (row, index in the row), the frame weights of each layer.
    """

    name: ClassVar[str] = "frame_weights"
    site: ClassVar[Site] = Site.IN_LLM

    layers: tuple[int, ...] | None = None
    captured: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        chosen = range(max(1, 2 * layers // 3), layers) if self.layers is None else self.layers
        if not chosen or not all(isinstance(layer, int) and 1 <= layer < layers for layer in chosen):
            raise OptionError(
                f"layers={self.layers!r} is not valid. frame_weights needs decoder layers from 1 to {layers - 1}."
            )
        return [(_LookAtFrames(layer, self.captured), Budget(keep=1.0)) for layer in sorted({*chosen})]


@dataclass(frozen=True)
class _LookAtFrames(Pruner):
    """Record the last token's attention to each frame in one layer, and keep all tokens."""

    name: ClassVar[str] = "frame_weights"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"next_row_attention"})
    chooses_count: ClassVar[bool] = True

    layer: int
    captured: dict[tuple[int, int], list[Tensor]] = field(repr=False, compare=False)

    @property
    def query_aware(self) -> bool:
        return True

    def select(self, tokens: VisualTokens) -> Selection:
        about = tokens.segments
        for segment, frames in enumerate(about.frames):
            if about.modality[segment] != "video":
                continue
            if frames is None:
                raise UnsupportedSetupError(
                    "frame_weights cannot assign the tokens of this video to frames. Pass your own weights instead."
                )
            attention = tokens.next_row_attention[segment, :, : sum(frames)].float()
            tiny = torch.finfo(torch.float32).tiny
            share = (attention / attention.sum(1, keepdim=True).clamp(min=tiny)).mean(0)
            of_frames = torch.stack([frame_share.mean() for frame_share in share.split(frames)])
            self.captured.setdefault((about.row[segment], about.ordinal[segment]), []).append(of_frames.cpu())
        return Selection(tokens.mask, counts=tokens.counts)
