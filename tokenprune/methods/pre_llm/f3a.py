# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.pairs import PickedRows, Products, is_finite, normalize
from tokenprune.kernels.picks import Picks
from tokenprune.methods.pre_llm.f3a_scores import (
    EPSILON,
    FrozenMatrices,
    Grid,
    Scores,
    average_text,
    compute_scores,
    draw_matrices,
    pick_anchors,
    standardize,
    top_tokens,
)
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_FIXED_SCORE = 1e3  # above any score


@register("f3a", site=Site.PRE_LLM, paper="arXiv 2605.16359")
@dataclass(frozen=True)
class F3A(Pruner):
    """Keep anchors and relevant tokens that differ and are spread out.

    Frozen random matrices project tokens and the question to 16 common heads. The relevance of a token combines its
    share in the four heads that the question activates, its cosine to the question in a second random projection, and a
    position prior. Windows of 2 x 2 tokens with high relevance, and anchors at fixed indices, provide the first tokens.
    Further tokens are picked one by one by their score, their cosine distance and their grid distance to the picks. The
    question enters as the mean embedding of the text after the image, so word order has no effect.

    Args:
        seed: Seed of the random matrices.

    Source:
        "How Many Visual Tokens Do Multimodal Language Models Need? Scaling Visual Token Pruning with F3A" (arXiv
        2605.16359), from a summary and the authors' code in its mode `pooled_prompt`. The text of the paper was not
        read.

    Differences from the paper:
        - There is one cue. By default, the authors add sentences built from the words of the question.
        - The cue is the mean of the text after the image. The authors use all text of the prompt.
        - Without text, the first four heads are active.
        - Without a known grid (newlines, several tiles), windows are pairs in raster order. Frames of a video are
          stacked as rows.
        - Smaller windows at an edge count only their own tokens. The authors' code counts the first token of the image
          for each missing one.
        - Ties go to the lower index. A token that is not finite counts as zeros.

    Examples:
        >>> model = tokenprune.patch(model, F3A(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_aware: ClassVar[bool] = True

    seed: int = 42

    def select(self, tokens: VisualTokens) -> Selection:
        x, text_means = tokens.hidden, average_text(tokens)
        matrices = draw_matrices(x.shape[2], text_means.shape[1], self.seed, x.device)
        images = []
        for index, (count, num_kept, shape) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            frames, height, width = shape if shape is not None and math.prod(shape) == count else (1, 1, count)
            grid = Grid(frames * height, width, x.device)
            images.append(build_pool(x[index, :count], text_means[index], num_kept, grid, matrices))
        pools = [torch.nn.utils.rnn.pad_sequence(list(pool), batch_first=True) for pool in zip(*images, strict=True)]
        pick = partial(pick_spread_out, max(tokens.keep))
        return Selection(map_rows(pick, tokens.mask.shape[1] ** 2, tokens.budget, *pools), counts=tokens.keep)


def build_pool(
    x: torch.Tensor, text_mean: torch.Tensor, num_kept: int, grid: Grid, matrices: FrozenMatrices
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of `pick_spread_out` for one image, without the segment dimension.

    Args:
        x: Tokens, (N, D).
        text_mean: Mean embedding of the text, float32 (D,).
        num_kept: Number of tokens to keep.
        grid: Grid of the image.
        matrices: Frozen projections.
    """
    x = x.float()
    x = standardize(x.masked_fill(~is_finite(x).unsqueeze(1), 0), 0)
    anchors = pick_anchors(len(x), num_kept, x.device)
    scores = compute_scores(x, standardize(text_mean, 0), anchors, grid, matrices)
    fixed, candidates = forage(scores, anchors, num_kept, grid)
    _, lock, jump, task, detail, anchored = scores
    worth = lock + 0.35 * jump + 0.20 * task + 0.10 * detail + 0.08 * anchored
    in_pool = candidates | top_tokens(worth, max(3 * num_kept, num_kept + 32), torch.ones_like(fixed))
    low = worth.masked_fill(~in_pool, torch.inf).amin()
    high = worth.masked_fill(~in_pool, -torch.inf).amax()
    worth = ((worth - low) / (high - low + EPSILON)).masked_fill(~in_pool, 0)
    return normalize(x), grid.position / grid.max_distance(in_pool).clamp(min=EPSILON), worth, in_pool, fixed


def forage(scores: Scores, anchors: torch.Tensor, num_kept: int, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fixed tokens and a first selection that contains them, both bool (N,)."""
    smell, lock, jump, task, detail, anchored = scores
    windows, anchor_share = math.prod(grid.num_windows), grid.average_by_window(anchors)
    top_two = grid.group_by_window(smell).topk(2, dim=1).values
    strength = torch.where(top_two[:, 1] > -torch.inf, top_two.mean(1), top_two[:, 0]) + 0.20 * anchor_share
    num_active = max(2, min(round(num_kept / max(1.15 * len(smell) / windows, 1)), windows, num_kept))
    active = top_tokens(strength, num_active, torch.ones_like(strength, dtype=torch.bool))
    near_active = torch.nn.functional.max_pool2d(active.float().view(1, *grid.num_windows), 3, 1, 1).flatten() > 0
    is_candidate = (near_active | (anchor_share > 0))[grid.window]

    scaffold = grid.group_by_window(0.55 * smell + 0.45 * lock).argmax(1)
    fixed = anchors | (active[grid.window] & (grid.slot == scaffold[grid.window]))

    rest = (num_kept - fixed.sum()).clamp(min=0)
    num_jumps = rest.clamp(max=round(0.15 * num_kept))
    exploit_score = lock + 0.15 * strength[grid.window] + 0.20 * task + 0.16 * anchored
    selected = fixed | top_tokens(exploit_score, rest - num_jumps, is_candidate & ~fixed)

    deficit = (1 - grid.average_by_window(selected))[grid.window]
    num_recovered = num_jumps.clamp(max=round(0.05 * num_kept))
    recover_score = 0.55 * jump + 0.30 * detail + 0.25 * task + 0.15 * deficit
    selected = selected | top_tokens(recover_score, num_recovered, ~selected)
    jump_score = jump + 0.50 * deficit + 0.20 * (~is_candidate).float() + 0.35 * task
    jump_score = jump_score + 0.16 * (1.25 * anchored + 0.10 * deficit)
    selected = selected | top_tokens(jump_score, num_jumps - num_recovered, ~selected)
    fill_score = lock + 0.25 * deficit + 0.20 * task + 0.08 * anchored
    return fixed, selected | top_tokens(fill_score, (num_kept - selected.sum()).clamp(min=0), ~selected)


def pick_spread_out(
    max_tokens: int, num_kept: torch.Tensor, direction: torch.Tensor, position: torch.Tensor, worth: torch.Tensor,
    mask: torch.Tensor, fixed: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Pick the `fixed` tokens in order, then greedily by score and distance to the picks, bool (S, N).

    Args:
        max_tokens: Maximum of `num_kept`.
        num_kept: Number of tokens to keep, long (S,).
        direction: Tokens of unit length, float32 (S, N, D).
        position: Grid positions, float32 (S, N, 2).
        worth: Score of each token in [0, 1], float32 (S, N).
        mask: Tokens that may be picked, bool (S, N).
        fixed: Tokens picked first, at least one per segment, bool (S, N).
    """
    products = Products(direction)
    if products.fits_in_memory:
        products.table  # noqa: B018  # compute the table now, because most rows are used
    picks, row_of = Picks(mask), PickedRows(products)
    feature_distance = grid_distance = torch.zeros_like(worth)
    for step in range(max_tokens):
        score = 0.60 * worth + 0.25 * feature_distance + 0.15 * grid_distance
        score = picks.mask_taken(score.masked_fill(fixed, _FIXED_SCORE))
        pick = picks.take_best(score)
        picked_position = position.gather(1, pick[:, None, None].expand(-1, 1, 2))
        new_grid_distance = (position - picked_position).square().sum(2).sqrt()
        new_feature_distance = 1 - row_of(pick, score)
        # The distances do not affect the first pick, which is a fixed token.
        feature_distance = new_feature_distance if step == 0 else torch.minimum(feature_distance, new_feature_distance)
        grid_distance = new_grid_distance if step == 0 else torch.minimum(grid_distance, new_grid_distance)
    return picks.first_picks(num_kept)
