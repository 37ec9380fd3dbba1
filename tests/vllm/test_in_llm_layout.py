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
        held = CutBlocks.from_pieces(self.pieces, BLOCK if aligned else None, 1)
        there = range(held.count_columns(end, BLOCK))
        return [self.table[column] if column in there and column not in held.gaps else None for column in range(WIDTH)]

    def remaining(self, end: int) -> list[int]:
        """Return the indices of the first `end` tokens that remain after the cut. An image keeps its last tokens."""
        gone = {place for piece in self.pieces if piece.end <= end for place in piece.indices[: piece.drop]}
        return [place for place in range(end) if place not in gone]


def prompts(draw: random.Random, aligned: bool, many: int) -> list[Prompt]:
    """Return prompts with a common prefix that ends after the first image."""
    shared = ["start"] * draw.randrange(0, 9)
    made = []
    pieces: list[VisualPiece] = []
    for ordinal in range(draw.randrange(1, 4)):
        count = draw.choice([5, 8, 11, 19, 32])
        places = tuple(range(len(shared), len(shared) + count))
        wanted = draw.randrange(1, count + 1)
        keep = count - BLOCK * max(0, min((count - wanted) // BLOCK, count // BLOCK - 1)) if aligned else wanted
        pieces.append(VisualPiece(places, keep, ordinal, ordinal, "image"))
        shared += [f"image {ordinal}"] * count + ["text"] * draw.randrange(0, 7)
    free = itertools.count(1)
    blocks: dict[tuple[str, ...], int] = {}
    for number in range(many):
        tokens = shared + [f"question {number}"] * draw.randrange(1, 9)
        table = []
        for end in range(BLOCK, len(tokens) + BLOCK, BLOCK):
            # Prompts with a common prefix share full blocks. Other blocks belong to one prompt.
            key = (*tokens[:end], *([] if end <= len(tokens) else [f"of {number}"]))
            table.append(blocks.setdefault(key, next(free)))
        table += [0] * (WIDTH - len(table))
        made.append(Prompt(tokens, pieces, table))
    return made


def run(draw: random.Random, requests: list[Prompt], aligned: bool) -> bool:
    """Read the prompts step by step, in chunks that split no image, in one memory.

    Returns whether every prompt finds its own content after the cut at each step. Missing blocks cannot be written.
    """
    memory: dict[int, tuple[str, ...]] = {}
    while active := [one for one in requests if one.computed < len(one.tokens)]:
        shares = []
        for one in active:
            end = draw.randrange(one.computed, len(one.tokens)) + 1
            for piece in one.pieces:
                end = piece.end if piece.start < end < piece.end else end
            shares.append(RequestStep(one.computed, end, one.pieces))
        layout = lay_out(shares, WIDTH, BLOCK, aligned)
        held = [one.behind(share.end, aligned) for one, share in zip(active, shares, strict=True)]
        tables = [[held[row][column] for column in layout.columns[row]] for row in range(len(active))]
        for row, (one, share) in enumerate(zip(active, shares, strict=True)):
            mine = slice(layout.starts[row], layout.starts[row + 1])
            new = one.remaining(share.end)[share.num_before :]
            assert len(new) == share.num_queries == mine.stop - mine.start
            for place, column, offset in zip(new, layout.column[mine], layout.offset[mine], strict=True):
                slot = tables[row][column] * BLOCK + offset
                memory[slot] = (*one.tokens[: place + 1], str(place))
        for row, (one, share) in enumerate(zip(active, shares, strict=True)):
            left = one.remaining(share.end)
            assert layout.lengths[row] == len(left)
            for index, place in enumerate(left):
                found = memory.get(tables[row][index // BLOCK] * BLOCK + index % BLOCK)
                if found != (*one.tokens[: place + 1], str(place)):
                    return False
            used = {tables[row][index // BLOCK] for index in range(len(left))}
            assert used == {block for block in held[row] if block is not None}
            one.computed = share.end
    return True


@pytest.mark.parametrize("seed", range(40))
def test_each_prompt_reads_its_own_tokens(seed: int) -> None:
    draw = random.Random(seed)
    assert run(draw, prompts(draw, True, 3), True)
    assert run(draw, prompts(draw, False, 1), False)


def test_packed_tokens_overwrite_shared_blocks() -> None:
    """The reason for complete blocks: with packed tokens concurrent prompts overwrite each other."""
    spoilt = 0
    for seed in range(40):
        draw = random.Random(seed)
        spoilt += not run(draw, prompts(draw, False, 3), False)
    assert spoilt > 20


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
                wanted = count_requested(setting, count)
                expected = count
                while expected - block >= max(wanted, block):
                    expected -= block
                assert count_kept(setting, count, block) == expected
                assert count_kept(setting, count, None) == wanted
    assert count_kept(parse_setting({"off": True}), 100, 16) == 100


def test_split_image_raises() -> None:
    piece = VisualPiece(tuple(range(4, 24)), 8, 0, 0, "image")
    for computed, end in ((0, 10), (5, 30), (10, 12)):
        with pytest.raises(TokenPruneError, match="were split over steps"):
            _ = RequestStep(computed, end, [piece]).cut_pieces


def feature(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=PlaceholderRange(offset, length), modality="image")


def test_cache_hits_end_before_images() -> None:
    features = [feature(6, 10), feature(17, 13), feature(40, 4)]
    ends = {hit: shorten_hit(hit, features, BLOCK) for hit in range(0, 60, BLOCK)}
    # A hit of 20 ends in the second image, whose block begins in the first one, which begins in the second block.
    assert ends == {0: 0, 4: 4, 8: 4, 12: 4, 16: 16, 20: 16, 24: 16, 28: 16, 32: 32, 36: 36, 40: 40, 44: 44, 48: 48} | {
        52: 52, 56: 56
    }  # fmt: skip
    assert shorten_hit(8, [feature(6, 4), feature(2, 3)], BLOCK) == 0


class Base:
    """Stand-in for vLLM's scheduler: it schedules all tokens, or stops before an image."""

    stop: int | None = None

    def _try_schedule_encoder_inputs(self, request: Any, computed: int, new: int, budget: int, **_: Any) -> Any:
        new = new if self.stop is None else min(new, self.stop)
        return [0], new, budget - 1, [1], [2]


class Fake(WholeImages, Base):
    def __init__(self, whole: bool) -> None:
        self._whole_prompts = whole


def test_chunks_end_before_images() -> None:
    request = SimpleNamespace(mm_features=[feature(6, 10)])
    fake = Fake(False)
    for computed, asked, given in ((0, 5, 5), (0, 6, 6), (0, 9, 6), (0, 16, 16), (2, 9, 4), (6, 3, 0), (6, 10, 10)):
        assert fake._try_schedule_encoder_inputs(request, computed, asked, 9, shift_computed_tokens=0)[1] == given
    whole = Fake(True)
    assert whole._try_schedule_encoder_inputs(request, 0, 20, 9) == ([0], 20, 8, [1], [2])
    whole.stop = 6
    assert whole._try_schedule_encoder_inputs(request, 0, 20, 9) == ([], 0, 9, [], [])
