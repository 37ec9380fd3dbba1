# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import in_parts
from tokenprune.kernels.pairs import Products, unit
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_A_ROUND = 8  # tokens that go in a round
_FEW = 32  # nearest ones that are known of a token of many
_ROWS = 256  # of products at a time


@register("vispruner", site=Site.PRE_LLM, paper="arXiv 2412.01818, ICCV 2025")
@dataclass(frozen=True)
class VisPruner(Pruner):
    """Keep half by the vision tower's attention, and of the rest, round by round, what is no duplicate.

    Of each tile (or frame), the important patches are those that the class token attends to most in the last block that
    the model reads; in towers without one, those that receive most attention. The others form a line by falling
    attention. In a round, each at an odd place of the line is compared with all at even places, and the 8 that are most
    similar to one go; the rest of them, by falling similarity, and then those at even places are the next line.

    important: share in [0, 1] of the kept tokens that is important, rounded down for each tile.
    features: what is compared: "tower", what the vision tower makes of a patch, or "projected", what enters the
    language model, as the authors advise for towers that merge patches; a vLLM server has only the latter.

    Source: Zhang et al., "Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs";
    the authors' code for the rounds, and for the order of the line in them.

    Differs from the paper: a round never drops more than there are at odd places, and their number is rounded up (the
    authors' code fails on odd lines and on the smallest budgets, and agrees elsewhere); ties go to the earlier in the
    line; tiles share the budget in proportion to their patches, and newline tokens go first; tokens keep their
    positions of the full prompt.
    """

    asks_device: ClassVar[bool] = True
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
    x: torch.Tensor, rest: torch.Tensor, attention: torch.Tensor, tiles: Tiles, number: torch.Tensor
) -> torch.Tensor:
    """bool `[S, N]`: of the `rest` of each tile those `number` (long `[S, T + 2]`) that the rounds leave."""
    # How many rounds there are, and how large they are, follows from these: the one question to the device.
    numbers = torch.stack([tiles.count_selected(rest), number])[..., : tiles.num_tiles].tolist()
    lines = [
        (segment, tile, count, goal)
        for segment, (counts, goals) in enumerate(zip(*numbers, strict=True))
        for tile, (count, goal) in enumerate(zip(counts, goals, strict=True))
        if goal
    ]
    if not lines:
        return torch.zeros_like(rest)
    segment, tile, count, goal = (to_device(list(one), x.device) for one in zip(*lines, strict=True))
    longest = max(line[2] for line in lines)
    at = segment[:, None] * rest.shape[1] + _sort_by_attention(rest, attention, tiles, longest)[segment, tile]
    parts, x = in_parts(len(lines), longest**2), x.flatten(0, 1)
    if Products(x[at[:1]]).fits:
        left = torch.cat([_run_rounds(x[at[part]], count[part], goal[part], lines[part]) for part in parts])
    else:
        left = torch.stack([_run_rounds_for_long_line(x[one], *line[2:]) for one, line in zip(at, lines, strict=True)])
    kept = torch.zeros(rest.numel(), dtype=torch.long, device=x.device)
    return kept.scatter_add(0, at.flatten(), left.long().flatten()).view_as(rest) > 0


def _sort_by_attention(rest: torch.Tensor, attention: torch.Tensor, tiles: Tiles, longest: int) -> torch.Tensor:
    """long `[S, T, longest]`: the tokens that are left of each tile by falling attention; then 0."""
    place = rank_in_group(torch.where(rest, tiles.index, tiles.num_tiles + 1), make_sortable(attention))
    spots = tiles.num_tiles * longest
    spot = torch.where(rest & (place < longest), tiles.index * longest + place, spots)
    index = torch.arange(rest.shape[1], device=rest.device).expand_as(spot)
    lines = torch.zeros(len(rest), spots + 1, dtype=torch.long, device=rest.device).scatter(1, spot, index)
    return lines[:, :-1].view(len(rest), tiles.num_tiles, longest)


def _run_rounds(
    x: torch.Tensor, count: torch.Tensor, goal: torch.Tensor, lines: list[tuple[int, int, int, int]]
) -> torch.Tensor:
    """bool `[B, P]`: which of each line are left at the end.

    x: `[B, P, D]`, lines of tokens; count, goal: long `[B]`, how many there are of each, and how many are to be left.
    lines: the same on the host.
    """
    direction, width = unit(x), x.shape[1]
    alike = (direction @ direction.transpose(1, 2)).flatten(1)
    line = torch.arange(width, device=x.device).expand(len(x), -1)
    here = [(number, end) for *_, number, end in lines]
    while any(number > end for number, end in here):
        longest = max(number for number, _ in here)
        line, place = line[:, :longest], torch.arange(longest, device=x.device)
        odd, even = line[:, 0::2], line[:, 1::2]  # the first place is number one
        # One gather of flat places is several times faster than indexing with three tensors.
        table = alike.gather(1, (odd.unsqueeze(2) * width + even.unsqueeze(1)).flatten(1))
        table = table.unflatten(1, (odd.shape[1], even.shape[1]))
        if any(number < longest for number, _ in here):
            table = table.masked_fill((place[1::2] >= count[:, None]).unsqueeze(1), -2)
        likest = table.amax(2).masked_fill(place[0::2] >= count[:, None], -torch.inf)
        odd = odd.gather(1, likest.argsort(dim=1, descending=True, stable=True))
        odds = (count + 1) // 2
        gone = torch.minimum((count - goal).clamp(0, _A_ROUND), odds)
        place = place + gone[:, None]
        place = torch.where(place < odds[:, None], place, odd.shape[1] + place - odds[:, None])
        line = torch.cat([odd, even], dim=1).gather(1, place.clamp(max=longest - 1))
        count = count - gone
        here = [(number - min(max(number - end, 0), _A_ROUND, -(-number // 2)), end) for number, end in here]
    kept = torch.arange(line.shape[1], device=x.device) < count[:, None]
    return torch.zeros(x.shape[:2], dtype=torch.long, device=x.device).scatter_add(1, line, kept.long()) > 0


def _run_rounds_for_long_line(x: torch.Tensor, count: int, goal: int) -> torch.Tensor:
    """bool `[P]`: `_rounds` of one line, of whose similarities those to the nearest few are held alone.

    They are found anew when many tokens are gone. Where none of a token's few is left at an even place, which is rare,
    all are asked. x: `[P, D]`.
    """
    products, line = Products(unit(x)[None]), torch.arange(count, device=x.device)
    near = torch.empty(len(x), 0, dtype=torch.long, device=x.device)
    value = torch.empty(len(x), 0, dtype=torch.float32, device=x.device)
    known = 2 * count
    even, left = torch.zeros(2, len(x), dtype=torch.bool, device=x.device)
    while (number := len(line)) > goal:
        if 3 * number < 2 * known:
            known, (near, value) = number, _find_nearest(products, line.sort().values)
        odd, others = line[0::2], line[1::2]
        even.zero_().index_fill_(0, others, True)
        there = even.index_select(0, near.index_select(0, odd).flatten()).view(-1, near.shape[1])
        likest = torch.where(there, value.index_select(0, odd), -torch.inf).amax(1)
        for some in (likest == -torch.inf).nonzero().flatten().split(_ROWS):
            likest[some] = products.rows(0, odd[some])[:, others].amax(1)
        odd = odd[likest.argsort(descending=True, stable=True)]
        line = torch.cat([odd[min(number - goal, _A_ROUND, len(odd)) :], others])
    return left.index_fill_(0, line, True)


def _find_nearest(products: Products, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each token that is `there`, long `[n]`, the `_FEW` of these that are most like it, and how much they
    are: long and float32 `[N, few]`."""
    few = min(_FEW, len(there))
    near = torch.zeros(products.shape[1], few, dtype=torch.long, device=there.device)
    value = torch.zeros(products.shape[1], few, dtype=torch.float32, device=there.device)
    for some in there.split(_ROWS):
        rows = products.rows(0, some)
        rows.scatter_(1, some.unsqueeze(1), -torch.inf)
        value[some], at = rows.index_select(1, there).topk(few, dim=1)
        near[some] = there[at]
    return near, value
