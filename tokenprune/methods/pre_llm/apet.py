# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import plan_cuts
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import match_selected
from tokenprune.kernels.pairs import is_finite
from tokenprune.kernels.picks import Picks
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_RIDGE = 1e-5  # absolute, as in the authors' code
_EXACT = 2.0**-16  # relative error that counts as rounding


@register("apet", site=Site.PRE_LLM, paper="arXiv 2602.19870, CVPR 2026", merges=True)
@dataclass(frozen=True)
class ApET(Pruner):
    """Keep a few basis tokens and the tokens they approximate worst, and merge the rest into them.

    The basis starts with the token of largest norm. Each further basis token is the token farthest from all earlier
    basis tokens. Every token is approximated by a linear combination of the basis, and the tokens with the largest
    error are kept. Basis tokens have zero error, so they replace the kept tokens with the smallest error. Every dropped
    token is merged into the most similar kept token by cosine, which becomes the mean of its group.

    Args:
        basis: Number of basis tokens, at most one less than the number of kept tokens.
        own: Weight in [0, 1) of the kept token that a basis token replaces. The authors use 0 for LLaVA and 0.5 for
            Qwen2.5-VL.
        features: "projected" compares tokens at the input of the language model. "tower" compares the tower's output
            before the projector; tokens without tower output are dropped first and are never merged.
        inner: Cut a second time, by the hidden states at the middle decoder layer. The first cut then keeps three times
            as many tokens as the second, and `keep` is an average over layers.

    Source:
        "ApET: Approximation-Error Guided Token Compression for Efficient VLMs" (arXiv 2602.19870), from the authors'
        code. The text of the paper was not read.

    Differences from the paper:
        - The first basis token has the largest norm. The authors draw it at random, so two runs differ.
        - A basis token is not merged into another token as well, and a basis token that is kept for its error keeps its
          index.
        - Tokens are merged after the projector. "projected" also compares them there, as the authors do on Qwen2.5-VL.
        - The tiles of an image share one basis.
        - Kept tokens keep their positions in the prompt.
        - The basis is always smaller than the number of kept tokens. The authors' code fails otherwise.

    Examples:
        >>> model = tokenprune.patch(model, ApET(basis=5), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"features": "projected"}

    basis: Annotated[int, Ge(1)] = 10
    own: Annotated[float, Ge(0), Lt(1)] = 0.0
    features: Literal["projected", "tower"] = "projected"
    inner: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_features"} if self.features == "tower" else set())

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if not self.inner:
            return [(self, budget)]
        early, late = plan_cuts(layers, ((0, 3.0), (0.5, 1.0)), budget)
        first = dataclasses.replace(self, inner=False)
        return [(first, early.budget), (_InnerApET(basis=self.basis, own=self.own, layer=late.layer), late.budget)]

    def select(self, tokens: VisualTokens) -> Selection:
        max_tokens, mask = max(tokens.keep), tokens.mask
        x = (tokens.encoder_features if self.features == "tower" else tokens.hidden).float()
        x = x.masked_fill(~(mask & is_finite(x)).unsqueeze(2), 0)
        num_basis = [min(self.basis, keep - 1) for keep in tokens.keep]
        basis, is_basis = pick_farthest_points(x, mask, num_basis)
        error = compute_approximation_error(x, gather_tokens(x, basis, 1).masked_fill(~is_basis.unsqueeze(2), 0))
        keep = top_mask(error, mask, tokens.budget, max_tokens)
        worst = top_mask(error, mask, tokens.budget - is_basis.sum(1), max_tokens)
        joins = mask & ~keep & x.any(2)
        itself = torch.arange(keep.shape[1], device=keep.device)
        assign = torch.where(keep, itself, torch.where(joins, match_selected(x, worst, max_tokens), -1))
        return self._swap_in_basis(keep, assign, basis, is_basis, keep & ~worst, tokens.keep)

    def _swap_in_basis(
        self,
        keep: torch.Tensor,
        assign: torch.Tensor,
        basis: torch.Tensor,
        is_basis: torch.Tensor,
        free: torch.Tensor,
        counts: list[int],
    ) -> Selection:
        """Swap each dropped basis token with one of the `free` kept tokens, in order, and return the selection.

        Args:
            keep: Kept tokens, bool (S, N).
            assign: Target of each token as in `Selection`, (S, N).
            basis: Index of each basis token, (S, k).
            is_basis: Valid entries of `basis`, bool (S, k).
            free: Kept tokens that basis tokens may replace, bool (S, N).
            counts: Number of kept tokens of each segment.
        """
        end = keep.shape[1]
        padded = torch.nn.functional.pad(torch.zeros_like(keep), (0, 1))
        holds_basis = padded.scatter(1, torch.where(is_basis, basis, end), True)[:, :-1]
        moves = is_basis & ~keep.gather(1, basis)
        freed = partition(free & ~holds_basis)[:, : basis.shape[1]]
        destination = freed.gather(1, (moves.cumsum(1) - 1).clamp(min=0))
        source, target = torch.where(moves, basis, end), torch.where(moves, destination, end)
        assign = torch.nn.functional.pad(assign, (0, 1)).scatter(1, source, destination)[:, :-1]
        weight = torch.ones(padded.shape, dtype=torch.float32, device=keep.device)
        weight = weight.scatter(1, target, self.own).scatter(1, source, 1 - self.own)
        return Selection(keep, assign, weight[:, :-1], counts=counts)


def pick_farthest_points(
    x: torch.Tensor, mask: torch.Tensor, num_points: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick points by farthest point sampling, starting with the largest norm. Ties go to the lower index.

    Args:
        x: Finite tokens, float32 (S, N, D).
        mask: Valid tokens, bool (S, N).
        num_points: Number of points of each segment.

    Returns:
        Token indices, long (S, k), and the valid entries, bool (S, k). k is the largest number of points.
    """
    picks, score, points = Picks(mask), x.norm(dim=2), []
    for step in range(max(1, *num_points)):
        pick = picks.take_best(picks.mask_taken(score))
        distance = (x - gather_tokens(x, pick[:, None], 1)).square().sum(2)
        score = torch.minimum(score, distance) if step else distance
        points.append(pick)
    order = torch.arange(len(points), device=x.device)
    return torch.stack(points, 1), order < to_device(num_points, x.device)[:, None]


def compute_approximation_error(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return the distance of each token to the span of the basis by ridge regression, float32 (S, N).

    Errors below the rounding error are set to 0. Zero rows of the basis are ignored.

    Args:
        x: Tokens, float32 (S, N, D).
        basis: Basis tokens, float32 (S, k, D).
    """
    basis64 = basis.double()
    gram = basis64 @ basis64.transpose(1, 2)
    # The share of the trace keeps the matrix positive definite despite rounding.
    ridge = _RIDGE + 1e-12 * gram.diagonal(dim1=1, dim2=2).sum(1)
    gram = gram + ridge[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    # Rows of about unit length keep the float32 products accurate even if basis tokens are nearly equal.
    factor = torch.linalg.cholesky_ex(gram).L
    rows = torch.linalg.solve_triangular(factor, basis64, upper=False).float()
    error = torch.baddbmm(x, x @ rows.transpose(1, 2), rows, alpha=-1).norm(dim=2)
    return error.masked_fill(error < _EXACT * x.norm(dim=2), 0)


@dataclass(frozen=True)
class _InnerApET(ApET):
    """Second cut of `ApET`, by the hidden states at the input of decoder layer `layer`."""

    site: ClassVar[Site] = Site.IN_LLM

    layer: int = 1
