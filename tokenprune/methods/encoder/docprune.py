# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.units import UnitDropper

if TYPE_CHECKING:
    from torch import Tensor

_PATCHES, _CHANNELS = 4, 3  # of a unit in all towers that pack patches


@register("docprune", site=Site.IN_ENCODER, paper="arXiv 2604.22281, CVPR 2026 (first stages)")
@dataclass(frozen=True)
class DocPrune(UnitDropper):
    """Drop the background of a page ahead of the vision tower, the patches that are nearly all of its commonest grey;
    and, given a map of what a question is about, what does not matter to it.

    A patch is background where more than `threshold` of its pixels are closer than `tolerance` to the grey that most
    pixels of the page have; a unit of patches goes where all of its patches are. So the content decides how many stay,
    at least one; `keep` is an upper bound, and where it binds those with the most background go first. Of a video each
    temporal patch is a page. It takes `processor=`, which knows the colours.

    threshold: share of a patch's pixels; 1 drops nothing.
    tolerance: in greys from 0 to 255; 1 means exactly the commonest grey, which JPEG and scans seldom keep.
    relevance: a map of each image, float `[h, w]` of any size, high where the question is answered, as `relevance_map`
    makes them of a retriever's vectors; or a function of the image's pixels, `[T, H, W, P]`, called once for each image
    in the order of the prompt, that returns one. It is laid over the grid of patches, smoothed, and a unit counts by
    the best of its patches. Where `keep` binds, the least relevant go first.
    least_relevance: what is less relevant goes, in units of the map; None: nothing but for `keep`.

    Source: "DocPrune: Efficient Document Question Answering via Background, Question, and Comprehension-aware Token
    Pruning", its stages background and question. The paper itself could not be read beyond its abstract, and there is
    no code of its authors: written from a description of its equations.

    Differs from the paper: the third stage, comprehension, is not implementable as published: its score is not. Ours,
    where the description says that the paper is silent: the weights of the greys, rounding them, that one patch of four
    saves a unit, how a map is resized, and that it is smoothed by a Gaussian of sigma 1 over 7 patches with the rim
    repeated. The bound, and videos, are ours as well.
    """

    default_keep: ClassVar[int] = 1_000_000  # tokens an image: no bound
    query_free: ClassVar[Mapping[str, Any]] = {"relevance": None, "least_relevance": None}

    threshold: Annotated[float, Ge(0), Le(1)] = 0.9
    tolerance: Annotated[float, Gt(0), Le(255)] = 1.0
    relevance: Any = None
    least_relevance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.relevance is None or callable(self.relevance) or getattr(self.relevance, "ndim", 0) == 2
        self._check(good, "relevance must be a tensor [h, w], or a function that returns one")
        self._check(self.least_relevance is None or self.relevance is not None, "least_relevance= takes relevance=")

    @property
    def query_aware(self) -> bool:
        return self.relevance is not None

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
        stays, rank = share <= self.threshold, -share
        if self.relevance is not None:
            rank = self._relevant(self.relevance, pixels).reshape(1, -1)
            if self.least_relevance is not None:
                stays = stays & (rank >= self.least_relevance)
        count = stays.sum(1).clamp(min=1, max=most)
        # Where nothing stays, the best of all does.
        return top_mask(rank, stays | ~stays.any(1, keepdim=True), count, most).view(pixels.shape[:3])

    def _relevant(self, relevance: Any, pixels: Tensor) -> Tensor:
        """Return the relevance of each unit, float32 `[T, H, W]`: that of its best patch."""
        (frames, height, width, _), side = pixels.shape, math.isqrt(_PATCHES)
        found = relevance if isinstance(relevance, torch.Tensor) else relevance(pixels)
        self._check(isinstance(found, torch.Tensor) and found.ndim == 2, "relevance must return a tensor [h, w]")
        grid = to_device(found.float(), pixels.device)[None, None]
        size = side * height, side * width
        grid = torch.nn.functional.interpolate(grid, size, mode="bilinear", align_corners=False)
        weight = torch.arange(-3, 4, dtype=torch.float32, device=grid.device).square().div(-2).softmax(0)
        grid = torch.nn.functional.pad(grid, (3, 3, 3, 3), mode="replicate").unfold(2, 7, 1).mul(weight).sum(-1)
        grid = grid.unfold(3, 7, 1).mul(weight).sum(-1)
        return torch.nn.functional.max_pool2d(grid, side)[0].expand(frames, -1, -1)


def relevance_map(documents: Tensor, questions: Tensor, height: int | None = None) -> Tensor:
    """Return the `relevance` of an image: for each of its vectors the sum of its cosines with those of a question.

    documents: `[N, D]`, of a grid row by row, such as ColPali's 32 x 32; questions: `[M, D]`. height: of the grid;
    None: it is square. Returns float32 `[height, N / height]`; a vector of zeros adds 0.
    """
    normalize = torch.nn.functional.normalize
    alike = normalize(documents.float(), dim=1) @ normalize(questions.float(), dim=1).sum(0)
    return alike.view(height or math.isqrt(len(alike)), -1)
