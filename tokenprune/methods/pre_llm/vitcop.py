# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import choose_layers, plan_cuts
from tokenprune.kernels.clusters import find_roots, map_rows
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.pairs import distances
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_AFTER = (2 / 32, 22 / 32)
_SIZES = (1.0, 7 / 11, 7 / 55)  # entry and both cuts, for an average of a quarter
_NEAR = 0.6 + 1e-9  # share of the image's height or width
_STEPS = 2.0**30  # resolution of densities, so that equal keys have equal densities despite rounding


@register(
    "vitcop", site=Site.PRE_LLM, needs=("encoder_attention", "encoder_keys"), paper="arXiv 2601.17818, AAAI 2026",
    merges=True,
)  # fmt: skip
@dataclass(frozen=True)
class ViTCoP(Pruner):
    """Keep salient patches and merge clusters inside the decoder, then cut again late.

    The tower stage keeps the patches with the most attention from the class token and clusters them by the tower's
    keys. A patch joins its nearest patch that is at least as dense and not far away in the image. Cluster centers are
    dense and far from denser patches. The early cut merges each cluster into one token. It spends the remaining budget
    on tokens that stay unmerged: each cluster receives a share by its size, and its tokens with the shortest decoder
    keys stay. The late cut keeps the tokens with the shortest keys. `keep` is an average over decoder layers.

    Args:
        clusters: Number of clusters as a share in (0, 1] of the tokens that enter the decoder.

    Source:
        "ViTCoP: Accelerating Large Vision-Language Models via Visual and Textual Semantic Collaborative Pruning" (arXiv
        2601.17818), from the authors' code, with cuts at the input of layers 2 and 22 of 32.

    Differences from the paper:
        - Counts are exact: the authors' schedule for a quarter of the tokens, scaled. The last cut keeps at least one
          token.
        - A merged token weights its members as the authors do but has half the length. They add the middle token to the
          mean of all.
        - Positions after the last cut are those of the prompt. The authors renumber them.
        - Key distances are scaled by the square root of the key width relative to CLIP-L.
        - Keys include the tower's rotary embedding. A token of several patches uses their mean key. Clusters do not
          cross tiles.
        - Norms are computed in float32.

    Examples:
        >>> model = tokenprune.patch(model, ViTCoP(clusters=0.25), keep=0.25)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> [cut.layer for cut in tokenprune.stats(model).removals]
        [0, 1, 4]
    """

    syncs_device: ClassVar[bool] = True

    clusters: Annotated[float, Gt(0), Le(1)] = 0.18

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        inside = choose_layers(_AFTER, layers, Budget(keep=1.0))
        first, early, late = plan_cuts(layers, list(zip((0, *inside), _SIZES, strict=True)), budget)
        return [
            (_EntryStage(self.clusters), first.budget),
            (_ClusterMergeStage(early.layer), early.budget),
            (_ShortestKeysStage(late.layer), late.budget),
        ]


@dataclass(frozen=True)
class _EntryStage(Pruner):
    """Keep the patches with the most class-token attention, and pass their clusters to the early cut."""

    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.PRE_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"encoder_attention", "encoder_keys"})
    chooses_count: ClassVar[bool] = True  # runs even if it keeps all tokens

    clusters: float

    def select(self, tokens: VisualTokens) -> Selection:
        selection = Selection.top(tokens.encoder_attention(-1).mean(1), tokens)
        indices = partition(selection.keep)[:, : max(tokens.keep)]
        num_clusters = to_device([max(1, int(self.clusters * keep)) for keep in tokens.keep], indices.device)
        patches = tokens.patches
        positions = torch.stack(
            [patches.row.double() / patches.height, patches.column.double() / patches.width], dim=-1
        )
        centers = map_rows(
            find_cluster_centers, 4 * indices.shape[1] ** 2, gather_tokens(tokens.encoder_keys(-1), indices, 1),
            gather_tokens(positions, indices, 1), patches.tile.gather(1, indices), selection.keep.gather(1, indices),
            num_clusters,
        )  # fmt: skip
        cluster = torch.full_like(tokens.mask, -1, dtype=torch.long).scatter(1, indices, centers)
        tokens.remember("cluster", cluster, per_token=True)
        return selection


def find_cluster_centers(
    keys: torch.Tensor, positions: torch.Tensor, tile: torch.Tensor, mask: torch.Tensor, num_clusters: torch.Tensor
) -> torch.Tensor:
    """Return the center of each token's cluster, long (S, n), or -1 if ties in density lead to no center.

    Args:
        keys: Keys of the tower, (S, n, D).
        positions: Row and column as shares of the image, float64 (S, n, 2).
        tile: Tile of each token, long (S, n).
        mask: Valid tokens, bool (S, n).
        num_clusters: Number of clusters of each segment, long (S,).
    """
    count, scale = keys.shape[1], keys.shape[2] ** 0.5 / 4  # 8 for CLIP-L
    keys = keys.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    others = ~torch.eye(count, dtype=torch.bool, device=keys.device)
    pairs = mask.unsqueeze(1) & mask.unsqueeze(2) & (tile.unsqueeze(1) == tile.unsqueeze(2))
    distance = (distances(keys, keys).double().square() + 1e-8).sqrt() * others
    density = torch.exp(-(distance / scale).square()).masked_fill(~pairs, 0).sum(2).mul(_STEPS).round()
    is_near = (positions.unsqueeze(1) - positions.unsqueeze(2)).norm(dim=-1) <= _NEAR
    is_parent_candidate = pairs & others & is_near & (density.unsqueeze(1) >= density.unsqueeze(2))
    parent_distance, parent = distance.masked_fill(~is_parent_candidate, torch.inf).min(2)
    parent = torch.where(parent_distance.isinf(), 0, parent)
    rank = rank_in_group((~mask).long(), (parent_distance * density).masked_fill(~mask, -torch.inf))
    is_center, itself = mask & (rank < num_clusters[:, None]), torch.arange(count, device=keys.device)
    root = find_roots(torch.where(is_center, itself, parent), count)
    return torch.where(mask & is_center.gather(1, root), root, -1)


def compute_key_length(tokens: VisualTokens) -> torch.Tensor:
    """Return the norm of each token's mean key over heads, in the layer before the cut, float32 (S, N)."""
    return tokens.key_heads.float().mean(2).norm(dim=-1)


@dataclass(frozen=True)
class _ClusterMergeStage(Pruner):
    """Merge tokens within the clusters of the first stage, at the input of decoder layer `layer`."""

    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.IN_LLM
    merges: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"key_heads"})

    layer: int

    def select(self, tokens: VisualTokens) -> Selection:
        assign = torch.full(tokens.mask.shape, -1, device="cpu")
        weight = torch.ones(tokens.mask.shape, dtype=torch.float32, device="cpu")
        length = compute_key_length(tokens).nan_to_num(nan=torch.finfo(torch.float32).max)
        # The host needs the cluster sizes, so this synchronizes with the device.
        lengths_and_clusters = torch.stack([length.double(), tokens.carry["cluster"].double()]).tolist()
        for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            members: dict[int, list[int]] = {}
            for index in range(count):
                members.setdefault(int(lengths_and_clusters[1][row][index]), []).append(index)
            for group in split_into_groups([*members.values()], lengths_and_clusters[0][row], keep):
                middle = group[len(group) // 2]
                assign[row, group] = middle
                weight[row, middle] = len(group) + 1  # the middle token and the mean of all
        assign, weight = (to_device(tensor, tokens.mask.device) for tensor in (assign, weight))
        kept = assign == torch.arange(assign.shape[1], device=assign.device)
        return Selection(kept, assign, weight, counts=tokens.keep)


def split_into_groups(clusters: Sequence[Sequence[int]], length: Sequence[float], num_groups: int) -> list[list[int]]:
    """Split the members of `clusters` into exactly `num_groups` groups, each of which becomes one token.

    Args:
        clusters: Ascending token indices of each cluster.
        length: Key length of each token. Shorter keys stay unmerged.
        num_groups: Number of groups, at most the number of members.
    """
    total = [math.fsum(length[index] for index in members) for members in clusters]
    order = sorted(range(len(clusters)), key=lambda cluster: (total[cluster], cluster))
    if len(clusters) > num_groups:
        rest = [index for cluster in order[num_groups - 1 :] for index in clusters[cluster]]
        return [*(list(clusters[cluster]) for cluster in order[: num_groups - 1]), sorted(rest)]
    groups = []
    counts = _count_singletons(clusters, total, num_groups - len(clusters))
    for members, num_singletons in zip(clusters, counts, strict=True):
        singletons = sorted(sorted(members, key=lambda index: (length[index], index))[:num_singletons])
        groups += [[index] for index in singletons]
        groups.append([index for index in members if index not in set(singletons)])
    return groups


def _count_singletons(clusters: Sequence[Sequence[int]], total: Sequence[float], num_free: int) -> list[int]:
    """Return the number of unmerged members of each cluster, `num_free` in total.

    The counts are proportional to size - 1 and rounded. If the sum is too small, clusters with the smallest `total` get
    one more; if it is too large, clusters with the largest `total` lose one.
    """
    max_singletons = [len(members) - 1 for members in clusters]
    num_singletons = [
        min(available, round(num_free * available / max(1, sum(max_singletons)))) for available in max_singletons
    ]
    while (missing := num_free - sum(num_singletons)) != 0:
        step = 1 if missing > 0 else -1
        changed = [count + step for count in num_singletons]
        adjustable = [index for index, limit in enumerate(max_singletons) if 0 <= changed[index] <= limit]
        for cluster in sorted(adjustable, key=lambda cluster: (step * total[cluster], cluster))[: abs(missing)]:
            num_singletons[cluster] += step
    return num_singletons


@dataclass(frozen=True)
class _ShortestKeysStage(Pruner):
    """Keep the tokens with the shortest keys, at the input of decoder layer `layer`."""

    never_nan: ClassVar[bool] = True
    name: ClassVar[str] = "vitcop"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"key_heads"})

    layer: int

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return -compute_key_length(tokens)
