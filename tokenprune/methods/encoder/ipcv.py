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
from tokenprune.selection.sites.units import Sees, UnitDropper

if TYPE_CHECKING:
    from torch import Tensor

_PAIRS = 2**26  # of patches that are compared at once: 256 MiB


@register("ipcv", site=Site.IN_ENCODER, paper="arXiv 2512.18747")
@dataclass(frozen=True)
class IPCV(UnitDropper):
    """Drop units of patches at the input of an early block of the vision tower, and bring them back at its end: the
    tower gets cheaper, and the language model gets as many tokens as ever.

    A unit is what becomes one visual token. Those stay that the block before `layer` changed most, `keep` of each
    image, and of each frame of a video. A patch that left comes back as it was then, moved as far as its nearest
    neighbours among those that stayed were moved since, on average. So what the language model computes is saved by
    another method after it, as in `patch(model, ["ipcv", "divprune"], ...)`. `towerdrop` with score="change" drops the
    same way and brings nothing back.

    layer: index of the block at whose input units leave; the tower has to have two more.
    stabilise: for so many blocks all patches are attended to, and the MLP alone leaves out those that left: each of
    these blocks begins with all of them back.
    neighbours: int. How many bring a patch back, by the Euclidean distance of what enters block `layer`.

    Source: "IPCV: Information-Preserving Compression for MLLM Visual Encoders". The paper itself could not be read
    beyond its first page: the algorithm is that of the authors' code for Qwen2-VL and InternVL2.

    Differs from the authors' code: units are chosen, by the mean score of their patches, where that chooses patches,
    which Qwen2.5-VL's windows and what joins patches ask for; budget and neighbours are of one image, frame or tile,
    where that ranks a whole batch, so that no image depends on another; `layer` may be 1; and mergers inside the tower
    (deepstack of Qwen3-VL) get all patches, brought back in the same way.
    """

    default_keep: ClassVar[float] = 0.35
    chooses_count: ClassVar[bool] = False
    removes: ClassVar[bool] = False

    layer: Annotated[int, Ge(1)] = 3
    stabilise: Annotated[int, Ge(0)] = 7
    neighbours: Annotated[int, Ge(1)] = 10

    @property
    def sees(self) -> Sees:
        return "change"

    def block(self, depth: int) -> int:
        self._check(
            self.layer + 2 <= depth,
            f"layer={self.layer} takes a vision tower of {self.layer + 2} blocks, and this one has {depth}: "
            + (f"give layer=1 to {depth - 2}" if depth > 2 else "use a method after the tower, such as divprune"),
        )
        return self.layer

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        score = pixels.mean(3)
        chosen = score.new_ones(1, score.numel(), dtype=torch.bool)
        return top_mask(score.view(1, -1), chosen, to_device([most], score.device), most).view(score.shape)

    def choose_guides(self, gone: Tensor, kept: Tensor) -> Tensor:
        number, pieces = min(self.neighbours, len(kept)), gone.split(max(1, _PAIRS // len(kept)))
        return torch.cat([torch.cdist(one, kept).topk(number, largest=False).indices for one in pieces])
