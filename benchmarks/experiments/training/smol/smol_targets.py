# SPDX-License-Identifier: Apache-2.0
"""Stage 1: labels of every patch of 14 x 14 pixels, and the linear head that predicts them from the tower."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from native_scenes import NAMES, NativeScene
from tokenprune_demo.scenes import COLORS, LARGE, TINY, WORDS

PATCH, GRID = 14, 24
IGNORE = -100
SHAPES = (*LARGE, *TINY)
SORTS = ("background", *SHAPES, "digit", "sign", *NAMES, "bar")
LETTERS = sorted(set("".join(WORDS)))
HEADS = {"sort": len(SORTS), "colour": len(COLORS), "digit": 10, "word": len(WORDS), "centre": 2}
PLACES = {"row": GRID, "column": GRID}
WEIGHT = {"sort": 1.5, "centre": 0.7, "row": 0.3, "column": 0.3, "letters": 7.0, "present": 5.0}
_SORT, _COLOR = ({name: i for i, name in enumerate(names)} for names in (SORTS, COLORS))


def patch_labels(scene: NativeScene) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return labels (heads, patches), present sorts (sorts,), and shares of letters in the patches of signs.

    Patches at the edge of an item are not labeled. Letters are -1 outside signs.
    """
    n, size = len(scene.items), GRID * GRID
    cells = scene.owner.reshape(GRID, PATCH, GRID, PATCH).transpose(0, 2, 1, 3).reshape(size, -1).astype(np.int64)
    cells += np.arange(size)[:, None] * (n + 1)
    share = np.bincount(cells.ravel(), minlength=size * (n + 1)).reshape(size, n + 1)[:, 1:] / PATCH**2
    labels = np.full((len(HEADS), size), IGNORE, np.int16)
    present, letters = np.zeros(len(SORTS), np.float32), np.full((size, len(LETTERS)), -1, np.float32)
    labels[0] = labels[4] = 0
    if n:
        labels[0, share.max(1) > 0.03] = IGNORE
    for i, item in enumerate(scene.items):
        item_patches = ((share[:, i] > 0.35) | (share[:, i] >= 0.5 * share[:, i].max())) & (share.argmax(1) == i)
        sort = _SORT[item.value if item.what == "thing" else item.what]
        labels[0, item_patches] = sort
        present[sort] = 1
        x, y = item.center
        labels[4, min(int(y) // PATCH, GRID - 1) * GRID + min(int(x) // PATCH, GRID - 1)] = 1
        if item.what == "digit" and len(item.value) == 1:
            labels[2, item_patches] = int(item.value)
        elif item.what == "sign" and item.value in WORDS:
            labels[3, item_patches] = WORDS.index(item.value)
            _spell(letters, item)
        elif item.value in _COLOR:
            labels[1, item_patches] = _COLOR[item.value]
    return labels, present, letters


def _spell(letters: np.ndarray, item) -> None:
    x0, y0, x1, y1 = item.box
    start = np.arange(GRID) * PATCH
    rows = np.clip(np.minimum(start + PATCH, y1) - np.maximum(start, y0), 0, None) / (y1 - y0) > 0.2
    here = np.outer(rows, np.minimum(start + PATCH, x1) - np.maximum(start, x0) > 3).ravel()
    letters[here] = np.maximum(letters[here], 0)
    for letter, (a, b) in zip(item.value, item.letters, strict=True):
        wide = np.clip(np.minimum(start + PATCH, b) - np.maximum(start, a), 0, None) / max(b - a, 1)
        part, column = np.outer(rows, wide).ravel(), LETTERS.index(letter)
        letters[here, column] = np.maximum(letters[here, column], part[here])


class PatchHead(nn.Module):
    """Linear heads: labels, row and column of each patch, letters of signs, and present sorts from CLS."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.sizes = {**HEADS, **PLACES, "letters": len(LETTERS)}
        self.patch, self.cls = nn.Linear(width, sum(self.sizes.values())), nn.Linear(width, len(SORTS))

    def read(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each head's logits (batch x patches, classes) from the tower's output (batch, 1 + patches, width)."""
        parts = self.patch(hidden[:, 1:]).flatten(0, 1).split([*self.sizes.values()], -1)
        return dict(zip(self.sizes, parts, strict=True))

    def loss(self, hidden, labels, present, letters) -> torch.Tensor:
        """Return the sum of the heads' losses.

        Drawn items and background have equal weight for any number of patches.
        """
        out, parts = self.read(hidden), {}
        for i, name in enumerate(HEADS):
            target = labels[:, i].flatten().long()
            patch_losses = F.cross_entropy(out[name], target, ignore_index=IGNORE, reduction="none")
            front = target > 0 if name in ("sort", "centre") else target >= 0
            parts[name] = patch_losses[front].sum() / front.sum().clamp(min=1)
            if name in ("sort", "centre"):
                share = 0.75 if name == "sort" else 0.5
                parts[name] = share * parts[name] + (1 - share) * patch_losses[target == 0].mean()
        patch_index = torch.arange(GRID * GRID).repeat(len(hidden))
        parts["row"] = F.cross_entropy(out["row"], patch_index // GRID)
        parts["column"] = F.cross_entropy(out["column"], patch_index % GRID)
        letters = letters.flatten(0, 1)
        on = letters[:, 0] >= 0
        if on.any():
            parts["letters"] = F.binary_cross_entropy_with_logits(out["letters"][on], letters[on])
        parts["present"] = F.binary_cross_entropy_with_logits(self.cls(hidden[:, 0]), present)
        return sum(WEIGHT.get(name, 1.0) * part for name, part in parts.items())

    @torch.no_grad()
    def right(self, hidden, labels, present) -> dict[str, list[int]]:
        """Return the number of right and of all labels of each sort."""
        out, result = self.read(hidden), {}
        target = {name: labels[:, i].flatten().long() for i, name in enumerate(HEADS)}
        sort, large, tiny = target["sort"], 1 + len(LARGE), 1 + len(SHAPES)
        groups = {
            "background": ("sort", sort == 0),
            "large": ("sort", (sort > 0) & (sort < large)),
            "tiny": ("sort", (sort >= large) & (sort < tiny)),
            "text": ("sort", (sort >= tiny) & (sort < tiny + 2)),
            "thing": ("sort", sort >= tiny + 2),
            **{name: (name, target[name] >= 0) for name in ("colour", "digit", "word")},
            "centre": ("centre", target["centre"] == 1),
        }
        for name, (key, here) in groups.items():
            result[name] = [int((out[key].argmax(-1) == target[key])[here].sum()), int(here.sum())]
        present_mask = present > 0
        result["present"] = [int((self.cls(hidden[:, 0]) > 0)[present_mask].sum()), int(present_mask.sum())]
        return result
