# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import split_rows
from tokenprune.kernels.pairs import Products, normalize
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_DROPS_PER_ROUND = 8
_NUM_NEIGHBORS = 32  # of each patch of a long line
_ROWS_AT_ONCE = 256  # rows of products


@register("vispruner", site=Site.PRE_LLM, paper="arXiv 2412.01818, ICCV 2025")
@dataclass(frozen=True)
class VisPruner(Pruner):
    """Keep half by tower attention and the rest by dissimilarity, in rounds.

    In each tile or frame, important patches have the most attention from the class token in the last block that the
    model reads. In towers without a class token, the attention is the mean that a patch receives. The other patches
    form a list sorted by falling attention. Each round compares the patches at odd and even ranks of the list, and
    drops the 8 odd ones that are most similar to an even one. The next list holds the remaining odd patches, sorted by
    falling similarity, followed by the even ones.

    Args:
        important: Share in [0, 1] of the kept tokens that are important, rounded down for each tile.
        features: Compared features: "tower" is the tower's output, "projected" the input of the language model, as the
            authors recommend for towers that merge patches. vLLM provides only "projected".

    Source:
        Zhang et al., "Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs" (arXiv
        2412.01818v2), and the authors' code for the rounds and the order of the list.

    Differences from the paper:
        - A round never drops more patches than there are odd ranks, and this number is rounded up. The authors' code
          fails on lists of odd length and on the smallest budgets, and agrees otherwise.
        - Ties go to the patch that is earlier in the list.
        - Tiles share the budget in proportion to their patches, and newline tokens are dropped first.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, VisPruner(features="projected"), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True
    fallback_options: ClassVar[Mapping[str, Any]] = {"features": "projected"}

    important: Annotated[float, Ge(0), Le(1)] = 0.5
    features: Literal["tower", "projected"] = "tower"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_attention"} | ({"encoder_features"} if self.features == "tower" else set()))

    def select(self, tokens: VisualTokens) -> Selection:
        tiles, attention = Tiles.from_tokens(tokens), compute_patch_attention(tokens)
        diverse = tiles.zero_non_patches(tiles.num_kept - (tiles.num_kept.double() * self.important).long())
        important = tiles.top(attention, tiles.num_kept - diverse)
        rest = tiles.is_patch & ~important
        x = tokens.encoder_features if self.features == "tower" else tokens.hidden
        return Selection(important | _drop_duplicates(x, rest, attention, tiles, diverse), counts=tokens.keep)


def _drop_duplicates(
    x: torch.Tensor, rest: torch.Tensor, attention: torch.Tensor, tiles: Tiles, num_kept: torch.Tensor
) -> torch.Tensor:
    """Return the patches of each tile's `rest` that remain after the rounds, bool (S, N).

    Args:
        x: Features, (S, N, D).
        rest: Patches to choose from, bool (S, N).
        attention: Attention of each patch, (S, N).
        tiles: Tiles of the tokens.
        num_kept: Number of patches that remain in each tile, long (S, T + 2).
    """
    # The counts determine all rounds. This is the only synchronization with the device.
    counts_and_goals = torch.stack([tiles.count_selected(rest), num_kept])[..., : tiles.num_tiles].tolist()
    lines = [
        (segment, tile, count, goal)
        for segment, (counts, goals) in enumerate(zip(*counts_and_goals, strict=True))
        for tile, (count, goal) in enumerate(zip(counts, goals, strict=True))
        if goal
    ]
    if not lines:
        return torch.zeros_like(rest)
    segment, tile, count, goal = (to_device(list(item), x.device) for item in zip(*lines, strict=True))
    longest = max(line[2] for line in lines)
    indices = segment[:, None] * rest.shape[1] + _sort_by_attention(rest, attention, tiles, longest)[segment, tile]
    parts, x = split_rows(len(lines), longest**2), x.flatten(0, 1)
    if Products(x[indices[:1]]).fits_in_memory:
        is_left = torch.cat([_run_rounds(x[indices[part]], count[part], goal[part], lines[part]) for part in parts])
    else:
        is_left = torch.stack(
            [_run_rounds_for_long_line(x[item], *line[2:]) for item, line in zip(indices, lines, strict=True)]
        )
    kept = torch.zeros(rest.numel(), dtype=torch.long, device=x.device)
    return kept.scatter_add(0, indices.flatten(), is_left.long().flatten()).view_as(rest) > 0


def _sort_by_attention(rest: torch.Tensor, attention: torch.Tensor, tiles: Tiles, longest: int) -> torch.Tensor:
    """Return the indices of each tile's `rest` by falling attention, long (S, T, longest), padded with 0."""
    rank = rank_in_group(torch.where(rest, tiles.index, tiles.num_tiles + 1), make_sortable(attention))
    num_slots = tiles.num_tiles * longest
    slot = torch.where(rest & (rank < longest), tiles.index * longest + rank, num_slots)
    index = torch.arange(rest.shape[1], device=rest.device).expand_as(slot)
    lines = torch.zeros(len(rest), num_slots + 1, dtype=torch.long, device=rest.device).scatter(1, slot, index)
    return lines[:, :-1].view(len(rest), tiles.num_tiles, longest)


def _run_rounds(
    x: torch.Tensor, count: torch.Tensor, goal: torch.Tensor, lines: list[tuple[int, int, int, int]]
) -> torch.Tensor:
    """Return the patches of each line that remain after all rounds, bool (B, P).

    Args:
        x: Lines of patches, (B, P, D).
        count: Number of patches of each line, long (B,).
        goal: Number of patches that remain in each line, long (B,).
        lines: Segment, tile, count and goal of each line, as Python ints.
    """
    direction, width = normalize(x), x.shape[1]
    similarity = (direction @ direction.transpose(1, 2)).flatten(1)
    line = torch.arange(width, device=x.device).expand(len(x), -1)
    lengths = [(length, goal_length) for *_, length, goal_length in lines]
    while any(length > goal_length for length, goal_length in lengths):
        longest = max(length for length, _ in lengths)
        line, positions = line[:, :longest], torch.arange(longest, device=x.device)
        odd, even = line[:, 0::2], line[:, 1::2]  # ranks start at 1
        # One gather with flat indices is several times faster than indexing with three tensors.
        table = similarity.gather(1, (odd.unsqueeze(2) * width + even.unsqueeze(1)).flatten(1))
        table = table.unflatten(1, (odd.shape[1], even.shape[1]))
        if any(length < longest for length, _ in lengths):
            table = table.masked_fill((positions[1::2] >= count[:, None]).unsqueeze(1), -2)
        max_similarity = table.amax(2).masked_fill(positions[0::2] >= count[:, None], -torch.inf)
        odd = odd.gather(1, max_similarity.argsort(dim=1, descending=True, stable=True))
        num_odd = (count + 1) // 2
        num_dropped = torch.minimum((count - goal).clamp(0, _DROPS_PER_ROUND), num_odd)
        positions = positions + num_dropped[:, None]
        positions = torch.where(positions < num_odd[:, None], positions, odd.shape[1] + positions - num_odd[:, None])
        line = torch.cat([odd, even], dim=1).gather(1, positions.clamp(max=longest - 1))
        count = count - num_dropped
        lengths = [
            (length - min(max(length - goal_length, 0), _DROPS_PER_ROUND, -(-length // 2)), goal_length)
            for length, goal_length in lengths
        ]
    kept = torch.arange(line.shape[1], device=x.device) < count[:, None]
    return torch.zeros(x.shape[:2], dtype=torch.long, device=x.device).scatter_add(1, line, kept.long()) > 0


def _run_rounds_for_long_line(x: torch.Tensor, count: int, goal: int) -> torch.Tensor:
    """Run `_run_rounds` on one line, keeping only the similarities to the nearest patches, bool (P,).

    The nearest patches are searched again after many drops. If no near patch of an odd patch is at an even rank, which
    is rare, all even patches are compared. x: (P, D).
    """
    products, line = Products(normalize(x)[None]), torch.arange(count, device=x.device)
    neighbors = torch.empty(len(x), 0, dtype=torch.long, device=x.device)
    similarity = torch.empty(len(x), 0, dtype=torch.float32, device=x.device)
    known_length = 2 * count
    even_tokens, is_left = torch.zeros(2, len(x), dtype=torch.bool, device=x.device)
    while (length := len(line)) > goal:
        if 3 * length < 2 * known_length:
            known_length, (neighbors, similarity) = length, _find_nearest(products, line.sort().values)
        odd, others = line[0::2], line[1::2]
        even_tokens.zero_().index_fill_(0, others, True)
        is_even = even_tokens.index_select(0, neighbors.index_select(0, odd).flatten()).view(-1, neighbors.shape[1])
        max_similarity = torch.where(is_even, similarity.index_select(0, odd), -torch.inf).amax(1)
        for part in (max_similarity == -torch.inf).nonzero().flatten().split(_ROWS_AT_ONCE):
            max_similarity[part] = products.rows(0, odd[part])[:, others].amax(1)
        odd = odd[max_similarity.argsort(descending=True, stable=True)]
        line = torch.cat([odd[min(length - goal, _DROPS_PER_ROUND, len(odd)) :], others])
    return is_left.index_fill_(0, line, True)


def _find_nearest(products: Products, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest neighbors of `tokens` among themselves, long (N, k), and their similarities, float32 (N, k).

    Rows of other tokens are 0.
    """
    num_neighbors = min(_NUM_NEIGHBORS, len(tokens))
    neighbors = torch.zeros(products.shape[1], num_neighbors, dtype=torch.long, device=tokens.device)
    similarity = torch.zeros(products.shape[1], num_neighbors, dtype=torch.float32, device=tokens.device)
    for part in tokens.split(_ROWS_AT_ONCE):
        rows = products.rows(0, part)
        rows.scatter_(1, part.unsqueeze(1), -torch.inf)
        similarity[part], top_index = rows.index_select(1, tokens).topk(num_neighbors, dim=1)
        neighbors[part] = tokens[top_index]
    return neighbors, similarity
