# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Ge

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.units import UnitDropper, UnitInput

if TYPE_CHECKING:
    from torch import Tensor

_PAIRS = 2**26  # patch pairs compared at once (256 MiB)


@register("ipcv", site=Site.IN_ENCODER, paper="arXiv 2512.18747")
@dataclass(frozen=True)
class IPCV(UnitDropper):
    """Drop patches early in the vision tower and reconstruct them at its end (IPCV).

    A unit is the group of patches that becomes one visual token. The units that block `layer - 1` changes most are
    kept: `keep` of each image, or of each frame of a video. At the end of the tower, a dropped patch is restored from
    its old state, moved by the mean change of its nearest kept neighbours. The tower gets cheaper, but the language
    model sees all tokens. Combine it with another method to save decoder work, as in `patch(model, ["ipcv",
    "divprune"], ...)`. `towerdrop` with score="change" drops the same units and does not restore them.

    Args:
        layer: Index of the first block that runs on the kept units. The tower needs two more blocks.
        stabilise: Number of blocks in which attention still sees all patches and only the MLP skips the dropped ones.
            Each of these blocks starts with all patches restored.
        neighbours: Number of neighbours that restore a patch, by Euclidean distance of the inputs of block `layer`.

    Source:
        "IPCV: Information-Preserving Compression for MLLM Visual Encoders" (arXiv 2512.18747), the authors' code for
        Qwen2-VL and InternVL2. Only the first page of the paper was available.

    Differences from the paper:
        - Units are selected by the mean score of their patches, as required by the windows of Qwen2.5-VL and by patch
          mergers. The authors' code selects patches.
        - Budget and neighbours are per image, frame or tile, so images do not affect each other. The code ranks a whole
          batch.
        - `layer` may be 1.
        - Mergers inside the tower (deepstack in Qwen3-VL) receive all patches, restored in the same way.

    Examples:
        >>> model = tokenprune.patch(model, IPCV(layer=1, stabilise=1), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).encoder_tokens_per_layer
        [257, 257, 129, 129]
    """

    default_keep: ClassVar[float] = 0.35
    chooses_count: ClassVar[bool] = False
    removes: ClassVar[bool] = False

    layer: Annotated[int, Ge(1)] = 3
    stabilise: Annotated[int, Ge(0)] = 7
    neighbours: Annotated[int, Ge(1)] = 10

    @property
    def sees(self) -> UnitInput:
        return "change"

    def block(self, depth: int) -> int:
        self._check(
            self.layer + 2 <= depth,
            f"layer={self.layer} needs a vision tower with {self.layer + 2} blocks, but this tower has {depth}. "
            + (f"Pass layer=1 to {depth - 2}." if depth > 2 else "Use a method after the tower, such as divprune."),
        )
        return self.layer

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        score = pixels.mean(3)
        candidates = score.new_ones(1, score.numel(), dtype=torch.bool)
        count = to_device([max_units], score.device)
        return top_mask(score.view(1, -1), candidates, count, max_units).view(score.shape)

    def choose_guides(self, dropped: Tensor, kept: Tensor) -> Tensor:
        num_neighbours, parts = min(self.neighbours, len(kept)), dropped.split(max(1, _PAIRS // len(kept)))
        return torch.cat([torch.cdist(part, kept).topk(num_neighbours, largest=False).indices for part in parts])
