# SPDX-License-Identifier: Apache-2.0
"""KV cache of the kept tokens: layers after the cut hold no blocks for dropped tokens (`experimental_free_kv`).

vLLM puts layers with one kind of KV cache into groups that share block tables. All groups take blocks from one pool.
The layers before and after the cut declare two kinds (`CutSpec`), so no group has layers of both. `CutManager` manages
the blocks of each group. The number of dropped tokens of an item depends only on its shape. So the manager knows it
when a request arrives, and never allocates the blocks. With prefix caching they are gaps in the table of the request,
which contain vLLM's null block and count as cache hits. Without prefix caching the table is shorter. `layout` reads the
table in the same way, whether blocks are freed or not.
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

# Gaps of the request that the prefix cache is searched for. vLLM calls a class method that does not get the request.
_gaps: ContextVar[frozenset[int]] = ContextVar("gaps", default=frozenset())


@dataclass(frozen=True, kw_only=True)
class CutSpec(FullAttentionSpec):
    """Full attention of a layer before or after the cut. The two kinds never share a group.

    Attributes:
        behind: Whether the layer is after the cut.
    """

    behind: bool = False

    @classmethod
    def merge(cls, specs: list[CutSpec]) -> CutSpec:
        """Return one spec for all layers. Raise AssertionError, as vLLM expects, if a layer is on the other side."""
        sides = {getattr(spec, "behind", None) for spec in specs}
        if len(sides) != 1:
            raise AssertionError("Layers before and after the cut cannot share a KV cache group.")
        return dataclasses.replace(super().merge(specs), behind=sides.pop())

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(isinstance(spec, CutSpec) and spec.behind == self.behind for spec in kv_cache_specs.values())


class CutManager(FullAttentionManager):
    """Blocks of a group of layers before or after the cut.

    Attributes:
        held: Request id -> blocks that the layers after the cut hold. Empty before the cut.
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
        num_columns = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        new_columns = range(num_columns, held.count_columns(num_tokens, self.block_size))
        return held.count_blocks(new_columns) + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        held = self.held.get(request_id)
        if held is None:
            return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        blocks = self.req_to_blocks[request_id]
        new_columns = range(len(blocks), held.count_columns(num_tokens, self.block_size))
        fresh = iter(self.block_pool.get_new_blocks(held.count_blocks(new_columns)))
        new = [self._null_block if column in held.gaps else next(fresh) for column in new_columns]
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
        hits: tuple[list[Any], ...] = tuple([] for _ in kv_cache_group_ids)
        for column in range(max_length // kv_cache_spec.block_size):
            if column in gaps:
                blocks = [block_pool.null_block] * len(hits)
            else:
                blocks = block_pool.get_cached_block(block_hashes[column], kv_cache_group_ids)
            if not blocks:
                break
            for group_blocks, block in zip(hits, blocks, strict=True):
                group_blocks.append(block)
        return hits, len(hits[0]) * kv_cache_spec.block_size


class CutBlockTracker:
    """Engine process: gives the managers after the cut the `CutBlocks` of each request.

    The managers need them before vLLM allocates the blocks of the request.

    Args:
        block: Size of the blocks if items lose complete blocks, or None if tokens are packed.
    """

    def __init__(self, kv_cache_manager: Any, block: int | None) -> None:
        managers = kv_cache_manager.coordinator.single_type_managers
        sides = [manager.kv_cache_spec.behind for manager in managers if isinstance(manager, CutManager)]
        if len(sides) != len(managers) or set(sides) != {False, True}:
            raise UnsupportedSetupError(
                f"{FREE_KV} needs separate KV cache groups before and after the cut, which vLLM did not make for this "
                f"model. Leave out {FREE_KV}."
            )
        self._block = block
        self._held: dict[str, CutBlocks] = {}
        for manager in managers:
            if manager.kv_cache_spec.behind:
                manager.held = self._held  # shared: the first group that frees a request removes its entry
        self._allocate = kv_cache_manager.allocate_slots
        kv_cache_manager.allocate_slots = self._allocate_held

    def _allocate_held(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._find_held(request)
        return self._allocate(request, *args, **kwargs)

    def _find_held(self, request: Any) -> CutBlocks:
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
        token = _gaps.set(self._find_held(request).gaps)
        try:
            yield
        finally:
            _gaps.reset(token)


def declare_cut(decoder: Any, layer: int) -> None:
    """Worker: let each layer of a decoder declare its side of a cut at the input of `layer`."""
    for index, module in enumerate(decoder.layers):
        attention = module.self_attn.attn
        attention.get_kv_cache_spec = functools.partial(_build_spec, attention.get_kv_cache_spec, index >= layer)


def _build_spec(original: Any, behind: bool, vllm_config: Any) -> CutSpec:
    spec = original(vllm_config)
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedModelError(
            f"{FREE_KV} needs full attention, and a layer of this model has {type(spec).__name__}. Leave out {FREE_KV}."
        )
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
    return CutSpec(**values, behind=behind)


KVCacheSpecRegistry._ensure_registered()  # otherwise vLLM does not register its own specs
KVCacheSpecRegistry.register(CutSpec, CutManager, CutSpec)
