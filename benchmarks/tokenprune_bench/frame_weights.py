# SPDX-License-Identifier: Apache-2.0
"""frame_weights: which frames of a video a prompt asks about, read off the attention of a model, often a small one."""

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
    """Return for each video of a prompt a weight for each frame, by how much the prompt's last token attends to it.

    Pass them to `Budget.by_frame_weights` for another model that sees the same frames, or for this one. The model runs
    once over the prompt and generates nothing. The attention of the last token to a video is averaged over heads, over
    the tokens of each frame, and over layers.

    model:  an unpatched model of transformers whose frames are known (docs/guides/video.md), such as a small one of the
            family.
    layers: indices of decoder layers, at least 1; None: the last third.
    inputs: the model's arguments, as its processor makes them.

    Videos are in the order of the batch; the weights of each sum to 1. Raises OptionError for layers that there are not
    and for prompts without a video, UnsupportedSetupError where frames are not known, and what `patch` raises.

    Source: DyToK, "Less Is More, but Where? Dynamic Token Compression via LLM-Guided Keyframe Prior" (arXiv 2512.06866,
    NeurIPS 2025), by the authors' code for LLaVA-OneVision; the paper's text was not read.

    Differs from the paper: any family, batches and several videos, each for itself.
    """
    method = _WeighFrames(None if layers is None else tuple(layers))
    forward = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in forward and "logits_to_keep" not in inputs else {}
    with patched(model, method, keep=0.5):  # of which nothing is removed: all stages only look
        model(**inputs, **last)
    if not method.found:
        raise OptionError("frame_weights: the prompt holds no video: pass its pixels and its prompt")
    per_video = method.found.values()
    means = [torch.stack(of_layers).mean(0) for of_layers in per_video]
    return [tuple((one / one.sum()).tolist()) for one in means]


@dataclass(frozen=True)
class _WeighFrames(Pruner):
    """Look at several layers. found: for each video (row, number in it) the weights that each layer gives."""

    name: ClassVar[str] = "frame_weights"
    site: ClassVar[Site] = Site.IN_LLM

    layers: tuple[int, ...] | None = None
    found: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        chosen = range(max(1, 2 * layers // 3), layers) if self.layers is None else self.layers
        if not chosen or not all(isinstance(one, int) and 1 <= one < layers for one in chosen):
            raise OptionError(
                f"frame_weights: layers={self.layers!r} must list decoder layers, each from 1 to {layers - 1}"
            )
        return [(_LookAtFrames(layer, self.found), Budget(keep=1.0)) for layer in sorted({*chosen})]


@dataclass(frozen=True)
class _LookAtFrames(Pruner):
    """Note how much the last token attends to each frame in one layer, and remove nothing."""

    name: ClassVar[str] = "frame_weights"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"next_row_attention"})
    by_content_count: ClassVar[bool] = True

    layer: int
    found: dict[tuple[int, int], list[Tensor]] = field(repr=False, compare=False)

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
                    "frame_weights: nothing tells which tokens of this video are a frame; give weights of your own"
                )
            attention = tokens.next_row_attention[segment, :, : sum(frames)].float()
            tiny = torch.finfo(torch.float32).tiny
            share = (attention / attention.sum(1, keepdim=True).clamp(min=tiny)).mean(0)
            of_frames = torch.stack([one.mean() for one in share.split(frames)])
            self.found.setdefault((about.row[segment], about.ordinal[segment]), []).append(of_frames.cpu())
        return Selection(tokens.mask, counts=tokens.counts)
