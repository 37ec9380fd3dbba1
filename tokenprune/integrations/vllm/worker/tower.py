# SPDX-License-Identifier: Apache-2.0
"""Observables of the vision tower, for methods that need "encoder_attention" or other values of its patches.

The fused attention of vLLM's towers does not return weights. A hook computes the observables from its inputs (queries
and keys after the rotary embedding) in chunks of rows. The computation of the tower does not change. Code shared with
transformers chooses the blocks to read and traces tokens to patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.errors import PlaceholderMismatchError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.shared.towers.patch_grid import PatchSource, trace_tokens
from tokenprune.integrations.shared.towers.tower_scores import (
    BlockIndices,
    BlockScores,
    TowerValues,
    create_block_scores,
    find_observed_blocks,
    record_patches,
)
from tokenprune.integrations.vllm.compat import TESTED
from tokenprune.integrations.vllm.settings.tower_items import pack
from tokenprune.integrations.vllm.settings.towers import depth_of, heads_of
from tokenprune.kernels.host_random import normal
from tokenprune.kernels.observation import Observation
from tokenprune.models.families import get_tower
from tokenprune.selection.method import Pruner


class TowerReader:
    """Computes the values that methods read from the vision tower, in hooks on the attention of its blocks.

    Raises:
        UnsupportedSetupError: If the tower is not built as expected.
    """

    def __init__(self, model: Any) -> None:
        vision, tower = model.config.vision_config, get_tower(model.config)
        assert tower is not None  # see `is_known`
        self.served = PatchSource(model, model.config)
        self.protected, self.depth = tower.class_tokens, depth_of(vision)
        self.heads = heads_of(vision)
        self._scores: BlockScores = {}  # of the current call
        self._lengths: list[int] | None = None
        self._attentions = find_attentions(model)
        for index, attention in enumerate(self._attentions):
            attention.register_forward_pre_hook(partial(self._observe, index), with_kwargs=True)

    @contextmanager
    def observe(self, methods: Sequence[Pruner], kwargs: Mapping[str, Any], modality: str) -> Iterator[BlockScores]:
        """Read the blocks that `methods` need within the context, and yield their values."""
        scores: BlockScores = {}
        for method in methods:
            scores |= create_block_scores(self._find_blocks(method))
        self._scores, self._lengths = scores, self._get_lengths(kwargs, modality)
        try:
            yield scores
        finally:
            self._scores, self._lengths = {}, None

    def rehearse(self, method: Pruner, patches: int, device: torch.device, dtype: torch.dtype) -> dict[tuple, Tensor]:
        """Return the values that a method may read from the tower, for random queries and keys of one image.

        Used to warm up methods. Each patch is one visual token.
        """
        generator, blocks = torch.Generator("cpu").manual_seed(0), self._find_blocks(method)
        self._scores = scores = create_block_scores(blocks)
        try:
            for index, attention in enumerate(self._attentions):
                widths = [count * attention.head_size for count in (attention.num_heads, attention.num_kv_heads)]
                drawn = (normal(1, self.protected + patches, width, generator=generator) for width in widths)
                self._observe(index, attention, tuple(x.to(device, dtype) for x in drawn), {})
        finally:
            self._scores = {}
        return {key: torch.cat(scores[key[0], block])[0] for key, block in blocks.items()}

    def get_values(
        self, method: Pruner, scores: BlockScores, index: int, outputs: Sequence[Tensor],
        kwargs: Mapping[str, Any], modality: str,
    ) -> TowerValues:  # fmt: skip
        """Return the values that a method may read of one item.

        Args:
            scores: Values that `observe` yielded.

        Raises:
            TokenPruneError: If the tower did not run, because the request has embeddings.
            PlaceholderMismatchError: If the features do not fit the tiles.
        """
        blocks = self._find_blocks(method)
        selected = {key: scores[key] for key in create_block_scores(blocks)}
        if not all(selected.values()):
            raise TokenPruneError(
                f"{method.name} reads the vision tower, which did not run. Pass pixels, not embeddings."
            )
        # Sequences of different length are concatenated, tiles are rows.
        axis = 1 if self.served.family.patches in ("runs", "sized") else 0
        layers = [torch.cat(pieces, dim=axis) for pieces in selected.values()]
        joined = torch.cat(layers, dim=-1)
        tokens = self._trace(joined, index, outputs, kwargs, modality)
        return TowerValues.from_scores(tokens, blocks, selected, [layer.shape[-1] for layer in layers])

    def _trace(self, scores: Tensor, index: int, outputs: Sequence[Tensor], kwargs: Mapping, modality: str) -> Any:
        """Trace the tokens of one item to patches.

        Args:
            scores: Scores of all items, shape (rows of the tower, patches, channels).
        """
        layout, packed = self.served.family.patches, None
        arguments: dict[str, Any] = {}
        if layout == "runs":
            grids = _get_grids(kwargs, modality)
            sizes = [frames * height * width for frames, height, width in grids]
            item = scores[:, sum(sizes[:index]) : sum(sizes[: index + 1])]
            arguments[f"{modality}_grid_thw"] = [grids[index]]
        elif layout == "sized":
            sizes = self._get_lengths(kwargs, modality) or []
            item = scores[:, sum(sizes[:index]) : sum(sizes[: index + 1])]
            if "image_grid_hws" in kwargs:  # Kimi-VL, whose pixels are patches
                arguments["image_grid_hws"] = [_get_sizes(kwargs)[index]]
            else:
                arguments["pixel_values"] = kwargs["pixel_values"][index][None]
        elif layout == "packed":
            pixels = kwargs["pixel_values" if modality == "image" else "pixel_values_videos"]
            sizes = [len(item_features) for item_features in pixels]
            item = scores[sum(sizes[:index]) : sum(sizes[: index + 1])]
            arguments = {"pixel_values": pixels[index], "pixel_values_videos": [pixels[index]]}
            if modality == "image":
                size, count = kwargs["image_sizes"][index], item.shape[1]
                packed = pack(type(self.served.base), self.served.config, size, len(item), count, item.device)
        else:
            counts = [_count_rows(item_features) for item_features in outputs]
            tokens_per_tile, rest = divmod(sum(counts), len(scores))
            if rest or any(count % tokens_per_tile for count in counts):
                raise PlaceholderMismatchError(
                    f"{len(scores)} tiles have {counts} tokens. Each tile must have equally many."
                )
            start = sum(counts[:index]) // tokens_per_tile
            item = scores[start : start + counts[index] // tokens_per_tile]
        return trace_tokens(self.served, modality, arguments, _count_rows(outputs[index]), [item], packed)

    def _get_lengths(self, kwargs: Mapping[str, Any], modality: str) -> list[int] | None:
        """Return the length of each sequence that the tower concatenates, or None if each is a row."""
        if self.served.family.patches == "runs":
            return [height * width for frames, height, width in _get_grids(kwargs, modality) for _ in range(frames)]
        if self.served.family.patches == "sized" and "image_grid_hws" in kwargs:
            return [height * width for height, width in _get_sizes(kwargs)]
        if self.served.family.patches == "sized":
            patch = self.served.config.vision_config.patch_size
            sizes = [image.shape[-2:] for image in kwargs["pixel_values"]]
            return [(height // patch) * (width // patch) for height, width in sizes]
        return None

    def _find_blocks(self, method: Pruner) -> BlockIndices:
        return find_observed_blocks(method, self.depth, self.served.config)

    def _observe(self, index: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if all(block != index for _, block in self._scores):
            return
        names = enumerate(("query", "key"))
        query, key = (kwargs[name] if name in kwargs else args[position] for position, name in names)
        query, key = (
            move_heads_first(x, heads) for x, heads in ((query, module.num_heads), (key, module.num_kv_heads))
        )
        lengths = self._lengths or [query.shape[2]]
        with torch.no_grad():
            pairs = zip(query.split(lengths, 2), key.split(lengths, 2), strict=True)
            for queries, keys in pairs:  # the concatenated sequences
                observation = Observation(queries, keys, None, module.scale, causal=False)
                gather = partial(gather_heads, heads=self.heads)
                record_patches(self._scores, index, observation, self.protected, gather)


def gather_heads(x: Tensor, heads: int) -> Tensor:
    """Gather the heads of all devices, (batch, local heads, ...) -> (batch, heads, ...)."""
    if x.shape[1] == heads:
        return x
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(x.contiguous(), dim=1)


def move_heads_first(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads * width) or (batch, tokens, heads, width) -> (batch, heads, tokens, width)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def attend(
    attention: Any, bias: Tensor, query: Tensor, key: Tensor, value: Tensor, pieces: list[int] | None = None
) -> Tensor:
    """Run PyTorch's attention on the inputs of a fused attention, with a bias.

    Args:
        bias: Bias of the logits, shape (batch, 1, 1, tokens).
        pieces: Lengths of the sequences that attend only to themselves. None for a single sequence.

    Returns:
        Output, in the shape of `query`.
    """
    pieces = pieces or [query.shape[1]]
    parts = (move_heads_first(x, attention.num_heads).split(pieces, dim=2) for x in (query, key, value))
    out = [
        nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=part_bias, scale=attention.scale)
        for q, k, v, part_bias in zip(*parts, bias.to(query.dtype).split(pieces, dim=3), strict=True)
    ]
    return torch.cat(out, dim=2).transpose(1, 2).reshape(query.shape)


def _count_rows(features: Tensor) -> int:
    return features.numel() // features.shape[-1]


def _get_grids(kwargs: Mapping[str, Any], modality: str) -> list[tuple[int, int, int]]:
    return [tuple(torch.as_tensor(grid, device="cpu").tolist()) for grid in kwargs[f"{modality}_grid_thw"]]


def _get_sizes(kwargs: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [tuple(torch.as_tensor(size, device="cpu").tolist()) for size in kwargs["image_grid_hws"]]


def find_attentions(model: nn.Module) -> list[Any]:
    """Return the fused attention of each block of a model's tower, or an empty list if the server takes no images."""
    return [find_attentions_in_block(block)[0] for block in find_tower_blocks(model)]


def find_attentions_in_block(block: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.attention import MMEncoderAttention

    return [module for module in block.modules() if isinstance(module, MMEncoderAttention)]


def find_tower_blocks(model: nn.Module) -> Any:
    """Return the ModuleList of a tower's blocks, each with one fused attention, or [] if the server takes no images.

    Raises:
        UnsupportedSetupError: If no such list exists.
    """
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.models.utils import StageMissingLayer

    for base in (model, getattr(model, "model", None)):
        for name in ("vision_tower", "visual", "vision_model"):
            tower = getattr(base, name, None)
            if isinstance(tower, StageMissingLayer):
                return []
            for module in tower.modules() if tower is not None else ():
                if not isinstance(module, nn.ModuleList) or not len(module):
                    continue
                parameters = inspect.signature(MMEncoderAttention.forward_native).parameters
                if all(len(find_attentions_in_block(block)) == 1 for block in module) and {
                    "query",
                    "key",
                    "value",
                } <= set(parameters):
                    return module
    raise UnsupportedSetupError(
        f"The vision tower of {type(model).__name__} does not have the attention layers of vLLM {TESTED}. Install that "
        "version, or leave out the tokenprune setting."
    )
