# SPDX-License-Identifier: Apache-2.0
"""The scoring head of `learned`, its inputs, and its file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from tokenprune.kernels.transfer import to_device
from tokenprune.methods.fitted import FittedFile
from tokenprune.selection.tokens import VisualTokens

if TYPE_CHECKING:
    from torch import Tensor

NUM_STATISTICS = 4  # row, column, logarithm of the norm, cosine to the mean of the image
_EPSILON = 1e-6
_LAYER = ("mean", "std", "hidden_weight", "hidden_bias", "out_weight")
_QUESTION = ("question_mean", "question_std", "question_weight")


def describe_tokens(tokens: VisualTokens) -> Tensor:
    """Return the inputs of the scoring head, float32, shape (S, N, D + 4): features and statistics of each token.

    Values that are not finite count as 0. Row and column are in [-1, 1], and 0 if the grid is not known.
    """
    x = tokens.hidden.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).masked_fill(~tokens.mask.unsqueeze(2), 0)
    norm = x.norm(dim=2, keepdim=True)
    mean = x.sum(1, keepdim=True) / to_device(tokens.counts, x.device).view(-1, 1, 1)
    cosine = (x * mean).sum(2, keepdim=True) / (norm * mean.norm(dim=2, keepdim=True) + _EPSILON)
    cells = tokens.segments.cache.get(("selector_cells",), lambda: _compute_cells(tokens))
    return torch.cat([x, cells.to(x.device), (norm + _EPSILON).log(), cosine], 2)


def _compute_cells(tokens: VisualTokens) -> Tensor:
    """Return row and column of each token in [-1, 1], float32, shape (S, N, 2)."""
    cells = torch.zeros(*tokens.mask.shape, 2, dtype=torch.float32, device="cpu")
    for cell, count, grid in zip(cells, tokens.counts, tokens.grids, strict=True):
        if grid is not None and math.prod(grid) == count:
            rows, columns = (torch.linspace(-1, 1, side, dtype=torch.float32, device="cpu") for side in grid[1:])
            pairs = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), 2).flatten(0, 1)
            cell[:count] = pairs.repeat(grid[0], 1)
    return cells.to(tokens.mask.device)


def describe_question(tokens: VisualTokens) -> Tensor:
    """Return the mean embedding of the text after each image, float32, shape (S, D). 0 without text."""
    text = tokens.text
    hidden = text.hidden.float().masked_fill(~text.mask.unsqueeze(2), 0)
    return hidden.sum(1) / text.mask.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, eq=False)
class Selector(FittedFile):
    """A scoring head with one hidden layer, fitted to one model.

    Attributes:
        weights: Tensors by name, float32: mean and standard deviation of the inputs, the weights of the hidden layer
            and of the output, and, if the question is used, of its embedding.
        model: `fingerprint` of the decoder.
    """

    kind: ClassVar[str] = "tokenprune selector"
    command: ClassVar[str] = "fit learned"

    weights: dict[str, Tensor]
    model: str

    def __str__(self) -> str:
        count, units = sum(weight.numel() for weight in self.weights.values()), len(self.weights["out_weight"])
        return (
            f"{count} weights; {units} hidden units; {'reads' if self.uses_question else 'does not read'} the question"
        )

    @property
    def uses_question(self) -> bool:
        return "question_weight" in self.weights

    @property
    def num_features(self) -> int:
        """Hidden size of the model."""
        return len(self.weights["mean"]) - NUM_STATISTICS

    def score(self, inputs: Tensor, question: Tensor | None) -> Tensor:
        """Return the logit of each token, float32, shape (S, N).

        Args:
            inputs: As returned by `describe_tokens`.
            question: As returned by `describe_question`. None if the question is not used.
        """
        weights = {name: weight.to(inputs.device) for name, weight in self.weights.items()}
        return compute_logits(weights, inputs, question)

    def pack(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        return self.weights, {}

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Self | None:
        if not _is_valid(tensors):
            return None
        return cls({name: tensor.float() for name, tensor in tensors.items()}, metadata["model"])


def _is_valid(tensors: dict[str, Tensor]) -> bool:
    """Return True if names, shapes and values are valid."""
    names = set(tensors)
    if names not in (set(_LAYER), {*_LAYER, *_QUESTION}) or tensors["hidden_weight"].ndim != 2:
        return False
    width, inputs = tensors["hidden_weight"].shape
    shapes = {
        "mean": (inputs,), "std": (inputs,), "hidden_weight": (width, inputs), "hidden_bias": (width,),
        "out_weight": (width,), "question_mean": (inputs - NUM_STATISTICS,),
        "question_std": (inputs - NUM_STATISTICS,), "question_weight": (width, inputs - NUM_STATISTICS),
    }  # fmt: skip
    return inputs > NUM_STATISTICS and all(
        tuple(tensor.shape) == shapes[name] and tensor.is_floating_point() and bool(tensor.isfinite().all())
        for name, tensor in tensors.items()
    )


def compute_logits(weights: dict[str, Tensor], inputs: Tensor, question: Tensor | None) -> Tensor:
    """Return the logit of each token, shape (S, N). See `Selector.score`."""
    scaled = ((inputs - weights["mean"]) / weights["std"]).clamp(-10, 10)
    hidden = torch.nn.functional.gelu(scaled @ weights["hidden_weight"].T + weights["hidden_bias"])
    out: Any = weights["out_weight"]
    if question is None or "question_weight" not in weights:
        return hidden @ out
    asked = ((question - weights["question_mean"]) / weights["question_std"]).clamp(-10, 10)
    per_unit = out + asked @ weights["question_weight"].T / math.sqrt(asked.shape[1])
    return (hidden * per_unit.unsqueeze(1)).sum(2)
