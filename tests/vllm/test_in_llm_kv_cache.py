# SPDX-License-Identifier: Apache-2.0
"""KV cache of the layers behind the cut, without an engine: groups of layers, and who holds how many blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from test_in_llm_limits import DART, engine_config
from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.in_llm import kv_cache
from tokenprune.integrations.vllm.in_llm.kv_cache import CutBlockTracker, CutManager, CutSpec, declare_cut
from tokenprune.integrations.vllm.in_llm.layout import CutBlocks, VisualPiece

BLOCK = 16
SHAPE = dict(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)


def manager(blocks: int = 200, behind: bool = True, caching: bool = True) -> CutManager:
    pool = BlockPool(blocks, caching, BLOCK)
    return CutManager(
        CutSpec(**SHAPE, behind=behind), block_pool=pool, enable_caching=caching, kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )  # fmt: skip


def prompt(draw: random.Random, aligned: bool) -> tuple[int, list[VisualPiece]]:
    """Its tokens, and the images in it."""
    end, pieces = draw.randrange(40), []
    for ordinal in range(draw.randrange(4)):
        count = draw.choice([10, 33, 100, 256])
        wanted = draw.randrange(1, count + 1)
        keep = count - BLOCK * max(0, min((count - wanted) // BLOCK, count // BLOCK - 1)) if aligned else wanted
        pieces.append(VisualPiece(tuple(range(end, end + count)), keep, ordinal, ordinal, "image"))
        end += count + draw.randrange(50)
    return end + 1, pieces


@pytest.mark.parametrize("aligned", [True, False], ids=["whole blocks", "packed"])
def test_what_is_asked_for_is_what_is_taken_and_comes_back(aligned: bool) -> None:
    one = manager(caching=aligned)
    pool, all_free, saved = one.block_pool, one.block_pool.get_num_free_blocks(), 0
    for seed in range(50):
        draw = random.Random(seed)
        tokens, pieces = prompt(draw, aligned)
        if pieces:
            one.held["it"] = CutBlocks.from_pieces(pieces, BLOCK if aligned else None, len(pieces))
        ends = {end for piece in pieces for end in (piece.start, piece.end)} | {tokens, tokens + 30, tokens + 31}
        for end in sorted(ends - {0}):
            asked = one.get_num_blocks_to_allocate("it", end, [], 0, 0, end, apply_admission_cap=True, prefill_end=0)
            free = pool.get_num_free_blocks()
            new = one.allocate_new_blocks("it", end, end)
            assert free - pool.get_num_free_blocks() == asked == sum(not block.is_null for block in new)
        left = tokens + 31 - sum(piece.drop for piece in pieces)
        assert all_free - pool.get_num_free_blocks() == -(-left // BLOCK)
        saved += -(-(tokens + 31) // BLOCK) - -(-left // BLOCK)
        one.free("it")
        assert pool.get_num_free_blocks() == all_free and not one.held
    assert saved > 100


def test_gaps_count_as_found_in_the_prefix_cache() -> None:
    one, hashes = manager(), [BlockHash(bytes([number])) for number in range(8)]
    one.held["it"] = CutBlocks(frozenset({2, 3, 5}), items=1)
    one.allocate_new_blocks("it", 8 * BLOCK, 8 * BLOCK)
    request = SimpleNamespace(request_id="it", block_hashes=hashes, shared_prefix_boundary=0)
    one.cache_blocks(request, 7 * BLOCK, replay_boundaries=())
    table = list(one.req_to_blocks["it"])

    def find(gaps: set[int], tokens: int = 8 * BLOCK, of: CutManager = one) -> tuple[list[Any], int]:
        before = kv_cache._gaps.set(frozenset(gaps))
        (blocks,), hit = CutManager.find_longest_cache_hit(
            block_hashes=hashes, max_length=tokens, kv_cache_group_ids=[0], block_pool=one.block_pool,
            kv_cache_spec=of.kv_cache_spec, drop_eagle_block=False, alignment_tokens=BLOCK,
        )  # fmt: skip
        kv_cache._gaps.reset(before)
        return blocks, hit

    assert find({2, 3, 5}) == (table[:7], 7 * BLOCK)
    assert find({2, 3, 5}, 5 * BLOCK + 1) == (table[:5], 5 * BLOCK)
    assert find({2}) == (table[:3], 3 * BLOCK) and find(set()) == (table[:2], 2 * BLOCK)
    assert find({2, 3, 5}, of=manager(behind=False)) == (table[:2], 2 * BLOCK)  # before the cut all are held
    # Who finds them takes the others, and they are there for the next one when all are gone.
    one.held["next"] = one.held["it"]
    asked = one.get_num_blocks_to_allocate("next", 8 * BLOCK, table[:7], 7 * BLOCK, 7 * BLOCK, 8 * BLOCK)
    one.add_local_computed_blocks("next", table[:7], 7 * BLOCK, 0)
    assert asked == len(one.allocate_new_blocks("next", 8 * BLOCK, 8 * BLOCK)) == 1
    one.free("it")
    one.free("next")
    assert one.block_pool.get_num_free_blocks() == one.block_pool.num_gpu_blocks - 1
    assert find({2, 3, 5}) == (table[:7], 7 * BLOCK)
    one.held["third"] = CutBlocks(frozenset({2, 3, 5}), items=1)
    assert one.get_num_blocks_to_allocate("third", 8 * BLOCK, table[:7], 7 * BLOCK, 7 * BLOCK, 8 * BLOCK) == 5


@pytest.fixture(scope="module")
def config(folder: Callable[[str], Any]) -> Any:
    return engine_config(folder("llava_deep"), DART | {"experimental_free_kv": True})


@pytest.mark.parametrize(
    ("layers", "cut", "groups"), [(4, 2, 2), (4, 1, 4), (4, 3, 4), (32, 2, 16), (28, 9, 4), (32, 16, 2), (7, 4, 2)]
)
def test_no_group_has_layers_of_both_sides(config: Any, layers: int, cut: int, groups: int) -> None:
    config.cache_config.kv_cache_layout = "LBHNC"
    specs = {str(number): CutSpec(**SHAPE, behind=number >= cut) for number in range(layers)}
    found = get_kv_cache_groups(config, specs)
    assert len(found) == groups
    assert sorted(name for group in found for name in group.layer_names) == sorted(specs)
    for group in found:
        assert {int(name) >= cut for name in group.layer_names} == {group.kv_cache_spec.behind}
    with pytest.raises(AssertionError):
        CutSpec.merge([specs["0"], FullAttentionSpec(**SHAPE)])


def test_layers_say_where_they_are() -> None:
    def decoder(spec: Any) -> Any:
        attentions = [SimpleNamespace(get_kv_cache_spec=lambda config: spec) for _ in range(3)]
        return SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=one)) for one in attentions])

    full = decoder(FullAttentionSpec(**SHAPE))
    declare_cut(full, 2)
    specs = [one.self_attn.attn.get_kv_cache_spec(None) for one in full.layers]
    assert specs == [CutSpec(**SHAPE, behind=behind) for behind in (False, False, True)]
    window = decoder(SlidingWindowSpec(**SHAPE, sliding_window=64))
    declare_cut(window, 1)
    with pytest.raises(UnsupportedModelError, match="a layer of this model has SlidingWindowSpec"):
        window.layers[0].self_attn.attn.get_kv_cache_spec(None)


def test_other_groups_are_refused() -> None:
    for managers in ([manager()], [manager(behind=False)], [manager(), SimpleNamespace(kv_cache_spec=None)]):
        coordinator = SimpleNamespace(single_type_managers=managers)
        with pytest.raises(UnsupportedSetupError, match="in KV cache groups of their own"):
            CutBlockTracker(SimpleNamespace(coordinator=coordinator), BLOCK)
