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

_PATCHES, _CHANNELS = 4, 3  # patches and color channels of a unit, in all towers that pack patches


@register("docprune", site=Site.IN_ENCODER, paper="arXiv 2604.22281, CVPR 2026 (first stages)")
@dataclass(frozen=True)
class DocPrune(UnitDropper):
    """Drop the background of a page before the vision tower (DocPrune).

    A patch is background if more than `threshold` of its pixels differ by less than `tolerance` from the page's most
    common grey value. A unit (the patches of one visual token) is dropped if all its patches are background. With
    `relevance`, units with low relevance to the question are dropped too. At least one unit is kept. Each temporal
    patch of a video is a page. The method requires `processor=`, which knows the normalisation of the colors.

    The content decides the number of kept tokens. `keep` is an upper bound; if it is exceeded, the units with the most
    background, or the lowest relevance, are dropped first.

    Args:
        threshold: Share of a patch's pixels, in [0, 1]. 1 drops no patches.
        tolerance: Difference in grey levels, from 0 to 255. 1 means exactly the most common grey, which JPEG and scans
            rarely preserve.
        relevance: Relevance map of the image, float (rows, columns) of any size, with high values where the question is
            answered. `relevance_map` computes it from a retriever's vectors. Or a function that returns a map for an
            image's pixels (frames, height, width, pixels); it is called once per image, in the order of the prompt. The
            map is resized to the patch grid and smoothed, and a unit has the relevance of its best patch.
        least_relevance: Drop units with a lower relevance, in units of the map. None: drop only to meet `keep`.

    Source:
        "DocPrune: Efficient Document Question Answering via Background, Question, and Comprehension-aware Token
        Pruning" (arXiv 2604.22281), the background and question stages. Reconstruction: only the abstract was available
        and the authors published no code; it follows a description of the equations.

    Differences from the paper:
        - The third stage, comprehension, is left out, because its score is not published.
        - The description omits these details, so they are choices of this implementation: the weights of the color
          channels and their rounding, one foreground patch of four saves a unit, the resizing of a map, and its
          smoothing by a Gaussian (sigma 1, 7 patches, replicated border).
        - The upper bound and the support for videos are additions.

    Examples:
        >>> model, processor = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, DocPrune(tolerance=8.0), processor=processor)
    """

    default_keep: ClassVar[int] = 1_000_000  # tokens per image: no bound
    query_free: ClassVar[Mapping[str, Any]] = {"relevance": None, "least_relevance": None}

    threshold: Annotated[float, Ge(0), Le(1)] = 0.9
    tolerance: Annotated[float, Gt(0), Le(255)] = 1.0
    relevance: Any = None
    least_relevance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = self.relevance is None or callable(self.relevance) or getattr(self.relevance, "ndim", 0) == 2
        self._check(is_valid, "relevance must be a tensor of shape (rows, columns) or a function that returns one")
        self._check(self.least_relevance is None or self.relevance is not None, "least_relevance requires relevance")

    @property
    def query_aware(self) -> bool:
        return self.relevance is not None

    @property
    def reads_colours(self) -> str | None:
        return "it compares grey values from 0 to 255"

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        frames = len(pixels)
        colors = pixels.reshape(frames, -1, _PATCHES, _CHANNELS, pixels.shape[-1] // (_PATCHES * _CHANNELS))
        red, green, blue = colors.mul(255).round().unbind(3)
        grey = (0.299 * red + 0.587 * green + 0.114 * blue).round()
        page = grey.flatten(1).mode(dim=1).values
        background = (grey - page.view(-1, 1, 1, 1)).abs().lt(self.tolerance).float().mean(3)
        share = background.amin(2).view(1, -1)  # minimum over the patches of a unit
        passes, rank = share <= self.threshold, -share
        if self.relevance is not None:
            rank = self._compute_relevance(self.relevance, pixels).reshape(1, -1)
            if self.least_relevance is not None:
                passes = passes & (rank >= self.least_relevance)
        count = passes.sum(1).clamp(min=1, max=max_units)
        # If no unit passes, keep the best unit.
        return top_mask(rank, passes | ~passes.any(1, keepdim=True), count, max_units).view(pixels.shape[:3])

    def _compute_relevance(self, relevance: Any, pixels: Tensor) -> Tensor:
        """Return the relevance of each unit, shape (frames, height, width), float32: the maximum over its patches."""
        (frames, height, width, _), side = pixels.shape, math.isqrt(_PATCHES)
        result = relevance if isinstance(relevance, torch.Tensor) else relevance(pixels)
        is_valid = isinstance(result, torch.Tensor) and result.ndim == 2
        self._check(is_valid, "relevance must return a tensor of shape (rows, columns)")
        grid = to_device(result.float(), pixels.device)[None, None]
        size = side * height, side * width
        grid = torch.nn.functional.interpolate(grid, size, mode="bilinear", align_corners=False)
        weight = torch.arange(-3, 4, dtype=torch.float32, device=grid.device).square().div(-2).softmax(0)
        grid = torch.nn.functional.pad(grid, (3, 3, 3, 3), mode="replicate").unfold(2, 7, 1).mul(weight).sum(-1)
        grid = grid.unfold(3, 7, 1).mul(weight).sum(-1)
        return torch.nn.functional.max_pool2d(grid, side)[0].expand(frames, -1, -1)


def relevance_map(documents: Tensor, questions: Tensor, height: int | None = None) -> Tensor:
    """Compute a relevance map: the sum of each image vector's cosines with the question vectors.

    Args:
        documents: Vectors of the image's grid in row-major order, shape (N, D), such as ColPali's 32 x 32. Zero vectors
            get relevance 0.
        questions: Vectors of the question, shape (M, D).
        height: Rows of the grid. None: the grid is square.

    Returns:
        The map for `DocPrune(relevance=...)`, shape (height, N / height), float32.

    Examples:
        >>> relevance_map(torch.rand(1024, 128), torch.rand(16, 128)).shape
        torch.Size([32, 32])
    """
    normalize = torch.nn.functional.normalize
    cosines = normalize(documents.float(), dim=1) @ normalize(questions.float(), dim=1).sum(0)
    return cosines.view(height or math.isqrt(len(cosines)), -1)
