# SPDX-License-Identifier: Apache-2.0
"""Merging inside the towers of models that crop tiles behind them, and set rows apart by newlines (LLaVA-NeXT,
LLaVA-OneVision).

A budget is for an image as the decoder sees it: its newlines, which stay, and the patches of all its tiles that are not
cropped. Which these are follows from the image's size alone, so it is known before the tower runs: the model's own
packing is tried on numbers. The rest is shared out over the tiles in proportion to their patches. Patches that are
cropped merge among themselves, so that they change no count.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from tokenprune.budget import Budget
from tokenprune.errors import BudgetError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.merging import EncoderPatch
from tokenprune.integrations.shared.apart import Apart, Plan
from tokenprune.integrations.shared.attachable import states
from tokenprune.integrations.shared.packed_features import PackedFeatures, newline_number, numbered
from tokenprune.ops.merging import most
from tokenprune.sites.encoder import EncoderMethod


class _Key:
    """Under which a thread keeps the goals of the images that it encodes."""


class TilePatch(EncoderPatch):
    """Merges in the tower so that each image, of however many tiles, is left with what the budget says.

    Raises what `EncoderPatch` does, and BudgetError where a budget leaves no patch of a tile beside the newlines.
    """

    shows = False  # newlines stand between its tokens, and tiles overlap

    def __init__(self, adapter: Adapter, method: EncoderMethod, budget: Budget) -> None:
        self.exact = method.inexact is None  # else how many tokens are left is the method's own affair
        super().__init__(adapter, method, budget)
        self.key = _Key()

    @property
    def uneven(self) -> bool:
        return self.exact or super().uneven

    def before_encode(self, modality: str, arguments: dict[str, Any]) -> None:
        states().pop(self.key, None)
        if modality == "image" and self.exact and arguments.get("image_sizes") is not None:
            packed = pack_numbers(self.adapter, arguments, self.shape.patches)
            states()[self.key] = [tile for image in packed.images for tile in self._goals(packed, image)]

    def _goals(self, packed: PackedFeatures, image: Tensor) -> list[tuple[Tensor, list[int]]]:
        """Return for each tile of an image which of its patches are cropped, and how many of those that are not, and of
        those that are, are to be left. image: the image's numbers."""
        ids = packed.numbers(image)
        patches = ids[ids >= 0]
        first, last = int(patches.min()) // packed.tokens, int(patches.max()) // packed.tokens
        shown = torch.zeros(last + 1 - first, packed.tokens, dtype=torch.bool)
        shown.view(-1)[patches - first * packed.tokens] = True
        counts = shown.sum(1).tolist()
        wanted = self.budget.resolve_keep(len(ids)) - int((ids < 0).sum())
        if wanted < sum(map(bool, counts)):
            raise BudgetError(
                f"{self.method.name}: {self.budget.short()} of an image of {len(ids)} tokens leaves {max(0, wanted)} "
                f"beside its {len(ids) - sum(counts)} newlines, and each of its {sum(map(bool, counts))} tiles needs "
                "one: keep more"
            )
        shares = share_out(wanted, counts)
        return [
            (~row, [share, self._cropped(packed.tokens - count, wanted / sum(counts))])
            for row, count, share in zip(shown, counts, shares, strict=True)
        ]

    def _cropped(self, count: int, share: float) -> int:
        """Return how many of a tile's cropped patches to leave: the share of the others, or as near as halving blocks
        come."""
        least = count
        for _ in range(self.shape.read):
            least -= most(least)
        return max(least, round(share * count))

    def plan_of(self, rows: int, count: int) -> Plan:
        goals = states().pop(self.key, None)
        if goals is None or len(goals) != rows or count != self.shape.tokens:
            return super().plan_of(rows, count)
        cropped = torch.stack([row for row, _ in goals]).long()
        apart = Apart(cropped, self.shape.protected, [wanted for _, wanted in goals], self._plan_of_part)
        return apart.plan(len(self.blocks))

    def _plan_of_part(self, patches: int, wanted: int) -> Plan:
        return self.method.plan(self.budget, self.shape.of(patches + self.shape.protected, wanted))


def share_out(total: int, counts: list[int]) -> list[int]:
    """Share `total` out in proportion to `counts`: at least 1 to each that is not 0, at most as much as there is."""
    shares = [min(count, max(1, total * count // sum(counts))) if count else 0 for count in counts]
    while (missing := total - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        can = [i for i, (share, count) in enumerate(zip(shares, counts, strict=True)) if 1 <= share + step <= count]
        if not can:
            break
        # The one whose share is furthest from its proportion.
        best = max(can, key=lambda i: step * (total * counts[i] / sum(counts) - shares[i]))
        shares[best] += step
    return shares


def pack_numbers(adapter: Adapter, arguments: dict[str, Any], tokens: int) -> PackedFeatures:
    """Return how the model will pack the features of the images that `get_image_features` is called with. tokens:
    features of a tile."""
    base, sizes = adapter.base, torch.as_tensor(arguments["image_sizes"]).cpu()
    numbers, start = [], 0
    for tiles in tiles_of(adapter, arguments, sizes):
        numbers.append(numbered(tiles, tokens, torch.device("cpu"), start))
        start += tiles * tokens
    given = {"image_features": numbers, "image_sizes": sizes, "image_newline": None}
    if base.image_newline is not None:
        given["image_newline"] = newline_number(numbers[0].device)
    for name in ("vision_feature_select_strategy", "vision_aspect_ratio"):
        if hasattr(adapter.config, name):
            asked = arguments.get(name)
            given[name] = getattr(adapter.config, name) if asked is None else asked
    pack = type(base).pack_image_features
    known = inspect.signature(pack).parameters
    given = {name: value for name, value in given.items() if name in known}
    return PackedFeatures(list(pack(base, **given)[0]), tokens)


def tiles_of(adapter: Adapter, arguments: dict[str, Any], sizes: Tensor) -> list[int]:
    """Return how many tiles each image is cut into, of sizes long `[images, 2]` on the host."""
    config = adapter.config
    in_row = arguments.get("batch_num_images")
    # LLaVA-OneVision cuts an image into tiles only where it is the only one of its prompt.
    in_row = [1] * len(sizes) if in_row is None else torch.as_tensor(in_row).tolist()
    alone = [count == 1 for count in in_row for _ in range(count)]
    # The model's own function; FSDP and the like put classes of their own before the model's.
    modules = (sys.modules.get(cls.__module__) for cls in type(adapter.base).__mro__)
    number = next(filter(None, (getattr(module, "image_size_to_num_patches", None) for module in modules)))
    side = config.vision_config.image_size
    return [
        number(size, config.image_grid_pinpoints, side) if cut else 1
        for size, cut in zip(sizes.tolist(), alone, strict=True)
    ]
