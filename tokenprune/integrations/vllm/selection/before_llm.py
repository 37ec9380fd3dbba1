# SPDX-License-Identifier: Apache-2.0
"""Let a method choose among the features of one image or video."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.towers.patch_grid import TracedTokens
from tokenprune.integrations.shared.towers.tower_scores import TowerValues, build_patches
from tokenprune.kernels.compact import partition
from tokenprune.kernels.host_random import normal
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.apply import merge_tokens, validate_selection
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.observable import Backend, ObservedAt, TowerScores
from tokenprune.selection.observable_registry import compares_frames, select_observables
from tokenprune.selection.segments import Patches, Segments, Sizes, VisualView
from tokenprune.selection.source import Readable, TokenSource
from tokenprune.selection.tokens import VisualTokens

logger = logging.getLogger(__name__)

Grid = tuple[int, int, int]
GridOf = Callable[[int], Grid | None]
Norm = Callable[[Tensor], Tensor]


@lru_cache(maxsize=256)
def _say(text: str) -> None:
    """Log a method's note, each text once."""
    logger.info(text)


@dataclass(frozen=True)
class _Features(TokenSource):
    """Source of a `VisualTokens` in which only the encoder's features are known.

    hidden: `[B, n, D]`, the rows of B items that are alike.
    """

    hidden: Tensor
    needs: frozenset[str]
    norm: Norm | None = None
    encoded: TowerValues | None = None

    def read(self, seen: Readable, tokens: VisualView, *layer: int | float) -> Any:
        if Backend.VLLM not in seen.backends:
            raise TokenPruneError(f"it reads {seen.name!r}, and vLLM gives a method nothing but the encoder's features")
        return super().read(seen, tokens, *layer)

    def note(self, text: str) -> None:
        _say(text)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)

    def read_tower(self, key: tuple, segments: Segments) -> Tensor:
        if self.encoded is None or key not in self.encoded.values:
            raise TokenPruneError(
                f"it reads {key[0]} of the vision tower ({', '.join(map(str, key[1:]))}), which was not read: a method "
                "names in its encoder_layers all that it reads"
            )
        return self.encoded.values[key][segments.position].masked_fill(~segments.mask.unsqueeze(-1), 0)

    def patches(self, segments: Segments) -> Patches:
        if self.encoded is None:
            raise TokenPruneError("it reads which patches tokens are made of, and the vision tower was not read")
        placed = self.encoded.tokens
        return build_patches(placed.cells[segments.position], segments.mask, placed.tiles)

    def gather(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        if position is segments.position and _all_in_order(segments):
            return values.flatten(0, 1).unflatten(0, position.shape)
        return super().gather(values, position, segments)

    def get_embeddings(self, position: Tensor, segments: Segments) -> Tensor:
        return self.gather(self.hidden, position, segments)

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        raise TokenPruneError("it reads the text, but an image's features are shared by all prompts that hold it")


def build_segments(
    counts: list[int], grid: Grid | None, modality: str, device: torch.device, guess: GridOf = lambda count: None,
    frames: list[list[int] | None] | None = None, items: int = 1,
) -> Segments:  # fmt: skip
    """Return one segment for each entry of `counts`, in the order of the rows, for each of `items` that are alike.

    grid: (frames, height, width) of an item that is one segment, or whose frames are one each. guess: tells of
    an image's number of tokens its grid, where `grid` does not. frames: see `Segments`.
    """
    place = torch.arange(max(counts), device=device)
    ends = list(itertools.accumulate(counts))
    if len(set(counts)) == 1:
        position = torch.arange(ends[-1], device=device).view(len(counts), -1)
        mask = torch.ones_like(position, dtype=torch.bool)
    else:
        start, limit = (to_device(of, device)[:, None] for of in ([0, *ends[:-1]], counts))
        mask = place < limit
        position = torch.where(mask, start + place, start)
    if grid is not None and len(counts) == grid[0]:
        grid = (1, *grid[1:])
    return Segments(
        row=[item for item in range(items) for _ in counts],
        ordinal=list(range(len(counts))) * items,
        counts=counts * items,
        position=position.repeat(items, 1),
        mask=mask.repeat(items, 1),
        grids=[find_grid(grid, count, modality, guess) for count in counts] * items,
        modality=[modality] * len(counts) * items,
        frames=(frames or []) * items,
    )


def _all_in_order(segments: Segments) -> bool:
    """Return True if `segments.position` holds the rows of the item one after the other: there is no padding."""
    return segments.position.numel() == sum(segments.counts)


def find_grid(grid: Grid | None, count: int, modality: str, guess: GridOf) -> Grid | None:
    """Return the grid of a segment of `count` tokens: its item's if that fits, else an image's by their number."""
    if grid is not None and math.prod(grid) == count:
        return grid
    return guess(count) if modality == "image" else None


def choose(
    method: Pruner, rows: Tensor, width: int, segments: Segments, keep: list[int], norm: Norm | None = None,
    encoded: TowerValues | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return bool `[n]`, True where a row stays, and the rows `[n, W]`, merged where the method merges.

    rows: `[n, W]`, of all items; the first `width` columns are what enters the language model, and all that the method
    sees. Further ones (features for deeper layers) are cut and merged alike. keep: how many rows of each segment must
    stay. encoded: what the vision tower says of the rows, for a method that asks for it.
    """
    of_items = rows.unflatten(0, (segments.row[-1] + 1, -1))
    tokens = VisualTokens(segments, keep, _Features(of_items[:, :, :width], method.needs, norm, encoded))
    with torch.no_grad():
        selection = method.select(tokens)
    stays = check_keep(selection, segments, method, keep)
    places = segments.position
    if segments.row[-1]:
        places = places + segments.row_index * of_items.shape[1]
    if selection.assign is not None:
        rows = merge_tokens(of_items, selection, segments, places).flatten(0, 1)
    if _all_in_order(segments):
        return stays.flatten(), rows
    flat = torch.zeros(rows.shape[0] + 1, dtype=torch.bool, device=rows.device)
    flat.scatter_(0, torch.where(stays, places, rows.shape[0]).flatten(), True)
    return flat[:-1], rows


def check_keep(selection: Selection, segments: Segments, method: Pruner, keep: list[int]) -> Tensor:
    """Return the selection's `keep`, bool `[S, N]`; raises TokenPruneError unless it is as many as was asked for."""
    stays, counts = validate_selection(selection, segments, method)
    if counts != keep:
        raise TokenPruneError(
            f"it kept {counts} of {segments.counts} tokens where {keep} were asked for: the number has to follow from "
            "the shape alone"
        )
    return stays


def probe(method: Pruner) -> None:
    """Run `method` on made-up features. Raise TokenPruneError if it reads an observable that is not there, or keeps
    another number of tokens than its budget."""
    generator = torch.Generator("cpu").manual_seed(0)
    for counts, share in (([16], 0.25), ([9, 5], 0.6)):
        rows = normal(sum(counts), 8, generator=generator)
        keep = [min(n, max(1, method.resolve_count(n, max(1, round(n * share))))) for n in counts]
        rehearse(method, rows, counts, keep, encoded=_made_up(method, counts))


def rehearse(
    method: Pruner, rows: Tensor, counts: list[int], keep: list[int], grid: Grid | None = None,
    norm: Norm | None = None, encoded: TowerValues | None = None,
) -> None:  # fmt: skip
    """Let `method` choose among made-up `rows` `[sum(counts), D]`. encoded: of a vision tower, if it reads one."""
    # What an odd number leaves over is after the last frame.
    frames: list[list[int] | None] = [[n // 2] * 2 for n in counts]
    modality = "video" if compares_frames(method) else "image"
    segments = build_segments(counts, grid, modality, rows.device, frames=frames)
    kept, _ = choose(method, rows, rows.shape[1], segments, keep, norm, encoded)
    partition(kept[None])  # as the rows are put together, see worker/rows.py


def _made_up(method: Pruner, counts: list[int]) -> TowerValues:
    """Return made-up output of a tower in which each segment is a tile of one row."""
    generator = torch.Generator("cpu").manual_seed(1)
    sizes = Sizes((sum(counts),))
    values = {}
    for one in select_observables(method.needs, ObservedAt.TOWER_BLOCK):
        for layer in method.encoder_layers:
            example = one.example(sizes, generator)[0]
            values[one.name, layer] = example.T if isinstance(one, TowerScores) else example
    return build_tile_values(values, counts)


def build_tile_values(values: dict[tuple, Tensor], counts: list[int]) -> TowerValues:
    """Return values of a tower in which each segment is a tile of one row."""
    cells = [[tile, 0, column, 1, count, 1] for tile, count in enumerate(counts) for column in range(count)]
    device = next((one.device for one in values.values()), torch.device("cpu"))
    scores = torch.zeros(len(cells), 0, dtype=torch.float32, device=device)
    return TowerValues(values, TracedTokens(scores, torch.tensor(cells, device=device), len(counts)))
