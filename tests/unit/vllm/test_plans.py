# SPDX-License-Identifier: Apache-2.0
"""Plans that the front end sends to the worker, the rows that a plan keeps, and batches of the encoder."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import tokenprune
from each import each
from served_settings import served, served_methods
from tokenprune.errors import BudgetError, OptionError
from tokenprune.integrations.shared.towers.patch_grid import find_image_grid
from tokenprune.integrations.vllm.selection.before_llm import build_segments, choose
from tokenprune.integrations.vllm.settings.items import OFF, settings_of_items
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, Run, _decoded, field_name, find_runs
from tokenprune.integrations.vllm.worker.runner import limit_batches, split_by_tokens
from tokenprune.methods import registry
from tokenprune.methods.encoder.pixelprune import PixelPrune
from tokenprune.methods.pre_llm.divprune import DivPrune
from tokenprune.methods.pre_llm.random import Random
from tokenprune.models.families import SERVED
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.segments import square_grid
from tokenprune.settings import Setting
from tokenprune.testing import visual_tokens


def split_runs(pieces: str) -> tuple[Run, ...]:
    """Split a text into runs: "#" is a placeholder (id 9), other letters are text."""
    return find_runs([9 if c == "#" else ord(c) for c in pieces], [c == "#" for c in pieces])


def build_plan(setting: Setting, pieces: str, per_run: bool = False) -> Plan:
    return Plan.build(setting, split_runs(pieces), per_run)


def test_plans_round_trip() -> None:
    original = build_plan(served(Random(4), 3), "a####b####c", per_run=True)
    assert Plan.decode(original.encode()) == original
    assert Plan.decode(build_plan(OFF, "####").encode()).setting == OFF


def test_a_plan_of_placeholders_that_pixels_chose() -> None:
    chosen = (False, True, True, False, True, False, False, False)
    original = dataclasses.replace(build_plan(served(PixelPrune(), 0.5), "s####/####e"), kept=chosen)
    assert original.keep == [3] and original.reduces and original.rows == 4  # and the break between the halves
    assert original.reduced() == [ord("s"), *[9] * 4, ord("e")]
    decoded = Plan.decode(original.encode())
    assert decoded == original and decoded.mask.tolist() == list(chosen)
    assert not dataclasses.replace(original, kept=(True,) * 8).reduces


def test_the_cache_of_decoded_plans_is_limited_by_size() -> None:
    _decoded.clear()
    data = [build_plan(served(DivPrune(), 0.5), f"#{letter}" * 30_000).encode() for letter in "abcdefghi"]
    for encoded in data:
        Plan.decode(encoded)
    assert 1 <= len(_decoded) < 9 and _decoded.currsize <= _decoded.maxsize == 64 * 2**20
    assert Plan.decode(data[-1]) is Plan.decode(data[-1]), "it is decoded each time"
    _decoded.clear()


class CountedList(list):
    """Counts the items that an iteration reads."""

    read = 0

    def __iter__(self):
        for item in super().__iter__():
            self.read += 1
            yield item


def test_the_size_of_a_plan_depends_on_its_runs() -> None:
    """A plan stores runs, so the plan of a long video contains only a few numbers."""
    tokens = CountedList([9] * 100_000)
    long = Plan.build(served(DivPrune(), 0.5), find_runs(tokens), False)
    assert tokens.read == 0 and long.text == ((9, True, 100_000),)
    decoded = Plan.decode(long.encode())
    assert decoded == long and len(long.encode()) < 200
    assert (decoded.rows, decoded.span, decoded.placeholder, decoded.is_plain) == (50_000, (0, 100_000), 9, True)
    assert not {"is_embed", "tokens"} & set(vars(decoded)), "each token is written out"
    stamped = build_plan(served(DivPrune(), 0.5), ("ab" + "#" * 50) * 3)
    assert stamped.text == ((97, False, 1), (98, False, 1), (9, True, 50)) * 3 and not stamped.is_plain
    assert find_runs([9, 9, 9, 9], [True, True, False, True]) == ((9, True, 2), (9, False, 1), (9, True, 1))
    assert stamped.tokens == [97, 98, *[9] * 50] * 3 and stamped.is_embed.tolist() == [False, False, *[True] * 50] * 3


def test_reduced_prompts() -> None:
    half = served(DivPrune(), 0.5)
    nine = [9]
    assert build_plan(half, "########").reduced() == nine * 4
    assert build_plan(half, "s########e").reduced() == [ord("s"), *nine * 4, ord("e")]
    # The break inside the image needs a token, too, because its offset after pruning is unknown.
    broken = build_plan(half, "s####/####e")
    assert broken.counts == [8] and broken.between == 1
    assert broken.reduced() == [ord("s"), *nine * 5, ord("e")]
    tiles = build_plan(half, "s####/######e", per_run=True)
    # The kept count of each tile is known, so the text between tiles is unchanged.
    assert tiles.counts == [4, 6] and tiles.keep == [2, 3] and tiles.rows == 5
    assert tiles.reduced() == [ord("s"), *nine * 2, ord("/"), *nine * 3, ord("e")]
    assert not build_plan(OFF, "s####/####e").reduces and not build_plan(served(DivPrune(), 1.0), "##").reduces


def test_plans_of_videos() -> None:
    evs = parse_setting({"method": "evs", "keep": 0.5})
    for pieces, num_frames, num_behind, sizes in (
        ("a############", 3, 0, [4, 4, 4]), ("#############", 3, 1, [4, 4, 4]), ("s####t####u####e", 3, 0, [4, 4, 4]),
        ("####", 1, 0, [4]),
    ):  # fmt: skip
        video_plan, count = Plan.build(evs, split_runs(pieces), False, num_frames, num_behind), pieces.count("#")
        assert video_plan.counts == [count] and video_plan.keep == [round(count / 2)]
        assert video_plan.frame_sizes(num_behind) == [sizes] and Plan.decode(video_plan.encode()) == video_plan
    for num_frames, num_behind in ((5, 0), (0, 0), (3, 1), (13, 0)):
        with pytest.raises(OptionError, match=f"the 12 tokens of this one do not split into {num_frames} frames"):
            Plan.build(evs, find_runs([9] * 12), False, num_frames, num_behind)
    # Other methods do not use frames, and a video method does not prune images.
    assert build_plan(parse_setting({"method": "divprune"}), "####").frame_sizes(0) == [None]
    assert not build_plan(settings_of_items(evs, "image", 1)[0], "####").reduces
    with pytest.raises(BudgetError, match="the whole video has one budget"):
        parse_setting({"method": "evs", "keep": 0.5, "per": "frame"})


DROPPING = [method for method in (registry.build(name, {}) for name in served_methods()) if not method.merges]


@each("name", [method.name for method in DROPPING if compares_frames(method)])
def test_kept_rows_of_videos_equal_the_method(name: str) -> None:
    rows = torch.randn(13, 10, generator=torch.Generator().manual_seed(1))
    segments = build_segments([13], (3, 2, 2), "video", rows.device, frames=[[4, 4, 4]])
    method = registry.build(name, {})
    kept, out = choose(method, rows, 6, segments, [7])
    expected = method.select(visual_tokens(rows[:, :6], keep=[7], frames=[[4, 4, 4]], modality="video"))
    assert torch.equal(kept, expected.keep[0]) and bool(kept[-1]) and torch.equal(out, rows)


@each("name", ["random", "uniform", "pool", "divprune"])
@each("counts", [[16], [12], [4, 4, 9]])
def test_kept_rows_equal_the_method(name: str, counts: list[int]) -> None:
    """Compare with a loop over the segments. Columns beyond the width are merged with the same weights."""
    method = registry.build(name, {})
    rows = torch.randn(sum(counts), 10, generator=torch.Generator().manual_seed(1))
    keep = [max(1, count // 3) for count in counts]
    kept, out = choose(method, rows, 6, build_segments(counts, None, "image", rows.device), keep)
    start = 0
    for index, (count, num_kept) in enumerate(zip(counts, keep, strict=True)):
        segment_rows = rows[start : start + count]
        segment = build_segments([count], None, "image", rows.device)
        if name == "random":  # draws by the segment's index
            segment.ordinal[0] = index
        selection = method.select(
            tokenprune.selection.tokens.VisualTokens(segment, [num_kept], _Hidden(segment_rows[None, :, :6]))
        )
        assert kept[start : start + count].tolist() == selection.keep[0].tolist()
        for token_index in selection.keep[0].nonzero().flatten().tolist():
            members = (
                [token_index] if selection.assign is None else (selection.assign[0] == token_index).nonzero().flatten()
            )
            torch.testing.assert_close(out[start + token_index], segment_rows[members].mean(0))
        start += count


def test_every_frame_has_its_budget() -> None:
    half, frames = served(DivPrune(), 0.5), served(DivPrune(), 0.5, per="frame")

    def build_video_plan(setting: Setting, pieces: str, num_frames: int) -> Plan:
        return Plan.build(setting, split_runs(pieces), False, num_frames)

    video_plan = build_video_plan(frames, "a#############", 3)
    assert (
        video_plan.counts == [4, 4, 5] and video_plan.keep == [2, 2, 2] and video_plan.reduced() == [ord("a"), *[9] * 6]
    )
    stamped = build_video_plan(frames, "a####bc####d####", 3)
    assert stamped.keep == [2, 2, 2] and stamped.between == 0 and stamped.rows == 6
    assert stamped.reduced() == [ord("a"), 9, 9, ord("b"), ord("c"), 9, 9, ord("d"), 9, 9]
    assert Plan.decode(stamped.encode()) == stamped and Plan.decode(video_plan.encode()) == video_plan
    assert build_video_plan(half, "a####bc####d####", 3).counts == [12]
    assert build_video_plan(frames, "####b####", 1).counts == [8]
    for pieces, num_frames in (("####b####", 3), ("####", 5), ("########", 0), ("#####", 3)):
        with pytest.raises(OptionError, match='"per": "image"'):
            build_video_plan(frames, pieces, num_frames)


class _Hidden(tokenprune.selection.TokenSource):
    needs = frozenset()

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def test_a_known_grid_is_used() -> None:
    cpu = torch.device("cpu")
    assert build_segments([12], (1, 3, 4), "image", cpu).grids == [(1, 3, 4)]
    assert build_segments([12], (1, 2, 4), "image", cpu).grids == [None]
    assert build_segments([12, 12], (2, 3, 4), "video", cpu).grids == [(1, 3, 4)] * 2
    assert build_segments([24], (2, 3, 4), "video", cpu).grids == [(2, 3, 4)]
    assert build_segments([12, 13], (2, 3, 4), "video", cpu).grids == [(1, 3, 4), None]
    assert build_segments([9, 12], None, "image", cpu).grids == [None, None]
    assert build_segments([9, 12], None, "image", cpu, square_grid).grids == [(1, 3, 3), None]
    assert build_segments([9], None, "video", cpu, square_grid).grids == [None]


def _image_grid(architecture: str, count: int, tower: str = "clip_vision_model") -> tuple[int, int, int] | None:
    config = SimpleNamespace(image_seq_length=16, vision_config=SimpleNamespace(model_type=tower))
    row = SERVED[architecture]
    return find_image_grid(row, count, config, whole_image=not row.vllm.per_run)


def test_image_grids_of_architectures() -> None:
    """Newlines and several tiles can also add up to a square number."""
    assert _image_grid("LlavaForConditionalGeneration", 36) == (1, 6, 6)
    assert _image_grid("LlavaForConditionalGeneration", 36, "pixtral") is None
    assert _image_grid("LlavaForConditionalGeneration", 37) is None
    assert _image_grid("InternVLForConditionalGeneration", 16) == (1, 4, 4)
    assert _image_grid("InternVLForConditionalGeneration", 64) is None
    for name in ("LlavaNext", "LlavaOnevision", "Mistral3", "Qwen2VL"):
        assert _image_grid(f"{name}ForConditionalGeneration", 36) is None


def build_item(count: int) -> dict:
    class Element:
        data = build_plan(served(DivPrune(), 1), "#" * count).encode()

    return {field_name("image"): Element}


def test_batches_of_the_encoder_are_limited() -> None:
    """Tokens are counted before pruning. The scheduler would accept any number of one-token images."""
    items = [("image", build_item(count)) for count in (4, 4, 4, 20, 1, 9)]
    chunks = [[items.index(item) for item in chunk] for chunk in split_by_tokens(items, 10)]
    assert chunks == [[0, 1], [2], [3], [4, 5]]
    calls = []

    def group_and_batch(mm_kwargs, *, device=None):
        calls.append((len(mm_kwargs), device))
        yield from mm_kwargs

    assert list(limit_batches(group_and_batch, 10)(items, device="there")) == items
    assert calls == [(2, "there"), (1, "there"), (1, "there"), (2, "there")]
    assert list(split_by_tokens([("image", {})] * 3, 1)) == [
        [("image", {})] * 3
    ]  # without plans the batch is unchanged
