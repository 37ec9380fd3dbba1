# SPDX-License-Identifier: Apache-2.0
"""Stage 1: labels of each patch for the vision tower, and the linear head that predicts them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from demo_model import GRID, PATCH
from tokenprune_demo.scenes import COLORS, LARGE, TINY, WORDS, Scene

THINGS = ("background", *LARGE, *TINY, "digit", "sign")
SHAPES = (*LARGE, *TINY)
HEADS = {"thing": len(THINGS), "colour": 1 + len(COLORS), "digit": 10, "word": len(WORDS), "centre": 2}
WEIGHT = {"row": 0.3, "column": 0.3, "digit": 1.5, "word": 1.5, "letters": 0.5}
LETTERS = sorted(set("".join(WORDS)))
IGNORE = -100


def letter_labels(scene: Scene) -> np.ndarray:
    """Return the share of each letter in each patch of a sign, shape (patches, letters); -1 outside signs."""
    labels, start = np.full((GRID, GRID, len(LETTERS)), -1, np.float32), np.arange(GRID) * PATCH
    for item in scene.items:
        if item.what != "sign":
            continue
        x0, y0, x1, y1 = item.box
        rows = np.clip(np.minimum(start + PATCH, y1) - np.maximum(start, y0), 0, None) / (y1 - y0)
        columns = np.clip(np.minimum(start + PATCH, x1) - np.maximum(start, x0), 0, None)
        here = np.outer(rows > 0.2, columns > 3)
        labels[here] = np.maximum(labels[here], 0)
        for letter, (left, right) in zip(item.value, item.letters, strict=True):
            wide = np.clip(np.minimum(start + PATCH, right) - np.maximum(start, left), 0, None) / (right - left)
            part = labels[:, :, LETTERS.index(letter)]
            part[here] = np.maximum(part, np.outer(rows > 0.2, wide))[here]
    return labels.reshape(GRID * GRID, -1)


def patch_labels(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, shape (heads, patches), and the present shapes. Patches at the edge of an item are ignored."""
    cover = scene.owner.reshape(GRID, PATCH, GRID, PATCH).transpose(0, 2, 1, 3).reshape(GRID * GRID, -1)
    labels = np.full((len(HEADS), GRID * GRID), IGNORE, np.int64)
    labels[:2] = 0
    labels[4] = 0
    shares = np.stack([(cover == i + 1).mean(1) for i in range(len(scene.items))])
    labels[:2, shares.max(0) > 0.04] = IGNORE
    colors = list(COLORS)
    for item, share in zip(scene.items, shares, strict=True):
        item_patches = share > 0.35
        item_patches[share.argmax()] = True
        labels[0, item_patches] = THINGS.index(item.what)
        labels[1, item_patches] = 0
        if item.what == "digit":
            labels[2, item_patches] = int(item.value)
        elif item.what == "sign":
            labels[3, item_patches] = WORDS.index(item.value)
        else:
            labels[1, item_patches] = 1 + colors.index(item.value)
            x, y = item.center
            labels[4, int(y) // PATCH * GRID + int(x) // PATCH] = 1
    present = {item.what for item in scene.items}
    return labels, np.array([kind in present for kind in SHAPES], np.float32)


class PatchHead(nn.Module):
    """Linear heads: item, color, digit, word, center, row and column per patch, and present shapes from CLS."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.patch = nn.Linear(width, sum(HEADS.values()) + 2 * GRID)
        self.cls = nn.Linear(width, len(SHAPES))
        self.letters = nn.Linear(width, len(LETTERS))

    def forward(self, hidden: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        parts = self.patch(hidden[:, 1:]).split([*HEADS.values(), GRID, GRID], dim=-1)
        return dict(zip((*HEADS, "row", "column"), parts, strict=True)), self.cls(hidden[:, 0])

    def loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, present: torch.Tensor, letters: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the heads' losses. Items and background have equal weight for any number of patches."""
        out, cls = self(hidden)
        parts = {}
        for i, name in enumerate(HEADS):
            target = labels[:, i].flatten()
            patch_losses = F.cross_entropy(out[name].flatten(0, 1), target, ignore_index=IGNORE, reduction="none")
            if name in ("digit", "word"):
                parts[name] = patch_losses.sum() / (target >= 0).sum().clamp(min=1)
            else:
                front, back = target > 0, target == 0
                weight = 0.7 if name != "centre" else 0.5
                front_mean = patch_losses[front].sum() / front.sum().clamp(min=1)
                parts[name] = weight * front_mean + (1 - weight) * patch_losses[back].mean()
        patch_index = torch.arange(GRID * GRID)
        for name, target in (("row", patch_index // GRID), ("column", patch_index % GRID)):
            parts[name] = F.cross_entropy(out[name].flatten(0, 1), target.repeat(len(hidden)))
        parts["cls"] = F.binary_cross_entropy_with_logits(cls, present)
        on_sign = letters[..., 0] >= 0
        spelled = self.letters(hidden[:, 1:][on_sign])
        parts["letters"] = len(LETTERS) * F.binary_cross_entropy_with_logits(spelled, letters[on_sign])
        return sum(WEIGHT.get(name, 1.0) * part for name, part in parts.items())

    @torch.no_grad()
    def accuracy(self, hidden: torch.Tensor, labels: torch.Tensor, present: torch.Tensor) -> dict[str, float]:
        """Return the share of correctly predicted patches for each head and each sort of item."""
        out, cls = self(hidden)
        guess = {name: logits.argmax(-1) for name, logits in out.items()}
        thing, result = labels[:, 0], {}

        def share(name: str, key: str, index: int, where: torch.Tensor) -> None:
            if where.any():
                result[name] = round((guess[key] == labels[:, index])[where].float().mean().item(), 3)

        n = len(LARGE)
        share("background", "thing", 0, thing == 0)
        share("large shape", "thing", 0, (thing > 0) & (thing <= n))
        share("tiny shape", "thing", 0, (thing > n) & (thing <= n + len(TINY)))
        share("large colour", "colour", 1, (thing > 0) & (thing <= n))
        share("tiny colour", "colour", 1, (thing > n) & (thing <= n + len(TINY)))
        share("digit", "digit", 2, labels[:, 2] >= 0)
        share("word", "word", 3, labels[:, 3] >= 0)
        share("centre", "centre", 4, labels[:, 4] == 1)
        where = torch.arange(GRID * GRID)
        result["row"] = round((guess["row"] == where // GRID).float().mean().item(), 3)
        result["column"] = round((guess["column"] == where % GRID).float().mean().item(), 3)
        result["cls"] = round(((cls > 0) == (present > 0)).float().mean().item(), 3)
        return result
