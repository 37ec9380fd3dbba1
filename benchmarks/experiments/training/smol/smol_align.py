# SPDX-License-Identifier: Apache-2.0
"""Stage 2: the projector gives each patch the sum of the decoder's own vectors of the words that describe it.

The words are those of the drawing's labels, which the tower has learned to tell; so the decoder, frozen here, begins
with patches that look like words to it. Two minutes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from native_scenes import MANY
from smol_decoder import Words
from smol_targets import GRID, HEADS, SHAPES, SORTS
from tokenprune_demo.scenes import COLORS, WORDS

PLACE, BACKGROUND = 0.3, 0.5  # how loudly a patch says where it is, and that it shows nothing
NAMES = list(HEADS)


class Goals:
    """The vectors that patches with given labels should have."""

    def __init__(self, words: Words) -> None:
        self.mean = words.mean
        self.tables = {
            "sort": words.stack(SORTS),
            "colour": words.stack(list(COLORS)),
            "digit": words.stack([str(d) for d in range(10)]),
            "word": words.stack(WORDS),
        }
        self.tables["sort"][0] *= BACKGROUND
        self.many = words.stack([MANY[shape] for shape in SHAPES])
        sides = words.stack(("top", "bottom", "left", "right"))
        cell = torch.arange(GRID * GRID)
        half = GRID // 2
        self.place = PLACE * (sides[(cell // GRID >= half).long()] + sides[2 + (cell % GRID >= half).long()])

    def __call__(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return goals [B, patch, width] of labels [B, head, patch], and which patches have one [B, patch]."""
        label = {name: labels[:, i].long() for i, name in enumerate(NAMES)}
        goal = (self.mean + self.place).expand(len(labels), -1, -1)
        for name, table in self.tables.items():
            here = label[name]
            goal = goal + torch.where((here >= 0)[..., None], table[here.clamp(min=0)], torch.zeros(()))
        shape = (label["centre"] == 1) & (label["sort"] > 0) & (label["sort"] <= len(SHAPES))
        goal = goal + torch.where(shape[..., None], self.many[(label["sort"] - 1).clamp(0, len(SHAPES) - 1)], 0.0)
        return goal, label["sort"] >= 0


def prepare(projector: nn.Module, features: torch.Tensor, mean: torch.Tensor) -> None:
    """Scale the untrained projector: features [n, width] enter with one variance, outputs begin at the mean word."""
    first, second = projector.linear_1, projector.linear_2
    with torch.no_grad():
        nn.init.normal_(first.weight, std=features.shape[1] ** -0.5)
        first.weight /= features.std(0)
        first.bias.copy_(-first.weight @ features.mean(0))
        nn.init.normal_(second.weight, std=0.05 * second.in_features**-0.5)
        second.bias.copy_(mean)


def align(projector: nn.Module, goals: Goals, features: torch.Tensor, labels: torch.Tensor, steps: int) -> float:
    """Train the projector on features [B, patch, width]; return the share of the goals' variance left unexplained.

    Half of each step's patches show something, however few do.
    """
    goal, known = goals(labels)
    goal, features, front = goal[known], features[known], (labels[:, 0].long() > 0)[known]
    front, back = front.nonzero()[:, 0], (~front).nonzero()[:, 0]
    prepare(projector, features[:20000], goals.mean)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=2e-3)
    rng, left = np.random.default_rng(0), 1.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 30) * max(0.03, 1 - step / steps)
        chosen = np.concatenate([rng.choice(len(front), 1536), rng.choice(len(back), 512) + len(front)])
        index = torch.cat([front, back])[torch.from_numpy(chosen)]
        spread = (goal[index] - goals.mean).pow(2).mean()
        loss = F.mse_loss(projector(features[index]), goal[index]) / spread
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        left = loss.item() if step == 0 else 0.95 * left + 0.05 * loss.item()
    return left
