# SPDX-License-Identifier: Apache-2.0
"""KV cache of the layers after the cut, without an engine: groups of layers, and the number of their blocks."""

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

from runner import IN_LLM
from test_in_llm_limits import DART, engine_config
from tokenprune.errors import UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.in_llm import kv_cache
from tokenprune.integrations.vllm.in_llm.kv_cache import CutBlockTracker, CutManager, CutSpec, declare_cut
from tokenprune.integrations.vllm.in_llm.layout import CutBlocks, VisualPiece

BLOCK = 16
SHAPE = dict(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)


def create_manager(blocks: int = 200, behind: bool = True, caching: bool = True) -> CutManager:
    pool = BlockPool(blocks, caching, BLOCK)
    return CutManager(
        CutSpec(**SHAPE, behind=behind), block_pool=pool, enable_caching=caching, kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )  # fmt: skip


def draw_prompt(draw: random.Random, aligned: bool) -> tuple[int, list[VisualPiece]]:
    """Return the number of tokens of a prompt, and its images."""
    end, pieces = draw.randrange(40), []
    for ordinal in range(draw.randrange(4)):
        count = draw.choice([10, 33, 100, 256])
        requested = draw.randrange(1, count + 1)
        keep = count - BLOCK * max(0, min((count - requested) // BLOCK, count // BLOCK - 1)) if aligned else requested
        pieces.append(VisualPiece(tuple(range(end, end + count)), keep, ordinal, ordinal, "image"))
        end += count + draw.randrange(50)
    return end + 1, pieces


@pytest.mark.parametrize("aligned", [True, False], ids=["whole blocks", "packed"])
def test_allocated_blocks_match_the_estimate_and_are_freed(aligned: bool) -> None:
    cut_manager = create_manager(caching=aligned)
    pool, all_free, saved = cut_manager.block_pool, cut_manager.block_pool.get_num_free_blocks(), 0
    for seed in range(50):
        draw = random.Random(seed)
        tokens, pieces = draw_prompt(draw, aligned)
        if pieces:
            cut_manager.held["it"] = CutBlocks.from_pieces(pieces, BLOCK if aligned else None, len(pieces))
        ends = {end for piece in pieces for end in (piece.start, piece.end)} | {tokens, tokens + 30, tokens + 31}
        for end in sorted(ends - {0}):
            estimate = cut_manager.get_num_blocks_to_allocate(
                "it", end, [], 0, 0, end, apply_admission_cap=True, prefill_end=0
            )
            free = pool.get_num_free_blocks()
            new = cut_manager.allocate_new_blocks("it", end, end)
            assert free - pool.get_num_free_blocks() == estimate == sum(not block.is_null for block in new)
        num_kept = tokens + 31 - sum(piece.drop for piece in pieces)
        assert all_free - pool.get_num_free_blocks() == -(-num_kept // BLOCK)
        saved += -(-(tokens + 31) // BLOCK) - -(-num_kept // BLOCK)
        cut_manager.free("it")
        assert pool.get_num_free_blocks() == all_free and not cut_manager.held
    assert saved > 100


def test_gaps_count_as_prefix_cache_hits() -> None:
    cut_manager, hashes = create_manager(), [BlockHash(bytes([index])) for index in range(8)]
    cut_manager.held["it"] = CutBlocks(frozenset({2, 3, 5}), items=1)
    cut_manager.allocate_new_blocks("it", 8 * BLOCK, 8 * BLOCK)
    request = SimpleNamespace(request_id="it", block_hashes=hashes, shared_prefix_boundary=0)
    cut_manager.cache_blocks(request, 7 * BLOCK, replay_boundaries=())
    table = list(cut_manager.req_to_blocks["it"])

    def find(gaps: set[int], tokens: int = 8 * BLOCK, owner: CutManager = cut_manager) -> tuple[list[Any], int]:
        before = kv_cache._gaps.set(frozenset(gaps))
        (blocks,), hit = CutManager.find_longest_cache_hit(
            block_hashes=hashes, max_length=tokens, kv_cache_group_ids=[0], block_pool=cut_manager.block_pool,
            kv_cache_spec=owner.kv_cache_spec, drop_eagle_block=False, alignment_tokens=BLOCK,
        )  # fmt: skip
        kv_cache._gaps.reset(before)
        return blocks, hit

    assert find({2, 3, 5}) == (table[:7], 7 * BLOCK)
    assert find({2, 3, 5}, 5 * BLOCK + 1) == (table[:5], 5 * BLOCK)
    assert find({2}) == (table[:3], 3 * BLOCK) and find(set()) == (table[:2], 2 * BLOCK)
    assert find({2, 3, 5}, owner=create_manager(behind=False)) == (
        table[:2],
        2 * BLOCK,
    )  # layers before the cut hold all blocks
    # A hit allocates the other blocks. They are free for the next request when all requests have ended.
    cut_manager.held["next"] = cut_manager.held["it"]
    num_blocks = cut_manager.get_num_blocks_to_allocate("next", 8 * BLOCK, table[:7], 7 * BLOCK, 7 * BLOCK, 8 * BLOCK)
    cut_manager.add_local_computed_blocks("next", table[:7], 7 * BLOCK, 0)
    assert num_blocks == len(cut_manager.allocate_new_blocks("next", 8 * BLOCK, 8 * BLOCK)) == 1
    cut_manager.free("it")
    cut_manager.free("next")
    assert cut_manager.block_pool.get_num_free_blocks() == cut_manager.block_pool.num_gpu_blocks - 1
    assert find({2, 3, 5}) == (table[:7], 7 * BLOCK)
    cut_manager.held["third"] = CutBlocks(frozenset({2, 3, 5}), items=1)
    assert cut_manager.get_num_blocks_to_allocate("third", 8 * BLOCK, table[:7], 7 * BLOCK, 7 * BLOCK, 8 * BLOCK) == 5


@pytest.fixture(scope="module")
def config(folder: Callable[[str], Any]) -> Any:
    return engine_config(folder("llava_deep"), DART | {"experimental_free_kv": True})


@IN_LLM
@pytest.mark.parametrize(
    ("layers", "cut", "groups"), [(4, 2, 2), (4, 1, 4), (4, 3, 4), (32, 2, 16), (28, 9, 4), (32, 16, 2), (7, 4, 2)]
)
def test_groups_do_not_mix_both_sides_of_the_cut(config: Any, layers: int, cut: int, groups: int) -> None:
    config.cache_config.kv_cache_layout = "LBHNC"
    specs = {str(layer): CutSpec(**SHAPE, behind=layer >= cut) for layer in range(layers)}
    kv_groups = get_kv_cache_groups(config, specs)
    assert len(kv_groups) == groups
    assert sorted(name for group in kv_groups for name in group.layer_names) == sorted(specs)
    for group in kv_groups:
        assert {int(name) >= cut for name in group.layer_names} == {group.kv_cache_spec.behind}
    with pytest.raises(AssertionError):
        CutSpec.merge([specs["0"], FullAttentionSpec(**SHAPE)])


def test_layers_declare_their_side_of_the_cut() -> None:
    def decoder(spec: Any) -> Any:
        attentions = [SimpleNamespace(get_kv_cache_spec=lambda config: spec) for _ in range(3)]
        return SimpleNamespace(
            layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=attention)) for attention in attentions]
        )

    full = decoder(FullAttentionSpec(**SHAPE))
    declare_cut(full, 2)
    specs = [layer.self_attn.attn.get_kv_cache_spec(None) for layer in full.layers]
    assert specs == [CutSpec(**SHAPE, behind=behind) for behind in (False, False, True)]
    window = decoder(SlidingWindowSpec(**SHAPE, sliding_window=64))
    declare_cut(window, 1)
    with pytest.raises(UnsupportedModelError, match="a layer of this model has SlidingWindowSpec"):
        window.layers[0].self_attn.attn.get_kv_cache_spec(None)


def test_other_groups_raise() -> None:
    for managers in (
        [create_manager()],
        [create_manager(behind=False)],
        [create_manager(), SimpleNamespace(kv_cache_spec=None)],
    ):
        coordinator = SimpleNamespace(single_type_managers=managers)
        with pytest.raises(UnsupportedSetupError, match="separate KV cache groups"):
            CutBlockTracker(SimpleNamespace(coordinator=coordinator), BLOCK)
