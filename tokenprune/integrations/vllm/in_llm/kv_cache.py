# SPDX-License-Identifier: Apache-2.0
"""KV cache of the kept tokens: the layers after the cut hold no blocks for dropped ones (`experimental_free_kv`).

vLLM puts layers of one kind of KV cache into groups that share block tables, and all groups take blocks from one pool.
The layers before and after the cut declare two kinds (`CutSpec`), so no group has layers of both. Our manager
(`CutManager`) keeps the blocks of each group. The number of tokens an item loses follows from its shape, so the
manager knows it when a request comes in: it never takes the blocks, instead of giving them back later. With
prefix caching they are gaps in the request's table, which hold vLLM's null block and count as found in the cache;
without it the table is shorter. `layout` reads the table in the same way in both cases, freed or not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.in_llm.layout import CutBlocks, get_plans, split_pieces
from tokenprune.integrations.vllm.settings.keys import FREE_KV

# Gaps in the table of the request for which the prefix cache is being searched: vLLM asks a class, without a request.
_gaps: ContextVar[frozenset[int]] = ContextVar("gaps", default=frozenset())


@dataclass(frozen=True, kw_only=True)
class CutSpec(FullAttentionSpec):
    """Full attention of a layer before or after the cut. The two kinds never share a group. behind: True after it."""

    behind: bool = False

    @classmethod
    def merge(cls, specs: list[CutSpec]) -> CutSpec:
        """Return one for all; raises AssertionError, as vLLM expects, if there are layers of both kinds."""
        sides = {getattr(spec, "behind", None) for spec in specs}
        if len(sides) != 1:
            raise AssertionError("layers before and after the cut do not share a KV cache group")
        return dataclasses.replace(super().merge(specs), behind=sides.pop())

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(one, CutSpec) and one.behind == self.behind for one in kv_cache_specs.values())


class CutManager(FullAttentionManager):
    """Blocks of a group of layers, before or after the cut.

    held: by the id of a request with images, the blocks that the layers after the cut hold. Empty before the cut.
    """

    def __init__(self, kv_cache_spec: CutSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.held: dict[str, CutBlocks] = {}

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], *args: Any, **kwargs: Any
    ) -> int:
        held = self.held.get(request_id)
        if held is None:
            return super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args, **kwargs)
        there = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        wanted = range(there, held.count_columns(num_tokens, self.block_size))
        return held.count_blocks(wanted) + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        held = self.held.get(request_id)
        if held is None:
            return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        blocks = self.req_to_blocks[request_id]
        wanted = range(len(blocks), held.count_columns(num_tokens, self.block_size))
        fresh = iter(self.block_pool.get_new_blocks(held.count_blocks(wanted)))
        new = [self._null_block if column in held.gaps else next(fresh) for column in wanted]
        blocks.extend(new)
        return new

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self.held.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: CutSpec,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        gaps = _gaps.get() if kv_cache_spec.behind else frozenset()
        if not gaps:
            return super().find_longest_cache_hit(
                block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
            )
        found: tuple[list[Any], ...] = tuple([] for _ in kv_cache_group_ids)
        for column in range(max_length // kv_cache_spec.block_size):
            if column in gaps:
                blocks = [block_pool.null_block] * len(found)
            else:
                blocks = block_pool.get_cached_block(block_hashes[column], kv_cache_group_ids)
            if not blocks:
                break
            for one, block in zip(found, blocks, strict=True):
                one.append(block)
        return found, len(found[0]) * kv_cache_spec.block_size


class CutBlockTracker:
    """Engine process: give the managers after the cut each request's `Held`, before vLLM asks them for blocks."""

    def __init__(self, kv_cache_manager: Any, block: int | None) -> None:
        """block: size of the blocks of which items lose whole ones, or None where tokens are packed."""
        managers = kv_cache_manager.coordinator.single_type_managers
        sides = [manager.kv_cache_spec.behind for manager in managers if isinstance(manager, CutManager)]
        if len(sides) != len(managers) or set(sides) != {False, True}:
            raise UnsupportedSetupError(
                f"{FREE_KV} needs the layers before and after the cut in KV cache groups of their own, and vLLM made "
                f"others of this model's layers: leave {FREE_KV} out"
            )
        self._block = block
        self._held: dict[str, CutBlocks] = {}
        for manager in managers:
            if manager.kv_cache_spec.behind:
                manager.held = self._held  # one for all groups; the first that frees a request takes it out
        self._allocate = kv_cache_manager.allocate_slots
        kv_cache_manager.allocate_slots = self._allocate_held

    def _allocate_held(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._of(request)
        return self._allocate(request, *args, **kwargs)

    def _of(self, request: Any) -> CutBlocks:
        features = request.mm_features
        held = self._held.get(request.request_id, CutBlocks())
        if held.items != len(features):
            held = self._held[request.request_id] = CutBlocks.from_pieces(
                split_pieces(get_plans(features), self._block), self._block, len(features)
            )
        return held

    @contextmanager
    def search(self, request: Any) -> Iterator[None]:
        """Search the prefix cache for this request within the context."""
        before = _gaps.set(self._of(request).gaps)
        try:
            yield
        finally:
            _gaps.reset(before)


def declare_cut(decoder: Any, layer: int) -> None:
    """Worker: let each layer of a decoder declare its side of a cut at the input of `layer`."""
    for number, one in enumerate(decoder.layers):
        attention = one.self_attn.attn
        attention.get_kv_cache_spec = functools.partial(_spec, attention.get_kv_cache_spec, number >= layer)


def _spec(original: Any, behind: bool, vllm_config: Any) -> CutSpec:
    spec = original(vllm_config)
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedModelError(
            f"{FREE_KV} knows full attention, and a layer of this model has {type(spec).__name__}: leave {FREE_KV} out"
        )
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
    return CutSpec(**values, behind=behind)


KVCacheSpecRegistry._ensure_registered()  # else vLLM takes ours for all that there are
KVCacheSpecRegistry.register(CutSpec, CutManager, CutSpec)
