# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import profile
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import finite
from tokenprune.kernels.picks import Picks
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_RIDGE = 1e-5  # absolute, as in the authors' code
_EXACT = 2.0**-16  # of a token's length: an error below it is rounding


@register("apet", site=Site.PRE_LLM, paper="arXiv 2602.19870, CVPR 2026", merges=True)
@dataclass(frozen=True)
class ApET(Pruner):
    """Keep the tokens that a few basis tokens approximate worst, and these few, and merge the rest into them (ApET).

    The basis is the token of largest norm, then again and again the one farthest from all of it. Each token is
    approximated by a linear combination of the basis; those of the largest error stay. The basis itself has none, so
    its tokens take the places of as many of the kept ones with the smallest error. Each other token joins the most
    similar one, by cosine, of those that stay for their error, which becomes the mean of all that join it.

    basis: int >= 1, how many tokens; one less than stay, where that is fewer.
    own: weight in [0, 1) of the token whose place a basis token takes, in what stands there then: 0 is the authors' for
    LLaVA, 0.5 for Qwen2.5-VL.
    features: what tokens are compared by, "projected" for the tokens as they enter the language model, "tower" for what
    the vision tower makes of each patch before the projector; what is no patch then goes first, and joins nothing.
    inner: True cuts once more, by the hidden states at the middle of the decoder's layers: three times as many stay
    before it as after it, and `keep` is an average over the layers.

    Source: "ApET: Approximation-Error Guided Token Compression for Efficient VLMs", the authors' code.

    Differs from the paper: it starts from the token of largest norm (theirs from one drawn at random, so that two runs
    differ); a basis token is not merged into another place as well, and one that stays for its error keeps its place;
    tokens merge after the projector, and "projected" compares them there, as theirs do on Qwen2.5-VL; tiles of an
    image have one basis; tokens keep their positions of the full prompt. That there are fewer basis tokens than tokens
    to keep is ours (the code fails there). The paper's text was not read.
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
        early, late = profile(layers, ((0, 3.0), (0.5, 1.0)), budget)
        first = dataclasses.replace(self, inner=False)
        return [(first, early.budget), (_InnerApET(basis=self.basis, own=self.own, layer=late.layer), late.budget)]

    def select(self, tokens: VisualTokens) -> Selection:
        most, mask = max(tokens.keep), tokens.mask
        x = (tokens.encoder_features if self.features == "tower" else tokens.hidden).float()
        x = x.masked_fill(~(mask & finite(x)).unsqueeze(2), 0)
        number = [min(self.basis, keep - 1) for keep in tokens.keep]
        basis, real = pick_farthest_points(x, mask, number)
        error = compute_approximation_error(x, gather_tokens(x, basis, 1).masked_fill(~real.unsqueeze(2), 0))
        keep = top_mask(error, mask, tokens.budget, most)
        worst = top_mask(error, mask, tokens.budget - real.sum(1), most)
        joins = mask & ~keep & x.any(2)
        itself = torch.arange(keep.shape[1], device=keep.device)
        assign = torch.where(keep, itself, torch.where(joins, _find_most_similar(x, worst, most), -1))
        return self._with_basis(keep, assign, basis, real, keep & ~worst, tokens.keep)

    def _with_basis(
        self,
        keep: torch.Tensor,
        assign: torch.Tensor,
        basis: torch.Tensor,
        real: torch.Tensor,
        places: torch.Tensor,
        counts: list[int],
    ) -> Selection:
        """Return the selection once each basis token that is not kept takes one of `places`, bool `[S, N]`, in order;
        none is taken where a basis token stands."""
        nowhere = keep.shape[1]
        marked = torch.nn.functional.pad(torch.zeros_like(keep), (0, 1))
        stands = marked.scatter(1, torch.where(real, basis, nowhere), True)[:, :-1]
        moves = real & ~keep.gather(1, basis)
        place = partition(places & ~stands)[:, : basis.shape[1]]
        to = place.gather(1, (moves.cumsum(1) - 1).clamp(min=0))
        source, target = torch.where(moves, basis, nowhere), torch.where(moves, to, nowhere)
        assign = torch.nn.functional.pad(assign, (0, 1)).scatter(1, source, to)[:, :-1]
        weight = torch.ones(marked.shape, dtype=torch.float32, device=keep.device)
        weight = weight.scatter(1, target, self.own).scatter(1, source, 1 - self.own)
        return Selection(keep, assign, weight[:, :-1], counts=counts)


def pick_farthest_points(x: torch.Tensor, mask: torch.Tensor, number: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token of largest norm, then again and again that with the largest Euclidean distance to the nearest of
    those before it, of equal ones the first: long `[S, k]`, and bool `[S, k]`, the first `number` of each row.

    x: float32 `[S, N, D]`, finite; mask: bool `[S, N]`.
    """
    picks, score, taken = Picks(mask), x.norm(dim=2), []
    for turn in range(max(1, *number)):
        pick = picks.take_best(picks.among_left(score))
        apart = (x - gather_tokens(x, pick[:, None], 1)).square().sum(2)
        score = torch.minimum(score, apart) if turn else apart
        taken.append(pick)
    order = torch.arange(len(taken), device=x.device)
    return torch.stack(taken, 1), order < to_device(number, x.device)[:, None]


def compute_approximation_error(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """float32 `[S, N]`: how far each token `[S, N, D]` is from the best linear combination of `basis` `[S, k, D]`, by
    ridge regression; 0 where that is next to nothing of the token. A row of zeros in the basis is none."""
    wide = basis.double()
    gram = wide @ wide.transpose(1, 2)
    # A share of the trace on top, so that rounding leaves the matrix positive.
    ridge = _RIDGE + 1e-12 * gram.diagonal(dim1=1, dim2=2).sum(1)
    gram = gram + ridge[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    # With rows of about length 1: products in float32 lose nothing then, however alike the basis tokens are.
    factor = torch.linalg.cholesky_ex(gram).L
    rows = torch.linalg.solve_triangular(factor, wide, upper=False).float()
    error = torch.baddbmm(x, x @ rows.transpose(1, 2), rows, alpha=-1).norm(dim=2)
    return error.masked_fill(error < _EXACT * x.norm(dim=2), 0)


def _find_most_similar(x: torch.Tensor, among: torch.Tensor, most: int) -> torch.Tensor:
    """long `[S, N]`: for each token the one of `among` that is most similar by cosine, the first of equals."""
    place = partition(among)[:, :most]
    return place.gather(1, best_match(x, gather_tokens(x, place, 1), among.gather(1, place))[1])


@dataclass(frozen=True)
class _InnerApET(ApET):
    """The same by hidden states, where they enter decoder layer `layer`."""

    site: ClassVar[Site] = Site.IN_LLM

    layer: int = 1
