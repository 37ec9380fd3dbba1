# SPDX-License-Identifier: Apache-2.0
"""Stage 1: labels of each visual token (a cell of 16 x 16 pixels) as words of the language model."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from native_scenes import MANY, NAMES, NativeScene
from qwen_model import CELL
from qwen_vocabulary import ID
from tokenprune_demo.scenes import COLORS, LARGE, TINY, WORDS

IGNORE = -100
SORTS = ("background", *LARGE, *TINY, "digit", "sign", *NAMES)
LETTERS = sorted(set("".join(WORDS)))
GROUPS = {  # candidate words of each label
    "sort": [ID[w] for w in SORTS],
    "colour": [ID[w] for w in COLORS],
    "digit": [ID[str(d)] for d in range(10)],
    "word": [ID[w] for w in WORDS],
    "many": [ID[MANY[w]] for w in (*LARGE, *TINY)],
}
LABELS = (*GROUPS, "centre")
_COLOR = {c: i for i, c in enumerate(COLORS)}
_SORT = {c: i for i, c in enumerate(SORTS)}
_MANY = {c: i for i, c in enumerate((*LARGE, *TINY))}


def cell_labels(scene: NativeScene) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, int16, shape (labels, cells), and shares of letters in cells of signs, shape (cells, letters)."""
    height, width = scene.owner.shape
    h, w, n = height // CELL, width // CELL, len(scene.items)
    cells = scene.owner.reshape(h, CELL, w, CELL).transpose(0, 2, 1, 3).reshape(h * w, -1).astype(np.int64)
    cells += np.arange(h * w)[:, None] * (n + 1)
    share = np.bincount(cells.ravel(), minlength=h * w * (n + 1)).reshape(h * w, n + 1)[:, 1:] / CELL**2
    labels = np.full((len(LABELS), h * w), IGNORE, np.int16)
    letters = np.full((h * w, len(LETTERS)), -1, np.float32)
    labels[0] = labels[5] = 0
    if n:
        labels[0, share.max(1) > 0.03] = IGNORE
        best = share.argmax(1)
    for i, item in enumerate(scene.items):
        largest = share[:, i].max()
        item_cells = ((share[:, i] > 0.35) | (share[:, i] >= 0.5 * largest)) & (best == i)
        labels[0, item_cells] = _SORT[item.value if item.what == "thing" else item.what]
        x, y = item.center
        centre = min(int(y) // CELL, h - 1) * w + min(int(x) // CELL, w - 1)
        labels[5, centre] = 1
        if item.what == "digit":
            labels[2, item_cells] = int(item.value)
        elif item.what == "sign":
            labels[3, item_cells] = WORDS.index(item.value)
            _spell(letters, item, h, w)
        elif item.what != "thing":
            labels[1, item_cells] = _COLOR[item.value]
            labels[4, centre] = _MANY[item.what]
    return labels, letters


def _spell(letters: np.ndarray, item, h: int, w: int) -> None:
    x0, y0, x1, y1 = item.box
    top, left = np.arange(h) * CELL, np.arange(w) * CELL
    rows = np.clip(np.minimum(top + CELL, y1) - np.maximum(top, y0), 0, None) / (y1 - y0) > 0.25
    here = np.outer(rows, np.minimum(left + CELL, x1) - np.maximum(left, x0) > 3).ravel()
    letters[here] = np.maximum(letters[here], 0)
    for letter, (a, b) in zip(item.value, item.letters, strict=True):
        wide = np.clip(np.minimum(left + CELL, b) - np.maximum(left, a), 0, None) / max(b - a, 1)
        part = np.outer(rows, wide).ravel()
        column = LETTERS.index(letter)
        letters[here, column] = np.maximum(letters[here, column], part[here])


class CellHead(nn.Module):
    """Predict labels from visual tokens: words by the embedding table, centers and letters by a linear layer."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 + len(LETTERS))

    def logits(self, tokens: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = tokens.flatten(0, 1)
        tokens = F.rms_norm(tokens, tokens.shape[-1:])
        word_logits, extra = tokens @ table.T, self.linear(tokens)
        out = {name: word_logits[:, rows] for name, rows in GROUPS.items()}
        return out | {"centre": extra[:, :2], "letters": extra[:, 2:]}

    def loss(self, out, labels: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses. Drawn items and background have equal weight for any number of cells."""
        total = 0.0
        for i, name in enumerate(LABELS):
            target = labels[:, i].flatten().long()
            cell_losses = F.cross_entropy(out[name], target, ignore_index=IGNORE, reduction="none")
            front = target > 0 if name in ("sort", "centre") else target >= 0
            part = cell_losses[front].sum() / front.sum().clamp(min=1)
            if name in ("sort", "centre"):
                share = 0.75 if name == "sort" else 0.5
                part = share * part + (1 - share) * cell_losses[target == 0].mean()
            total = total + part * (1.5 if name == "sort" else 1.0)
        letters = letters.flatten(0, 1)
        on = letters[:, 0] >= 0
        if on.any():
            total = total + 7 * F.binary_cross_entropy_with_logits(out["letters"][on], letters[on])
        return total

    @torch.no_grad()
    def accuracy(self, out, labels: torch.Tensor) -> dict[str, list[int]]:
        """Return the number of right and of all labels for each sort of cell."""
        guess = {name: out[name].argmax(-1) for name in LABELS}
        target = {name: labels[:, i].flatten().long() for i, name in enumerate(LABELS)}
        sort, large, tiny = target["sort"], 1 + len(LARGE), 1 + len(LARGE) + len(TINY)
        is_large, is_tiny = (sort > 0) & (sort < large), (sort >= large) & (sort < tiny)
        selections = {
            "background": ("sort", sort == 0),
            "large": ("sort", is_large),
            "tiny": ("sort", is_tiny),
            "thing": ("sort", sort >= tiny + 2),
            "large colour": ("colour", is_large & (target["colour"] >= 0)),
            "tiny colour": ("colour", is_tiny & (target["colour"] >= 0)),
            "digit": ("digit", target["digit"] >= 0),
            "word": ("word", target["word"] >= 0),
            "many": ("many", target["many"] >= 0),
            "centre": ("centre", target["centre"] == 1),
        }
        return {
            name: [int((guess[key] == target[key])[here].sum()), int(here.sum())]
            for name, (key, here) in selections.items()
        }
