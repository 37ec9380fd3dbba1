# SPDX-License-Identifier: Apache-2.0
"""Scores that blocks of a vision tower give to patches, and to the visual tokens that these become."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.errors import OptionError
from tokenprune.integrations.shared.towers.patch_grid import TracedTokens
from tokenprune.selection.method import Method, Pruner
from tokenprune.selection.observable import ObservedAt, TowerBlock, TowerInput, TowerOutput
from tokenprune.selection.observable_registry import find_observable, select_observables
from tokenprune.selection.segments import Patches

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.kernels.observation import Observation

# The block in which an observable is read, by its name and the layer that a method named.
BlockIndices = dict[tuple, int]


BlockScores = dict[tuple[str, int], list["Tensor"]]


OUTPUT = -1  # in the place of a block: the tower's output


GatherHeads = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True)
class TowerValues:
    """Values read of visual tokens, all images of a call end to end.

    values: `[tokens, C]`, float32, by name of the observable, with the layer that a method named if it is read by
    layer.
    """

    values: dict[tuple, Tensor]
    tokens: TracedTokens

    @staticmethod
    def from_scores(tokens: TracedTokens, blocks: BlockIndices, seen: BlockScores, channels: list[int]) -> TowerValues:
        """Return what `placed.scores` holds. channels: how many of them belong to each entry of `seen`, in order."""
        parts = dict(zip(seen, tokens.scores.split(channels, dim=-1), strict=True))
        return TowerValues({key: parts[key[0], block] for key, block in blocks.items()}, tokens)


def build_patches(cells: Tensor, mask: Tensor, tiles: int) -> Patches:
    """cells: long `[S, N, 6]`, tiles: see `Placed`; mask: bool `[S, N]`, False for padding. Each segment's tiles are
    numbered from 0."""
    tile = cells[..., 0].masked_fill(~mask, -1)
    first = tile.masked_fill(tile < 0, torch.iinfo(torch.long).max).amin(1, keepdim=True)
    row, column, height, width, size = cells[..., 1:].unbind(-1)
    return Patches(torch.where(tile < 0, -1, tile - first), row, column, height, width, size, tiles)


def find_observed_blocks(method: Pruner, depth: int, config: Any) -> BlockIndices:
    """Return which of a tower's `depth` blocks each observable of the tower that a method needs is read in; without
    any, the last block that the model reads: it tells how many patches there are. config: of the whole model.

    Raises OptionError for blocks that there are not.
    """
    layers = {layer: find_block_index(method, layer, depth, config) for layer in method.encoder_layers}
    names = [one.name for one in select_observables(method.needs, ObservedAt.TOWER_BLOCK)]
    found: BlockIndices = {(name, layer): block for name in names for layer, block in layers.items()}
    outputs = [one for one in select_observables(method.needs, ObservedAt.TOWER) if isinstance(one, TowerOutput)]
    found |= {(one.name,): OUTPUT for one in outputs}
    return found or {("patches",): find_last_read_block(config, depth)}


def find_pixel_observables(method: Method) -> list[TowerInput]:
    """Return the observables of a token's pixels that a method needs."""
    return [one for one in select_observables(method.needs, ObservedAt.TOWER) if isinstance(one, TowerInput)]


def find_options_without_tower(method: Pruner, spell: Callable[[Any], str] = repr) -> str:
    """Return the options under which a method reads nothing of the vision tower; empty if there are none. spell: how
    a value is written."""
    return method.fallback_hint(
        [one.name for one in select_observables(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)], spell
    )


def get_tower_features(output: Any, config: Any) -> Tensor:
    """Return what the projector gets of a tower's output, class tokens included, `[rows, tokens, Dv]` or, where images
    lie end to end, `[tokens, Dv]`. config: of the whole model."""
    read = getattr(config, "vision_feature_layer", None)
    states = getattr(output, "hidden_states", None)
    if read is None or states is None:
        return output.last_hidden_state
    return states[read] if isinstance(read, int) else torch.cat([states[one] for one in read], dim=-1)


def create_block_scores(blocks: BlockIndices) -> BlockScores:
    """Return a place for what each observable shows in each of its blocks: pieces `[rows, patches, C]`."""
    return {(key[0], block): [] for key, block in blocks.items()}


def get_block_observable(name: str) -> TowerBlock:
    """Return the observable of a tower's block that is registered under `name`."""
    return cast(TowerBlock, find_observable(name))


def record_patches(
    seen: BlockScores, block: int, observation: Observation, protected: int, heads: GatherHeads = lambda x: x
) -> None:
    """Add to `seen` what its observables of a block say of patches. protected: class tokens in front of them. heads:
    brings `[rows, H, ...]` of all devices together."""
    for name, index in seen:
        if index == block:
            with torch.no_grad():
                found = heads(get_block_observable(name).compute_per_patch(observation, protected))
            found = found.transpose(1, 2).float()
            seen[name, index].append(found if found.ndim == 3 else found.flatten(2))


def find_block_index(method: Pruner, layer: int | float, depth: int, config: Any) -> int:
    """Return which of a tower's `depth` blocks a method means by `layer`; see `Pruner.encoder_layers`.

    config: of the whole model. Raises OptionError for blocks that there are not.
    """
    read = find_last_read_block(config, depth)
    # Blocks that attend in windows do not compare one window's patches with another's.
    whole = getattr(config.vision_config, "fullatt_block_indexes", None) or range(depth)
    if isinstance(layer, float):
        if not 0 < layer < 1:
            raise OptionError(f"{method.name}: {layer} is no share of the vision tower's depth: use 0 < share < 1")
        index = math.ceil(layer * (read + 1)) - 1
        return next((block for block in sorted(whole) if block >= index), max(whole))
    index = layer if layer >= 0 else read + 1 + layer
    if not 0 <= index < depth:
        raise OptionError(
            f"{method.name}: the vision tower has {depth} blocks, of which the model reads up to number {read}; "
            f"there is no block {layer}"
        )
    if index not in whole:
        raise OptionError(
            f"{method.name}: block {index} of this tower attends in windows, so that its scores do not compare "
            f"patches of the whole image; use one of {sorted(whole)}"
        )
    return index


def find_last_read_block(config: Any, depth: int) -> int:
    """Return the index of the last block whose output the model reads."""
    read = getattr(config, "vision_feature_layer", getattr(config, "select_layer", None))
    # Numbers of hidden states: 0 is the tower's input, -1 the output of its last block.
    states = [-1] if read is None else [read] if isinstance(read, int) else list(read)
    return max(max(state if state >= 0 else depth + 1 + state for state in states) - 1, 0)
