# SPDX-License-Identifier: Apache-2.0
"""Select tokens among the features of images or videos, before the language model."""

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
from tokenprune.selection.apply import validate_selection
from tokenprune.selection.method import Pruner, Selection
from tokenprune.selection.observable import Backend, ObservedAt
from tokenprune.selection.observable_bases import TowerScores
from tokenprune.selection.observable_registry import compares_frames, select_observables
from tokenprune.selection.segments import Patches, Segments, Sizes, VisualView
from tokenprune.selection.source import Readable, TokenSource
from tokenprune.selection.tokens import VisualTokens

logger = logging.getLogger(__name__)

Grid = tuple[int, int, int]
GridOf = Callable[[int], Grid | None]
Norm = Callable[[Tensor], Tensor]


@lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    """Log a note of a method, once per text."""
    logger.info(text)


@dataclass(frozen=True)
class FeatureSource(TokenSource):
    """Source of a `VisualTokens` that has only the encoder's features.

    Attributes:
        hidden: Features of B equal items, shape (B, tokens, channels).
        needs: Observables that the method needs.
        encoded: Values of the vision tower, for methods that read them.
    """

    hidden: Tensor
    needs: frozenset[str]
    norm: Norm | None = None
    encoded: TowerValues | None = None

    def read(self, seen: Readable, tokens: VisualView, *layer: int | float) -> Any:
        if Backend.VLLM not in seen.backends:
            raise TokenPruneError(f"it reads {seen.name!r}, but in vLLM a method sees only the encoder's features")
        return super().read(seen, tokens, *layer)

    def note(self, text: str) -> None:
        _log_once(text)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)

    def read_tower(self, key: tuple, segments: Segments) -> Tensor:
        if self.encoded is None or key not in self.encoded.values:
            raise TokenPruneError(
                f"it reads {key[0]} of the vision tower ({', '.join(map(str, key[1:]))}), which was not observed. Add "
                "the layer to encoder_layers."
            )
        return self.encoded.values[key][segments.position].masked_fill(~segments.mask.unsqueeze(-1), 0)

    def patches(self, segments: Segments) -> Patches:
        if self.encoded is None:
            raise TokenPruneError("it reads the patches of tokens, but the vision tower was not read")
        tokens = self.encoded.tokens
        return build_patches(tokens.cells[segments.position], segments.mask, tokens.tiles)

    def gather(self, values: Tensor, position: Tensor, segments: Segments) -> Tensor:
        if position is segments.position and _is_contiguous(segments):
            return values.flatten(0, 1).unflatten(0, position.shape)
        return super().gather(values, position, segments)

    def get_embeddings(self, position: Tensor, segments: Segments) -> Tensor:
        return self.gather(self.hidden, position, segments)

    def find_text_after(self, segments: Segments) -> tuple[Tensor, Tensor]:
        raise TokenPruneError("it reads the text, but all prompts with an image share the features of the image")


def build_segments(
    counts: list[int], grid: Grid | None, modality: str, device: torch.device, guess: GridOf = lambda count: None,
    frames: list[list[int] | None] | None = None, items: int = 1,
) -> Segments:  # fmt: skip
    """Return one segment for each entry of `counts`, in the order of the rows, repeated for each item.

    Args:
        counts: Number of tokens of each segment of an item.
        grid: (frames, height, width) of an item with one segment, or with one segment per frame.
        guess: Returns the grid of an image by its number of tokens, if `grid` does not fit.
        frames: See `Segments`.
        items: Number of equal items.
    """
    index = torch.arange(max(counts), device=device)
    ends = list(itertools.accumulate(counts))
    if len(set(counts)) == 1:
        position = torch.arange(ends[-1], device=device).view(len(counts), -1)
        mask = torch.ones_like(position, dtype=torch.bool)
    else:
        start, limit = (to_device(values, device)[:, None] for values in ([0, *ends[:-1]], counts))
        mask = index < limit
        position = torch.where(mask, start + index, start)
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


def _is_contiguous(segments: Segments) -> bool:
    """Return True if `segments.position` lists all rows of an item in order, without padding."""
    return segments.position.numel() == sum(segments.counts)


def find_grid(grid: Grid | None, count: int, modality: str, guess: GridOf) -> Grid | None:
    """Return the grid of a segment: `grid` if it fits `count`, else the guess for an image."""
    if grid is not None and math.prod(grid) == count:
        return grid
    return guess(count) if modality == "image" else None


def choose(
    method: Pruner, rows: Tensor, width: int, segments: Segments, keep: list[int], norm: Norm | None = None,
    encoded: TowerValues | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select tokens of equal items.

    Args:
        rows: Features of all items, shape (n, columns). The method sees the first `width` columns, the input of the
            language model. The other columns are features for deeper layers.
        width: Width of the language model.
        keep: Number of kept rows of each segment.
        encoded: Values of the vision tower, for methods that read them.

    Returns:
        The mask of the kept rows, shape (n,), bool, and the rows, shape (n, columns), after merging.

    Raises:
        TokenPruneError: If the method does not keep the required number of rows.
    """
    item_rows = rows.unflatten(0, (segments.row[-1] + 1, -1))
    tokens = VisualTokens(segments, keep, FeatureSource(item_rows[:, :, :width], method.needs, norm, encoded))
    with torch.no_grad():
        selection = method.select(tokens)
    kept = check_keep(selection, segments, method, keep)
    indices = segments.position
    if segments.row[-1]:
        indices = indices + segments.row_index * item_rows.shape[1]
    if selection.assign is not None:
        rows = selection.apply(rows, indices, segments.mask)
    if _is_contiguous(segments):
        return kept.flatten(), rows
    # The last entry takes the values of padding.
    flat = torch.zeros(rows.shape[0] + 1, dtype=torch.bool, device=rows.device)
    flat.scatter_(0, torch.where(kept, indices, rows.shape[0]).flatten(), True)
    return flat[:-1], rows


def check_keep(selection: Selection, segments: Segments, method: Pruner, keep: list[int]) -> Tensor:
    """Return the mask of the kept tokens, shape (segments, tokens), bool.

    Raises:
        TokenPruneError: If the number of kept tokens is not `keep`.
    """
    kept, counts = validate_selection(selection, segments, method)
    if counts != keep:
        raise TokenPruneError(
            f"it kept {counts} of {segments.counts} tokens instead of {keep}. The number must depend only on the shape"
        )
    return kept


def probe(method: Pruner) -> None:
    """Run a method on random features.

    Raises:
        TokenPruneError: If it reads an observable that is not available, or does not keep its budget.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    for counts, share in (([16], 0.25), ([9, 5], 0.6)):
        rows = normal(sum(counts), method.fitted_width or 8, generator=generator)
        keep = [min(n, max(1, method.resolve_count(n, max(1, round(n * share))))) for n in counts]
        rehearse(method, rows, counts, keep, encoded=_draw_values(method, counts))


def rehearse(
    method: Pruner, rows: Tensor, counts: list[int], keep: list[int], grid: Grid | None = None,
    norm: Norm | None = None, encoded: TowerValues | None = None,
) -> None:  # fmt: skip
    """Run a method and the following kernel on random rows, as a check or to compile kernels before requests arrive.

    Args:
        counts: Number of rows of each segment.
        keep: Number of kept rows of each segment.
        grid: (frames, height, width), if there is one segment.
        encoded: Values of a vision tower, for methods that read them.
    """
    # An odd count leaves one token after the last frame.
    frames: list[list[int] | None] = [[n // 2] * 2 for n in counts]
    modality = "video" if compares_frames(method) else "image"
    segments = build_segments(counts, grid, modality, rows.device, frames=frames)
    kept, _ = choose(method, rows, rows.shape[1], segments, keep, norm, encoded)
    partition(kept[None])  # worker/rows.py calls this kernel next


def _draw_values(method: Pruner, counts: list[int]) -> TowerValues:
    """Return random values of a tower in which each segment is a tile of one row."""
    generator = torch.Generator("cpu").manual_seed(1)
    sizes = Sizes((sum(counts),))
    values = {}
    for observable in select_observables(method.needs, ObservedAt.TOWER_BLOCK):
        for layer in method.encoder_layers:
            example = observable.example(sizes, generator)[0]
            values[observable.name, layer] = example.T if isinstance(observable, TowerScores) else example
    return build_tile_values(values, counts)


def build_tile_values(values: dict[tuple, Tensor], counts: list[int]) -> TowerValues:
    """Return values of a tower in which each segment is a tile of one row."""
    cells = [[tile, 0, column, 1, count, 1] for tile, count in enumerate(counts) for column in range(count)]
    device = next((value.device for value in values.values()), torch.device("cpu"))
    scores = torch.zeros(len(cells), 0, dtype=torch.float32, device=device)
    return TowerValues(values, TracedTokens(scores, torch.tensor(cells, device=device), len(counts)))
