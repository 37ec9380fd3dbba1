# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from tokenprune.base import Method, Pruner, Selection, Site
from tokenprune.budget import Budget
from tokenprune.kernels.clusters import nearest, peaks
from tokenprune.options import check_options
from tokenprune.registry import register
from tokenprune.schedule import place, profile
from tokenprune.tokens import VisualTokens
from tokenprune.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor

_AFTER = (2 / 32, 22 / 32)
_SIZES = (1.0, 7 / 11, 7 / 55)  # the tower's part, and the two cuts, for a quarter of the tokens on average
_NEIGHBOURS = 5


@register(
    "vitcop", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2601.17818, AAAI 2026", merges=True,
    reconstruction=True,
)  # fmt: skip
@dataclass(frozen=True)
class ViTCoP(Pruner):
    """Keep what the vision tower attends to, merge within clusters in an early layer of the decoder, and cut again in a
    late one, both by how short the keys are (ViTCoP).

    Keys that are short, in the mean over heads, are those of tokens that matter. The early cut gives every cluster one
    merged token, and what is free to the clusters by their size, whose shortest keys then stay by themselves.

    keep: tokens averaged over the decoder's layers, those that enter it included.
    clusters: share in (0, 1] of the tokens that enter the decoder, as many clusters.

    Source: "ViTCoP: Accelerating Large Vision-Language Models via Visual and Textual Semantic Collaborative Pruning",
    the authors' code for what happens inside the decoder: cuts at the input of layers 2 and 22 of 32.

    Differs from the paper: how its tower chooses and clusters is not known to us, so that part is a reconstruction:
    attention in the tower's last block, and clusters around peaks of density of the projected tokens. A merged token is
    the mean of its group, at the place of the group's middle one (there that one is added to the mean). Counts are
    exact, by the authors' schedule for a quarter of the tokens, scaled, and the last cut keeps at least one token.
    Norms are those of float32.
    """

    clusters: Annotated[float, Gt(0), Le(1)] = 0.36

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def encoder_layers(self) -> tuple[int, ...]:
        return (-1,)

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        inside = place(_AFTER, layers, Budget(keep=1.0))
        first, early, late = profile(layers, list(zip((0, *inside), _SIZES, strict=True)), budget)
        return [
            (self, first.budget),
            (_WithinClusters(early.layer, self.clusters), early.budget),
            (_Shortest(late.layer), late.budget),
        ]

    def select(self, tokens: VisualTokens) -> Selection:
        return Selection.top(tokens.encoder_attention(-1).mean(1), tokens)


def key_length(tokens: VisualTokens) -> Tensor:
    """float32 `[S, N]`: the length of each token's key in the layer before the cut, mean over heads first."""
    return tokens.key_heads.float().mean(2).norm(dim=-1)


@dataclass(frozen=True)
class _WithinClusters(Pruner):
    """Merges within clusters of what entered the decoder. layer: where it cuts. clusters: see `ViTCoP`."""

    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.IN_LLM
    merges: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"key_heads", "embeddings"})

    layer: int
    clusters: float

    def select(self, tokens: VisualTokens) -> Selection:
        assign = torch.full(tokens.mask.shape, -1)
        length = key_length(tokens).nan_to_num(nan=torch.finfo(torch.float32).max)
        # Sizes of clusters decide how many stay of each, so that the host waits for both here.
        number = [max(1, round(self.clusters * count)) for count in tokens.counts]
        x, most = tokens.embeddings, max(number)
        centres = peaks(x, tokens.mask, to_device(number, x.device), most, _NEIGHBOURS)
        cluster = nearest(x, tokens.mask, centres, most)
        both = torch.stack([length.double(), cluster.double()]).tolist()
        for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            members: dict[int, list[int]] = {}
            for place_of in range(count):
                members.setdefault(int(both[1][row][place_of]), []).append(place_of)
            for group in grouped([*members.values()], both[0][row], keep):
                assign[row, group] = group[len(group) // 2]
        assign = to_device(assign, tokens.mask.device)
        keep = assign == torch.arange(assign.shape[1], device=assign.device)
        return Selection(keep, assign, counts=tokens.keep)


def grouped(clusters: Sequence[Sequence[int]], length: Sequence[float], wanted: int) -> list[list[int]]:
    """Return exactly `wanted` groups of the members of `clusters`, each of which becomes one token.

    clusters: places, rising within each. length: of each place, shorter is better. wanted: at most all members.
    """
    total = [sum(length[one] for one in members) for members in clusters]
    order = sorted(range(len(clusters)), key=lambda one: (total[one], one))
    if len(clusters) > wanted:
        rest = [place_of for one in order[wanted - 1 :] for place_of in clusters[one]]
        return [*(list(clusters[one]) for one in order[: wanted - 1]), sorted(rest)]
    groups = []
    for members, alone in zip(clusters, _alone(clusters, order, wanted - len(clusters)), strict=True):
        best = sorted(sorted(members, key=lambda one: (length[one], one))[:alone])
        groups += [[one] for one in best] + [[one for one in members if one not in set(best)]]
    return groups


def _alone(clusters: Sequence[Sequence[int]], order: Sequence[int], free: int) -> list[int]:
    """Return how many members of each cluster stay by themselves, `free` in all: in proportion to size - 1, rounded,
    and put right one by one in the order of `order`."""
    room = [len(members) - 1 for members in clusters]
    number = [min(most, round(free * most / max(1, sum(room)))) for most in room]
    while sum(number) != free:
        step = 1 if sum(number) < free else -1
        for one in order:
            if sum(number) != free and 0 <= number[one] + step <= room[one]:
                number[one] += step
    return number


@dataclass(frozen=True)
class _Shortest(Pruner):
    """Keeps the tokens with the shortest keys. layer: where it cuts."""

    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"key_heads"})

    layer: int

    def score(self, tokens: VisualTokens) -> Tensor:
        return -key_length(tokens)
