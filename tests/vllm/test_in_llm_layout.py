# SPDX-License-Identifier: Apache-2.0
"""Cuts inside the decoder: reads and writes of KV cache blocks, without an engine."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import PlaceholderRange

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.in_llm.layout import CutBlocks, RequestStep, VisualPiece, count_kept, lay_out
from tokenprune.integrations.vllm.in_llm.scheduler import WholeImages, shorten_hit
from tokenprune.integrations.vllm.settings.items import count_requested
from tokenprune.integrations.vllm.settings.parse import parse_setting

BLOCK, WIDTH = 4, 40
DART = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}


@dataclass
class Prompt:
    """A request of the small engine below: its tokens, its images, and its blocks of the KV cache."""

    tokens: list[str]
    pieces: list[VisualPiece]
    table: list[int]
    computed: int = 0

    def behind(self, end: int, aligned: bool) -> list[int | None]:
        """Return the block table of the layers after the cut, with None for the blocks of dropped tokens."""
        cut_blocks = CutBlocks.from_pieces(self.pieces, BLOCK if aligned else None, 1)
        columns = range(cut_blocks.count_columns(end, BLOCK))
        return [
            self.table[column] if column in columns and column not in cut_blocks.gaps else None
            for column in range(WIDTH)
        ]

    def remaining(self, end: int) -> list[int]:
        """Return the indices of the first `end` tokens that remain after the cut. An image keeps its last tokens."""
        dropped = {index for piece in self.pieces if piece.end <= end for index in piece.indices[: piece.drop]}
        return [index for index in range(end) if index not in dropped]


def draw_prompts(draw: random.Random, aligned: bool, num_prompts: int) -> list[Prompt]:
    """Return prompts with a common prefix that ends after the first image."""
    shared = ["start"] * draw.randrange(0, 9)
    requests = []
    pieces: list[VisualPiece] = []
    for ordinal in range(draw.randrange(1, 4)):
        count = draw.choice([5, 8, 11, 19, 32])
        indices = tuple(range(len(shared), len(shared) + count))
        requested = draw.randrange(1, count + 1)
        keep = count - BLOCK * max(0, min((count - requested) // BLOCK, count // BLOCK - 1)) if aligned else requested
        pieces.append(VisualPiece(indices, keep, ordinal, ordinal, "image"))
        shared += [f"image {ordinal}"] * count + ["text"] * draw.randrange(0, 7)
    free = itertools.count(1)
    blocks: dict[tuple[str, ...], int] = {}
    for prompt_index in range(num_prompts):
        tokens = shared + [f"question {prompt_index}"] * draw.randrange(1, 9)
        table = []
        for end in range(BLOCK, len(tokens) + BLOCK, BLOCK):
            # Prompts with a common prefix share full blocks. Other blocks belong to one prompt.
            key = (*tokens[:end], *([] if end <= len(tokens) else [f"of {prompt_index}"]))
            table.append(blocks.setdefault(key, next(free)))
        table += [0] * (WIDTH - len(table))
        requests.append(Prompt(tokens, pieces, table))
    return requests


def run(draw: random.Random, requests: list[Prompt], aligned: bool) -> bool:
    """Read the prompts step by step, in chunks that split no image, in one memory.

    Returns whether every prompt finds its own content after the cut at each step. Missing blocks cannot be written.
    """
    memory: dict[int, tuple[str, ...]] = {}
    while active := [prompt for prompt in requests if prompt.computed < len(prompt.tokens)]:
        shares = []
        for prompt in active:
            end = draw.randrange(prompt.computed, len(prompt.tokens)) + 1
            for piece in prompt.pieces:
                end = piece.end if piece.start < end < piece.end else end
            shares.append(RequestStep(prompt.computed, end, prompt.pieces))
        layout = lay_out(shares, WIDTH, BLOCK, aligned)
        tables_behind = [prompt.behind(share.end, aligned) for prompt, share in zip(active, shares, strict=True)]
        tables = [[tables_behind[row][column] for column in layout.columns[row]] for row in range(len(active))]
        for row, (prompt, share) in enumerate(zip(active, shares, strict=True)):
            row_slots = slice(layout.starts[row], layout.starts[row + 1])
            new = prompt.remaining(share.end)[share.num_before :]
            assert len(new) == share.num_queries == row_slots.stop - row_slots.start
            for token_index, column, offset in zip(
                new, layout.column[row_slots], layout.offset[row_slots], strict=True
            ):
                slot = tables[row][column] * BLOCK + offset
                memory[slot] = (*prompt.tokens[: token_index + 1], str(token_index))
        for row, (prompt, share) in enumerate(zip(active, shares, strict=True)):
            remaining = prompt.remaining(share.end)
            assert layout.lengths[row] == len(remaining)
            for index, token_index in enumerate(remaining):
                stored = memory.get(tables[row][index // BLOCK] * BLOCK + index % BLOCK)
                if stored != (*prompt.tokens[: token_index + 1], str(token_index)):
                    return False
            used = {tables[row][index // BLOCK] for index in range(len(remaining))}
            assert used == {block for block in tables_behind[row] if block is not None}
            prompt.computed = share.end
    return True


@pytest.mark.parametrize("seed", range(40))
def test_each_prompt_reads_its_own_tokens(seed: int) -> None:
    draw = random.Random(seed)
    assert run(draw, draw_prompts(draw, True, 3), True)
    assert run(draw, draw_prompts(draw, False, 1), False)


def test_packed_tokens_overwrite_shared_blocks() -> None:
    """The reason for complete blocks: with packed tokens concurrent prompts overwrite each other."""
    num_overwritten = 0
    for seed in range(40):
        draw = random.Random(seed)
        num_overwritten += not run(draw, draw_prompts(draw, False, 3), False)
    assert num_overwritten > 20


def test_text_after_an_image_keeps_its_slot() -> None:
    pieces = [VisualPiece(tuple(range(3, 22)), 7, 0, 0, "image")]
    layout = lay_out([RequestStep(0, 30, pieces)], WIDTH, BLOCK, True)
    slots = layout.columns[0][layout.column] * BLOCK + layout.offset
    assert slots[:3].tolist() == [0, 1, 2] and slots[10:].tolist() == list(range(22, 30))
    assert slots[3:10].tolist() == [3, 16, 17, 18, 19, 20, 21]  # blocks 1 to 3 are dropped


def test_number_of_kept_tokens() -> None:
    for block in (16, 32):
        for count in range(1, 200):
            for keep in (0.1, 0.25, 0.6, 1.0, 5):
                setting = parse_setting(DART | {"keep": keep})
                requested = count_requested(setting, count)
                expected = count
                while expected - block >= max(requested, block):
                    expected -= block
                assert count_kept(setting, count, block) == expected
                assert count_kept(setting, count, None) == requested
    assert count_kept(parse_setting({"off": True}), 100, 16) == 100


def test_split_image_raises() -> None:
    piece = VisualPiece(tuple(range(4, 24)), 8, 0, 0, "image")
    for computed, end in ((0, 10), (5, 30), (10, 12)):
        with pytest.raises(TokenPruneError, match="were split over steps"):
            _ = RequestStep(computed, end, [piece]).cut_pieces


def create_feature(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=PlaceholderRange(offset, length), modality="image")


def test_cache_hits_end_before_images() -> None:
    features = [create_feature(6, 10), create_feature(17, 13), create_feature(40, 4)]
    ends = {hit: shorten_hit(hit, features, BLOCK) for hit in range(0, 60, BLOCK)}
    # A hit of 20 ends in the second image, whose first block also has tokens of the first image. That image starts in
    # the second block.
    assert ends == {0: 0, 4: 4, 8: 4, 12: 4, 16: 16, 20: 16, 24: 16, 28: 16, 32: 32, 36: 36, 40: 40, 44: 44, 48: 48} | {
        52: 52, 56: 56
    }  # fmt: skip
    assert shorten_hit(8, [create_feature(6, 4), create_feature(2, 3)], BLOCK) == 0


class Base:
    """Stand-in for vLLM's scheduler: it schedules all tokens, or stops before an image."""

    stop: int | None = None

    def _try_schedule_encoder_inputs(self, request: Any, computed: int, new: int, budget: int, **_: Any) -> Any:
        new = new if self.stop is None else min(new, self.stop)
        return [0], new, budget - 1, [1], [2]


class Fake(WholeImages, Base):
    def __init__(self, whole_prompts: bool) -> None:
        self._whole_prompts = whole_prompts


def test_chunks_end_before_images() -> None:
    request = SimpleNamespace(mm_features=[create_feature(6, 10)])
    fake = Fake(False)
    for computed, requested, scheduled in (
        (0, 5, 5),
        (0, 6, 6),
        (0, 9, 6),
        (0, 16, 16),
        (2, 9, 4),
        (6, 3, 0),
        (6, 10, 10),
    ):
        assert (
            fake._try_schedule_encoder_inputs(request, computed, requested, 9, shift_computed_tokens=0)[1] == scheduled
        )
    unsplit = Fake(True)
    assert unsplit._try_schedule_encoder_inputs(request, 0, 20, 9) == ([0], 20, 8, [1], [2])
    unsplit.stop = 6
    assert unsplit._try_schedule_encoder_inputs(request, 0, 20, 9) == ([], 0, 9, [], [])
