# SPDX-License-Identifier: Apache-2.0
"""Stage 2: train the projector to map each patch to the sum of the decoder's embeddings of its words.

The words come from the drawing's labels, which the tower has learned to predict. The decoder is frozen, and starts its
training with patches that resemble words. This takes two minutes.
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

PLACE, BACKGROUND = 0.3, 0.5  # scale of the position words and of the background word
NAMES = list(HEADS)


class Goals:
    """Target vectors of patches with given labels."""

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
        """Return targets, (B, patches, width), of labels (B, heads, patches), and a mask of labeled patches."""
        label = {name: labels[:, i].long() for i, name in enumerate(NAMES)}
        goal = (self.mean + self.place).expand(len(labels), -1, -1)
        for name, table in self.tables.items():
            label_of_patch = label[name]
            goal = goal + torch.where(
                (label_of_patch >= 0)[..., None], table[label_of_patch.clamp(min=0)], torch.zeros(())
            )
        shape = (label["centre"] == 1) & (label["sort"] > 0) & (label["sort"] <= len(SHAPES))
        goal = goal + torch.where(shape[..., None], self.many[(label["sort"] - 1).clamp(0, len(SHAPES) - 1)], 0.0)
        return goal, label["sort"] >= 0


def prepare(projector: nn.Module, features: torch.Tensor, mean: torch.Tensor) -> None:
    """Scale the untrained projector: normalize its input features, (n, width), and start outputs at the mean word."""
    first, second = projector.linear_1, projector.linear_2
    with torch.no_grad():
        nn.init.normal_(first.weight, std=features.shape[1] ** -0.5)
        first.weight /= features.std(0)
        first.bias.copy_(-first.weight @ features.mean(0))
        nn.init.normal_(second.weight, std=0.05 * second.in_features**-0.5)
        second.bias.copy_(mean)


def align(projector: nn.Module, goals: Goals, features: torch.Tensor, labels: torch.Tensor, steps: int) -> float:
    """Train the projector on features (B, patches, width). Return the unexplained share of the targets' variance.

    Half of the patches of each step show an item, even if such patches are rare.
    """
    goal, known = goals(labels)
    goal, features, front = goal[known], features[known], (labels[:, 0].long() > 0)[known]
    front, back = front.nonzero()[:, 0], (~front).nonzero()[:, 0]
    prepare(projector, features[:20000], goals.mean)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=2e-3)
    rng, unexplained = np.random.default_rng(0), 1.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 30) * max(0.03, 1 - step / steps)
        chosen = np.concatenate([rng.choice(len(front), 1536), rng.choice(len(back), 512) + len(front)])
        index = torch.cat([front, back])[torch.from_numpy(chosen)]
        spread = (goal[index] - goals.mean).pow(2).mean()
        loss = F.mse_loss(projector(features[index]), goal[index]) / spread
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        unexplained = loss.item() if step == 0 else 0.95 * unexplained + 0.05 * loss.item()
    return unexplained
