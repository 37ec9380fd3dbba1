# SPDX-License-Identifier: Apache-2.0
"""Observables of a vision tower: which blocks to read, and their values for patches and visual tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.errors import OptionError
from tokenprune.integrations.shared.towers.patch_grid import TracedTokens
from tokenprune.selection.method import Method, Pruner
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_bases import TowerBlock, TowerInput, TowerOutput
from tokenprune.selection.observable_registry import find_observable, select_observables
from tokenprune.selection.segments import Patches

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.kernels.observation import Observation

# (observable, layer that a method named) -> index of the block that is read.
BlockIndices = dict[tuple, int]
# (observable, block) -> values of each call, shape (rows, patches, channels).
BlockScores = dict[tuple[str, int], list["Tensor"]]
# Gathers the heads of all devices, (rows, heads, ...).
GatherHeads = Callable[["Tensor"], "Tensor"]

OUTPUT = -1  # index for the output of the tower, instead of a block


@dataclass(frozen=True)
class TowerValues:
    """Values of a tower for the visual tokens of all images of a call.

    Attributes:
        values: (observable, layer) or (observable,) -> values, shape (tokens, channels), float32.
        tokens: The visual tokens, traced to their patches.
    """

    values: dict[tuple, Tensor]
    tokens: TracedTokens

    @staticmethod
    def from_scores(
        tokens: TracedTokens, blocks: BlockIndices, scores: BlockScores, channels: list[int]
    ) -> TowerValues:
        """Split `tokens.scores` by observable.

        Args:
            tokens: The visual tokens and their scores.
            blocks: Block of each observable.
            scores: Scores of the blocks; only the keys are read.
            channels: Number of channels of each entry of `scores`, in order.
        """
        parts = dict(zip(scores, tokens.scores.split(channels, dim=-1), strict=True))
        return TowerValues({key: parts[key[0], block] for key, block in blocks.items()}, tokens)


def build_patches(cells: Tensor, mask: Tensor, tiles: int) -> Patches:
    """Return the patches of segments. Tile numbers start at 0 in each segment.

    Args:
        cells: Cell of each token, shape (segments, tokens, 6), int64; see `TracedTokens`.
        mask: Mask of the tokens, shape (segments, tokens), bool, False for padding.
        tiles: Number of tiles; see `TracedTokens`.
    """
    tile = cells[..., 0].masked_fill(~mask, -1)
    first = tile.masked_fill(tile < 0, torch.iinfo(torch.long).max).amin(1, keepdim=True)
    row, column, height, width, size = cells[..., 1:].unbind(-1)
    return Patches(torch.where(tile < 0, -1, tile - first), row, column, height, width, size, tiles)


def find_observed_blocks(method: Pruner, depth: int, config: Any) -> BlockIndices:
    """Return the block in which each observable of the tower is read.

    If a method needs no observable of a block, the entry ("patches",) names the last block that the model reads, which
    shows the number of patches.

    Raises:
        OptionError: If the method names a block that does not exist.
    """
    layers = {layer: find_block_index(method, layer, depth, config) for layer in method.encoder_layers}
    names = [observable.name for observable in select_observables(method.needs, ObservedAt.TOWER_BLOCK)]
    blocks: BlockIndices = {(name, layer): block for name in names for layer, block in layers.items()}
    outputs = [item for item in select_observables(method.needs, ObservedAt.TOWER) if isinstance(item, TowerOutput)]
    blocks |= {(observable.name,): OUTPUT for observable in outputs}
    return blocks or {("patches",): find_last_read_block(config, depth)}


def find_pixel_observables(method: Method) -> list[TowerInput]:
    """Return the observables of a token's pixels that a method needs."""
    return [
        observable
        for observable in select_observables(method.needs, ObservedAt.TOWER)
        if isinstance(observable, TowerInput)
    ]


def find_options_without_tower(method: Pruner, spell: Callable[[Any], str] = repr) -> str:
    """Return the options with which a method does not read the vision tower, or "" if there are none."""
    return method.fallback_hint(
        [observable.name for observable in select_observables(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)],
        spell,
    )


def get_tower_features(output: Any, config: Any) -> Tensor:
    """Return the input of the projector from the output of a tower, including class tokens.

    Returns:
        Features, shape (rows, tokens, channels), or (tokens, channels) for packed towers.
    """
    read = getattr(config, "vision_feature_layer", None)
    states = getattr(output, "hidden_states", None)
    if read is None or states is None:
        return output.last_hidden_state
    return states[read] if isinstance(read, int) else torch.cat([states[layer] for layer in read], dim=-1)


def create_block_scores(blocks: BlockIndices) -> BlockScores:
    """Return an empty list for the values of each observable and block."""
    return {(key[0], block): [] for key, block in blocks.items()}


def get_block_observable(name: str) -> TowerBlock:
    """Return the observable of tower blocks that is registered under `name`."""
    return cast(TowerBlock, find_observable(name))


def record_patches(
    scores: BlockScores, block: int, observation: Observation, protected: int, heads: GatherHeads = lambda x: x
) -> None:
    """Append the values of the patches for each observable of a block.

    Args:
        scores: Lists to append to.
    """
    for name, index in scores:
        if index == block:
            with torch.no_grad():
                values = heads(get_block_observable(name).compute_per_patch(observation, protected))
            values = values.transpose(1, 2).float()
            scores[name, index].append(values if values.ndim == 3 else values.flatten(2))


def find_block_index(method: Pruner, layer: int | float, depth: int, config: Any) -> int:
    """Return the index of the block that a method means by `layer`; see `Pruner.encoder_layers`.

    Args:
        layer: Index, or share of the depth that the model reads.

    Raises:
        OptionError: If the block does not exist, or attends in windows.
    """
    read = find_last_read_block(config, depth)
    # Blocks that attend in windows do not compare patches of different windows.
    full_blocks = getattr(config.vision_config, "fullatt_block_indexes", None) or range(depth)
    if isinstance(layer, float):
        if not 0 < layer < 1:
            raise OptionError(f"{method.name}: layer {layer} is not a share of the tower's depth. Use 0 < share < 1.")
        index = math.ceil(layer * (read + 1)) - 1
        return next((block for block in sorted(full_blocks) if block >= index), max(full_blocks))
    index = layer if layer >= 0 else read + 1 + layer
    if not 0 <= index < depth:
        raise OptionError(
            f"{method.name}: block {layer} does not exist. The vision tower has {depth} blocks, and the model reads "
            f"blocks 0 to {read}."
        )
    if index not in full_blocks:
        raise OptionError(
            f"{method.name}: block {index} of this tower attends in windows, so its scores are not comparable across "
            f"the image. Use one of {sorted(full_blocks)}."
        )
    return index


def find_last_read_block(config: Any, depth: int) -> int:
    """Return the index of the last block whose output the model reads."""
    read = getattr(config, "vision_feature_layer", getattr(config, "select_layer", None))
    # Indices of hidden states: 0 is the input of the tower, -1 the output of its last block.
    states = [-1] if read is None else [read] if isinstance(read, int) else list(read)
    return max(max(state if state >= 0 else depth + 1 + state for state in states) - 1, 0)
