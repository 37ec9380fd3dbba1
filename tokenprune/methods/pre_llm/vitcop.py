# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import place, profile
from tokenprune.kernels.clusters import by_rows, roots
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.pairs import distances
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_AFTER = (2 / 32, 22 / 32)
_SIZES = (1.0, 7 / 11, 7 / 55)  # the tower's part, and the two cuts, for a quarter of the tokens on average
_NEAR = 0.6 + 1e-9  # of an image's height or width
_STEPS = 2.0**30  # densities count in such parts: equal keys are equally dense however sums are rounded


@register(
    "vitcop", site=Site.PRE_LLM, needs=("encoder_attention", "encoder_keys"), paper="arXiv 2601.17818, AAAI 2026",
    merges=True,
)  # fmt: skip
@dataclass(frozen=True)
class ViTCoP(Pruner):
    """Keep what the vision tower attends to, merge within clusters in an early layer of the decoder, and cut again in a
    late one, both by how short the keys are (ViTCoP).

    Clusters are of the tower's keys: a patch joins the nearest one that is at least as dense and not far away in the
    image, and centres are those that are dense and far, in keys, from any such. Keys of the decoder that are short, in
    the mean over heads, are those of tokens that matter. The early cut gives every cluster one merged token, and what
    is free to the clusters by their size, whose shortest keys then stay by themselves.

    keep: tokens averaged over the decoder's layers, those that enter it included.
    clusters: share in (0, 1] of the tokens that enter the decoder, as many clusters.

    Source: "ViTCoP: Accelerating Large Vision-Language Models via Visual and Textual Semantic Collaborative Pruning",
    the authors' code: cuts at the input of layers 2 and 22 of 32.

    Differs from the paper: counts are exact, by the authors' schedule for a quarter of the tokens, scaled, and the last
    cut keeps at least one token. A merged token weighs its members as the authors' does, and is half as long: there the
    group's middle one is added to the mean of all. Positions of the last cut are those of the prompt (there the tokens
    are counted anew). Towers of another width than CLIP-L's measure distances of keys beside it (by the square root);
    keys of towers that rotate them are rotated, a token of several patches has their mean, and tiles do not join each
    other. Norms are those of float32.
    """

    asks_device: ClassVar[bool] = True

    clusters: Annotated[float, Gt(0), Le(1)] = 0.18

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        inside = place(_AFTER, layers, Budget(keep=1.0))
        first, early, late = profile(layers, list(zip((0, *inside), _SIZES, strict=True)), budget)
        return [
            (_EntryStage(self.clusters), first.budget),
            (_ClusterMergeStage(early.layer), early.budget),
            (_ShortestKeysStage(late.layer), late.budget),
        ]


@dataclass(frozen=True)
class _EntryStage(Pruner):
    """Keeps what the class token attends to, and tells the early cut the clusters of it. clusters: see `ViTCoP`."""

    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.PRE_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"encoder_attention", "encoder_keys"})
    by_content_count: ClassVar[bool] = True  # asked, though all tokens stay

    clusters: float

    def select(self, tokens: VisualTokens) -> Selection:
        selection = Selection.top(tokens.encoder_attention(-1).mean(1), tokens)
        at = partition(selection.keep)[:, : max(tokens.keep)]
        number = to_device([max(1, int(self.clusters * keep)) for keep in tokens.keep], at.device)
        patches = tokens.patches
        spot = torch.stack([patches.row.double() / patches.height, patches.column.double() / patches.width], dim=-1)
        centre = by_rows(
            find_cluster_centers, 4 * at.shape[1] ** 2, gather_tokens(tokens.encoder_keys(-1), at, 1),
            gather_tokens(spot, at, 1), patches.tile.gather(1, at), selection.keep.gather(1, at), number,
        )  # fmt: skip
        tokens.remember("cluster", torch.full_like(tokens.mask, -1, dtype=torch.long).scatter(1, at, centre), True)
        return selection


def find_cluster_centers(
    keys: torch.Tensor, spot: torch.Tensor, tile: torch.Tensor, mask: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """long `[S, n]`: the centre of the cluster of each token; -1 where chains of equally dense tokens reach none.

    keys: `[S, n, D]`; spot: float64 `[S, n, 2]`, row and column as shares of the image; tile: long `[S, n]`; mask: bool
    `[S, n]`; number: long `[S]`, how many centres.
    """
    count, scale = keys.shape[1], keys.shape[2] ** 0.5 / 4  # 8 for CLIP-L
    keys = keys.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    others = ~torch.eye(count, dtype=torch.bool, device=keys.device)
    pairs = mask.unsqueeze(1) & mask.unsqueeze(2) & (tile.unsqueeze(1) == tile.unsqueeze(2))
    apart = (distances(keys, keys).double().square() + 1e-8).sqrt() * others
    density = torch.exp(-(apart / scale).square()).masked_fill(~pairs, 0).sum(2).mul(_STEPS).round()
    near = (spot.unsqueeze(1) - spot.unsqueeze(2)).norm(dim=-1) <= _NEAR
    above = pairs & others & near & (density.unsqueeze(1) >= density.unsqueeze(2))
    step, parent = apart.masked_fill(~above, torch.inf).min(2)
    parent = torch.where(step.isinf(), 0, parent)
    rank = rank_in_group((~mask).long(), (step * density).masked_fill(~mask, -torch.inf))
    is_centre, itself = mask & (rank < number[:, None]), torch.arange(count, device=keys.device)
    end = roots(torch.where(is_centre, itself, parent), count)
    return torch.where(mask & is_centre.gather(1, end), end, -1)


def compute_key_length(tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, N]`: the length of each token's key in the layer before the cut, mean over heads first."""
    return tokens.key_heads.float().mean(2).norm(dim=-1)


@dataclass(frozen=True)
class _ClusterMergeStage(Pruner):
    """Merges within clusters of what entered the decoder. layer: where it cuts."""

    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.IN_LLM
    merges: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"key_heads"})

    layer: int

    def select(self, tokens: VisualTokens) -> Selection:
        assign = torch.full(tokens.mask.shape, -1, device="cpu")
        weight = torch.ones(tokens.mask.shape, dtype=torch.float32, device="cpu")
        length = compute_key_length(tokens).nan_to_num(nan=torch.finfo(torch.float32).max)
        # Sizes of clusters decide how many stay of each, so that the host waits for both here.
        both = torch.stack([length.double(), tokens.carry["cluster"].double()]).tolist()
        for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            members: dict[int, list[int]] = {}
            for place_of in range(count):
                members.setdefault(int(both[1][row][place_of]), []).append(place_of)
            for group in split_into_groups([*members.values()], both[0][row], keep):
                middle = group[len(group) // 2]
                assign[row, group] = middle
                weight[row, middle] = len(group) + 1  # itself, and the mean of all
        assign, weight = (to_device(one, tokens.mask.device) for one in (assign, weight))
        kept = assign == torch.arange(assign.shape[1], device=assign.device)
        return Selection(kept, assign, weight, counts=tokens.keep)


def split_into_groups(clusters: Sequence[Sequence[int]], length: Sequence[float], wanted: int) -> list[list[int]]:
    """Return exactly `wanted` groups of the members of `clusters`, each of which becomes one token.

    clusters: places, rising within each. length: of each place, shorter is better. wanted: at most all members.
    """
    total = [math.fsum(length[one] for one in members) for members in clusters]
    order = sorted(range(len(clusters)), key=lambda one: (total[one], one))
    if len(clusters) > wanted:
        rest = [place_of for one in order[wanted - 1 :] for place_of in clusters[one]]
        return [*(list(clusters[one]) for one in order[: wanted - 1]), sorted(rest)]
    groups = []
    for members, alone in zip(clusters, _count_singletons(clusters, total, wanted - len(clusters)), strict=True):
        best = sorted(sorted(members, key=lambda one: (length[one], one))[:alone])
        groups += [[one] for one in best] + [[one for one in members if one not in set(best)]]
    return groups


def _count_singletons(clusters: Sequence[Sequence[int]], total: Sequence[float], free: int) -> list[int]:
    """Return how many members of each cluster stay by themselves, `free` in all: in proportion to size - 1, rounded,
    and put right one by one. Too few: the clusters of the least `total` get one more; too many: those of the largest
    give one away; of equal ones the first."""
    room = [len(members) - 1 for members in clusters]
    number = [min(most, round(free * most / max(1, sum(room)))) for most in room]
    while (missing := free - sum(number)) != 0:
        step = 1 if missing > 0 else -1
        able = [one for one in range(len(room)) if 0 <= number[one] + step <= room[one]]
        for one in sorted(able, key=lambda one: (step * total[one], one))[: abs(missing)]:
            number[one] += step
    return number


@dataclass(frozen=True)
class _ShortestKeysStage(Pruner):
    """Keeps the tokens with the shortest keys. layer: where it cuts."""

    never_nan: ClassVar[bool] = True
    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"key_heads"})

    layer: int

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return -compute_key_length(tokens)
