# SPDX-License-Identifier: Apache-2.0
"""Let a method choose among the features of one picture or video, and put together the rows that the prompt awaits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenprune.base import Method, Selection
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.cutting import checked_keep, merge_tokens
from tokenprune.integrations.hf.encoder_attention import Encoded, as_patches
from tokenprune.integrations.hf.patches import Placed
from tokenprune.tokens import Patches, Segments, VisualTokens

Grid = tuple[int, int, int]
GridOf = Callable[[int], Grid | None]
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Features:
    """Backs a `VisualTokens`: all that a serving engine knows of an item is what the encoder made of it."""

    hidden: Tensor
    norm: Norm | None = None
    encoded: Encoded | None = None

    def gather(self, what: str, position: Tensor, segments: Segments) -> Tensor:
        if what != "hidden":
            raise TokenPruneError(f"it reads {what!r}, and vLLM gives a method nothing but the encoder's features")
        return self.hidden[position]

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)

    def attention(self, kind: str) -> Tensor:
        raise TokenPruneError(f"it reads the attention of the language model ({kind}), which did not run yet")

    def encoder_attention(self, layer: int | float, segments: Segments) -> Tensor:
        if self.encoded is None or layer not in self.encoded.scores:
            raise TokenPruneError(
                f"it reads attention of the vision tower ({layer}) without a word of it: a method declares "
                "encoder_attention in its needs, and names in its encoder_layers all that it reads"
            )
        of_tokens = self.encoded.scores[layer][segments.position]
        return of_tokens.masked_fill(~segments.mask.unsqueeze(-1), 0).transpose(1, 2)

    def patches(self, segments: Segments) -> Patches:
        if self.encoded is None:
            raise TokenPruneError("it reads which patches tokens are made of without encoder_attention in its needs")
        placed = self.encoded.placed
        return as_patches(placed.cells[segments.position], segments.mask, placed.tiles)

    def text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        raise TokenPruneError("it reads the text, but a picture's features are shared by all prompts that hold it")


def segments_of(
    counts: list[int], grid: Grid | None, modality: str, device: torch.device, guess: GridOf = lambda count: None
) -> Segments:
    """Return one segment for each entry of `counts`, in the order of the rows.

    grid: (frames, height, width) of an item that is one segment, or whose frames are one each. guess: tells of
    an image's number of tokens its grid, where `grid` does not.
    """
    limit = torch.tensor(counts, device=device)[:, None]
    place = torch.arange(max(counts), device=device)
    start = limit.cumsum(0) - limit
    mask = place < limit
    if grid is not None and len(counts) == grid[0]:
        grid = (1, *grid[1:])
    return Segments(
        row=[0] * len(counts),
        ordinal=list(range(len(counts))),
        counts=counts,
        position=torch.where(mask, start + place, start),
        mask=mask,
        grids=[_fitting(grid, count) or (guess(count) if modality == "image" else None) for count in counts],
        modality=[modality] * len(counts),
    )


def _fitting(grid: Grid | None, count: int) -> Grid | None:
    return grid if grid is not None and math.prod(grid) == count else None


def choose(
    method: Method, rows: Tensor, width: int, segments: Segments, keep: list[int], norm: Norm | None = None,
    encoded: Encoded | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return bool `[n]`, True where a row stays, and the rows `[n, W]`, merged where the method merges.

    rows: `[n, W]`; the first `width` columns are what enters the language model, and all that the method sees. Further
    ones (features for deeper layers) are cut and merged alike. keep: how many rows of each segment must stay. encoded:
    what the vision tower says of the rows, for a method that asks for it.
    """
    tokens = VisualTokens(segments, keep, _Features(rows[:, :width], norm, encoded))
    with torch.no_grad():
        selection = method.select(tokens)
    stays = exact_keep(selection, segments, method, keep)
    if selection.assign is not None:
        rows = merge_tokens(rows[None], selection, segments, segments.position)[0]
    flat = torch.zeros(rows.shape[0] + 1, dtype=torch.bool, device=rows.device)
    flat.scatter_(0, torch.where(stays, segments.position, rows.shape[0]).flatten(), True)
    return flat[:-1], rows


def exact_keep(selection: Selection, segments: Segments, method: Method, keep: list[int]) -> Tensor:
    """Return the selection's `keep`, bool `[S, N]`; raises TokenPruneError unless it is as many as was asked for."""
    stays = checked_keep(selection, segments, method)
    counts = stays.sum(1).tolist()
    if counts != keep:
        raise TokenPruneError(
            f"it kept {counts} of {segments.counts} tokens where {keep} were asked for: the number has to follow from "
            "the shape alone"
        )
    return stays


def probe(method: Method) -> None:
    """Run `method` on made-up features; raises TokenPruneError if it reads what there is not, or keeps other numbers
    than it announces."""
    generator = torch.Generator().manual_seed(0)
    for counts, share in (([16], 0.25), ([9, 5], 0.6)):
        rows = torch.randn(sum(counts), 8, generator=generator)
        keep = [min(n, max(1, method.budget(n, max(1, round(n * share))))) for n in counts]
        choose(method, rows, 8, segments_of(counts, None, "image", rows.device), keep, encoded=_made_up(method, counts))


def _made_up(method: Method, counts: list[int]) -> Encoded:
    """What a tower might have said: each segment is a tile of one row."""
    cells = [[tile, 0, column, 1, count, 1] for tile, count in enumerate(counts) for column in range(count)]
    generator = torch.Generator().manual_seed(1)
    scores = {layer: torch.rand(len(cells), 2, generator=generator) for layer in method.encoder_layers}
    return Encoded(scores, Placed(torch.empty(len(cells), 0), torch.tensor(cells), len(counts)))
