# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.base import Site
from tokenprune.kernels.take import top_mask
from tokenprune.registry import register
from tokenprune.sites.units import UnitDropper

if TYPE_CHECKING:
    from torch import Tensor

_PATCHES, _CHANNELS = 4, 3  # of a unit in all towers that pack patches


@register("docprune", site=Site.IN_ENCODER, paper="arXiv 2604.22281, CVPR 2026 (first stage)")
@dataclass(frozen=True)
class DocPrune(UnitDropper):
    """Drop the background of a page ahead of the vision tower: the patches that are nearly all of its commonest grey.

    A patch is background where more than `threshold` of its pixels are closer than `tolerance` to the grey that most
    pixels of the page have; a unit of patches goes where all of its patches are. So the content decides how many stay,
    at least one; `keep` is an upper bound, and where it binds those with the most background go first. Of a video each
    temporal patch is a page. It takes `processor=`, which knows the colours.

    threshold: share of a patch's pixels; 1 drops nothing.
    tolerance: in greys from 0 to 255; 1 means exactly the commonest grey, which JPEG and scans seldom keep.

    Source: "DocPrune: Efficient Document Question Answering via Background, Question, and Comprehension-aware Token
    Pruning", its first stage, background. The paper itself could not be read beyond its abstract, and there is no code
    of its authors: written from a description of its equations.

    Differs from the paper: of the three stages this one alone, as the second needs the vectors of a retriever, and the
    third a score that is not published. Ours, where the description says that the paper is silent: the weights of the
    greys, rounding them, that one patch of four saves a unit. The bound, and videos, are ours as well.
    """

    default_keep: ClassVar[int] = 1_000_000  # tokens an image: no bound

    threshold: Annotated[float, Ge(0), Le(1)] = 0.9
    tolerance: Annotated[float, Gt(0), Le(255)] = 1.0

    @property
    def reads_colours(self) -> str | None:
        return "the commonest grey is one of colours from 0 to 1"

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        frames = len(pixels)
        colours = pixels.reshape(frames, -1, _PATCHES, _CHANNELS, pixels.shape[-1] // (_PATCHES * _CHANNELS))
        red, green, blue = colours.mul(255).round().unbind(3)
        grey = (0.299 * red + 0.587 * green + 0.114 * blue).round()
        page = grey.flatten(1).mode(dim=1).values
        ground = (grey - page.view(-1, 1, 1, 1)).abs().lt(self.tolerance).float().mean(3)
        share = ground.amin(2).view(1, -1)  # of the patch that is least background
        stays = share <= self.threshold
        count = stays.sum(1).clamp(min=1, max=most)
        return top_mask(-share, torch.ones_like(stays), count, most).view(pixels.shape[:3])
