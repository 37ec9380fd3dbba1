# SPDX-License-Identifier: Apache-2.0
"""Observables of the vision tower, for methods that need "encoder_attention" or another one of its patches.

vLLM's towers use fused attention, which returns no weights. Its input is queries and keys after the rotary embedding,
so a hook there computes the observables of them, in chunks of rows. The tower's own work does not change. The block
to read, and the patches of a token, come from code shared with the Hugging Face side.
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
    """Stands at the attention of each of a tower's blocks, and reads those that a call asks for.

    model: vLLM's. Raises UnsupportedSetupError where its tower is not built as expected.
    """

    def __init__(self, model: Any) -> None:
        vision, tower = model.config.vision_config, get_tower(model.config)
        assert tower is not None  # `is_known` was asked
        self.served = PatchSource(model, model.config)
        self.protected, self.depth = tower.class_tokens, depth_of(vision)
        self.heads = heads_of(vision)
        self._seen: BlockScores = {}  # of the call that runs
        self._lengths: list[int] | None = None
        self._attentions = find_attentions(model)
        for index, attention in enumerate(self._attentions):
            attention.register_forward_pre_hook(partial(self._look, index), with_kwargs=True)

    @contextmanager
    def observe(self, methods: Sequence[Pruner], kwargs: Mapping[str, Any], modality: str) -> Iterator[BlockScores]:
        """Within, the blocks that `methods` name are read; yields what each showed, pieces `[rows, patches, C]`.

        kwargs: what `embed_multimodal` is called with.
        """
        seen: BlockScores = {}
        for method in methods:
            seen |= create_block_scores(self._blocks(method))
        self._seen, self._lengths = seen, self._sequences(kwargs, modality)
        try:
            yield seen
        finally:
            self._seen, self._lengths = {}, None

    def rehearse(self, method: Pruner, patches: int, device: torch.device, dtype: torch.dtype) -> dict[tuple, Tensor]:
        """Return what a method may read of a made-up image, each of whose tokens is a patch."""
        generator, blocks = torch.Generator("cpu").manual_seed(0), self._blocks(method)
        self._seen = seen = create_block_scores(blocks)
        try:
            for index, attention in enumerate(self._attentions):
                widths = [number * attention.head_size for number in (attention.num_heads, attention.num_kv_heads)]
                made = (normal(1, self.protected + patches, width, generator=generator) for width in widths)
                self._look(index, attention, tuple(one.to(device, dtype) for one in made), {})
        finally:
            self._seen = {}
        return {key: torch.cat(seen[key[0], block])[0] for key, block in blocks.items()}

    def get_values(
        self, method: Pruner, seen: BlockScores, index: int, outputs: Sequence[Tensor],
        kwargs: Mapping[str, Any], modality: str,
    ) -> TowerValues:  # fmt: skip
        """Return what a method may read of the item at `index` among `outputs`, the model's features of a call."""
        blocks = self._blocks(method)
        own = {key: seen[key] for key in create_block_scores(blocks)}
        if not all(own.values()):
            raise TokenPruneError(f"{method.name}: the vision tower showed no attention; pass pixels, not embeddings")
        # Sequences of different length lie end to end, tiles are rows.
        axis = 1 if self.served.family.patches in ("runs", "sized") else 0
        layers = [torch.cat(pieces, dim=axis) for pieces in own.values()]
        joined = torch.cat(layers, dim=-1)
        placed = self._place(joined, index, outputs, kwargs, modality)
        return TowerValues.from_scores(placed, blocks, own, [one.shape[-1] for one in layers])

    def _place(self, scores: Tensor, index: int, outputs: Sequence[Tensor], kwargs: Mapping, modality: str) -> Any:
        """scores: `[rows of the tower, patches, C]` of all items."""
        layout, packed = self.served.family.patches, None
        arguments: dict[str, Any] = {}
        if layout == "runs":
            grids = _grids(kwargs, modality)
            sizes = [t * h * w for t, h, w in grids]
            own = scores[:, sum(sizes[:index]) : sum(sizes[: index + 1])]
            arguments[f"{modality}_grid_thw"] = [grids[index]]
        elif layout == "sized":
            sizes = self._sequences(kwargs, modality) or []
            own = scores[:, sum(sizes[:index]) : sum(sizes[: index + 1])]
            if "image_grid_hws" in kwargs:  # Kimi-VL, whose pixels are patches
                arguments["image_grid_hws"] = [_sides(kwargs)[index]]
            else:
                arguments["pixel_values"] = kwargs["pixel_values"][index][None]
        elif layout == "packed":
            pixels = kwargs["pixel_values" if modality == "image" else "pixel_values_videos"]
            sizes = [len(one) for one in pixels]
            own = scores[sum(sizes[:index]) : sum(sizes[: index + 1])]
            arguments = {"pixel_values": pixels[index], "pixel_values_videos": [pixels[index]]}
            if modality == "image":
                size, count = kwargs["image_sizes"][index], own.shape[1]
                packed = pack(type(self.served.base), self.served.config, size, len(own), count, own.device)
        else:
            counts = [_rows(one) for one in outputs]
            each, rest = divmod(sum(counts), len(scores))  # tokens that every tile becomes
            if rest or any(count % each for count in counts):
                raise PlaceholderMismatchError(f"{len(scores)} tiles became {counts} tokens")
            start = sum(counts[:index]) // each
            own = scores[start : start + counts[index] // each]
        return trace_tokens(self.served, modality, arguments, _rows(outputs[index]), [own], packed)

    def _sequences(self, kwargs: Mapping[str, Any], modality: str) -> list[int] | None:
        """Lengths of the sequences that the tower lays end to end; None if it makes a row of each."""
        if self.served.family.patches == "runs":
            return [h * w for t, h, w in _grids(kwargs, modality) for _ in range(t)]
        if self.served.family.patches == "sized" and "image_grid_hws" in kwargs:
            return [height * width for height, width in _sides(kwargs)]
        if self.served.family.patches == "sized":
            patch = self.served.config.vision_config.patch_size
            sizes = [one.shape[-2:] for one in kwargs["pixel_values"]]
            return [(height // patch) * (width // patch) for height, width in sizes]
        return None

    def _blocks(self, method: Pruner) -> BlockIndices:
        return find_observed_blocks(method, self.depth, self.served.config)

    def _look(self, index: int, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if all(block != index for _, block in self._seen):
            return
        query, key = (kwargs[name] if name in kwargs else args[at] for at, name in enumerate(("query", "key")))
        query, key = (
            move_heads_first(x, heads) for x, heads in ((query, module.num_heads), (key, module.num_kv_heads))
        )
        lengths = self._lengths or [query.shape[2]]
        with torch.no_grad():
            pairs = zip(query.split(lengths, 2), key.split(lengths, 2), strict=True)
            for queries, keys in pairs:  # the sequences that lie end to end on one axis
                seen = Observation(queries, keys, None, module.scale, causal=False)
                record_patches(self._seen, index, seen, self.protected, partial(gather_heads, heads=self.heads))


def gather_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, H, ...]` of this device's heads -> of all `heads`, where they are spread over devices."""
    if x.shape[1] == heads:
        return x
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(x.contiguous(), dim=1)


def move_heads_first(x: Tensor, heads: int) -> Tensor:
    """`[B, N, H * Dh]` or `[B, N, H, Dh]` -> `[B, H, N, Dh]`."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def attend(
    attention: Any, bias: Tensor, query: Tensor, key: Tensor, value: Tensor, pieces: list[int] | None = None
) -> Tensor:
    """Return what PyTorch's attention makes of what a fused one got, `[B, N, H * Dh]` or `[B, N, H, Dh]`, with `bias`
    `[B, 1, 1, N]` on its logits. pieces: lengths of those that attend to themselves alone; None: all do to all."""
    pieces = pieces or [query.shape[1]]
    parts = (move_heads_first(x, attention.num_heads).split(pieces, dim=2) for x in (query, key, value))
    out = [
        nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=attention.scale)
        for q, k, v, added in zip(*parts, bias.to(query.dtype).split(pieces, dim=3), strict=True)
    ]
    return torch.cat(out, dim=2).transpose(1, 2).reshape(query.shape)


def _rows(features: Tensor) -> int:
    return features.numel() // features.shape[-1]


def _grids(kwargs: Mapping[str, Any], modality: str) -> list[tuple[int, int, int]]:
    return [tuple(torch.as_tensor(one, device="cpu").tolist()) for one in kwargs[f"{modality}_grid_thw"]]


def _sides(kwargs: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [tuple(torch.as_tensor(one, device="cpu").tolist()) for one in kwargs["image_grid_hws"]]


def find_attentions(model: nn.Module) -> list[Any]:
    """Return the fused attention of each block of a model's tower, in order; none if the server takes no images."""
    return [find_attentions_in_block(block)[0] for block in find_tower_blocks(model)]


def find_attentions_in_block(block: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.attention import MMEncoderAttention

    return [module for module in block.modules() if isinstance(module, MMEncoderAttention)]


def find_tower_blocks(model: nn.Module) -> Any:
    """Return the blocks of a model's tower, in order, each of which has one fused attention; none if the server takes
    no images. It is the list, a ModuleList, that the tower runs through."""
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
                takes = inspect.signature(MMEncoderAttention.forward_native).parameters
                if all(len(find_attentions_in_block(block)) == 1 for block in module) and {
                    "query",
                    "key",
                    "value",
                } <= set(takes):
                    return module
    raise UnsupportedSetupError(
        f"tokenprune does not find the attention that it knows of vLLM {TESTED} in the vision tower of "
        f"{type(model).__name__}; install that version, or leave out the tokenprune setting"
    )
