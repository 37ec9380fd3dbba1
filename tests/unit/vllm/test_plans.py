# SPDX-License-Identifier: Apache-2.0
"""Plans that the front hands to the worker, the rows of features that a plan keeps, and batches of the encoder."""

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


def text_of(pieces: str) -> tuple[Run, ...]:
    """pieces: "#" for a placeholder (id 9), other letters for text."""
    return find_runs([9 if c == "#" else ord(c) for c in pieces], [c == "#" for c in pieces])


def plan(setting: Setting, pieces: str, per_run: bool = False) -> Plan:
    return Plan.build(setting, text_of(pieces), per_run)


def test_a_plan_survives_the_journey() -> None:
    one = plan(served(Random(4), 3), "a####b####c", per_run=True)
    assert Plan.decode(one.encode()) == one
    assert Plan.decode(plan(OFF, "####").encode()).setting == OFF


def test_a_plan_of_placeholders_that_pixels_chose() -> None:
    chosen = (False, True, True, False, True, False, False, False)
    one = dataclasses.replace(plan(served(PixelPrune(), 0.5), "s####/####e"), kept=chosen)
    assert one.keep == [3] and one.reduces and one.rows == 4  # and the break between
    assert one.reduced() == [ord("s"), *[9] * 4, ord("e")]
    again = Plan.decode(one.encode())
    assert again == one and again.mask.tolist() == list(chosen)
    assert not dataclasses.replace(one, kept=(True,) * 8).reduces


def test_decoded_plans_are_kept_by_their_size() -> None:
    _decoded.clear()
    data = [plan(served(DivPrune(), 0.5), f"#{letter}" * 30_000).encode() for letter in "abcdefghi"]
    for one in data:
        Plan.decode(one)
    assert 1 <= len(_decoded) < 9 and _decoded.currsize <= _decoded.maxsize == 64 * 2**20
    assert Plan.decode(data[-1]) is Plan.decode(data[-1]), "it is decoded each time"
    _decoded.clear()


class Touched(list):
    """Counts what is read of it one by one."""

    read = 0

    def __iter__(self):
        for one in super().__iter__():
            self.read += 1
            yield one


def test_a_plan_costs_what_its_runs_do() -> None:
    """Not what its tokens do: of a long video it holds, sends and reads a few numbers."""
    tokens = Touched([9] * 100_000)
    long = Plan.build(served(DivPrune(), 0.5), find_runs(tokens), False)
    assert tokens.read == 0 and long.text == ((9, True, 100_000),)
    again = Plan.decode(long.encode())
    assert again == long and len(long.encode()) < 200
    assert (again.rows, again.span, again.placeholder, again.is_plain) == (50_000, (0, 100_000), 9, True)
    assert not {"is_embed", "tokens"} & set(vars(again)), "each token is written out"
    stamped = plan(served(DivPrune(), 0.5), ("ab" + "#" * 50) * 3)
    assert stamped.text == ((97, False, 1), (98, False, 1), (9, True, 50)) * 3 and not stamped.is_plain
    assert find_runs([9, 9, 9, 9], [True, True, False, True]) == ((9, True, 2), (9, False, 1), (9, True, 1))
    assert stamped.tokens == [97, 98, *[9] * 50] * 3 and stamped.is_embed.tolist() == [False, False, *[True] * 50] * 3


def test_reduced_prompts() -> None:
    half = served(DivPrune(), 0.5)
    nine = [9]
    assert plan(half, "########").reduced() == nine * 4
    assert plan(half, "s########e").reduced() == [ord("s"), *nine * 4, ord("e")]
    # The break within the image needs a place too, and nothing tells which.
    broken = plan(half, "s####/####e")
    assert broken.counts == [8] and broken.between == 1
    assert broken.reduced() == [ord("s"), *nine * 5, ord("e")]
    tiles = plan(half, "s####/######e", per_run=True)
    # Each tile's own number is known, so the text between them stays what it is.
    assert tiles.counts == [4, 6] and tiles.keep == [2, 3] and tiles.rows == 5
    assert tiles.reduced() == [ord("s"), *nine * 2, ord("/"), *nine * 3, ord("e")]
    assert not plan(OFF, "s####/####e").reduces and not plan(served(DivPrune(), 1.0), "##").reduces


def test_a_video_whose_frames_are_compared() -> None:
    evs = parse_setting({"method": "evs", "keep": 0.5})
    for pieces, number, behind, sizes in (
        ("a############", 3, 0, [4, 4, 4]), ("#############", 3, 1, [4, 4, 4]), ("s####t####u####e", 3, 0, [4, 4, 4]),
        ("####", 1, 0, [4]),
    ):  # fmt: skip
        one, count = Plan.build(evs, text_of(pieces), False, number, behind), pieces.count("#")
        assert one.counts == [count] and one.keep == [round(count / 2)]
        assert one.frame_sizes(behind) == [sizes] and Plan.decode(one.encode()) == one
    for number, behind in ((5, 0), (0, 0), (3, 1), (13, 0)):
        with pytest.raises(OptionError, match=f"the 12 tokens of this one do not split into {number} frames"):
            Plan.build(evs, find_runs([9] * 12), False, number, behind)
    # Other methods ask for no frames, and images are left as they are.
    assert plan(parse_setting({"method": "divprune"}), "####").frame_sizes(0) == [None]
    assert not plan(settings_of_items(evs, "image", 1)[0], "####").reduces
    with pytest.raises(BudgetError, match="the whole video has one budget"):
        parse_setting({"method": "evs", "keep": 0.5, "per": "frame"})


DROPPING = [method for method in (registry.build(name, {}) for name in served_methods()) if not method.merges]


@each("name", [method.name for method in DROPPING if compares_frames(method)])
def test_rows_of_videos_are_those_of_the_method(name: str) -> None:
    rows = torch.randn(13, 10, generator=torch.Generator().manual_seed(1))
    segments = build_segments([13], (3, 2, 2), "video", rows.device, frames=[[4, 4, 4]])
    method = registry.build(name, {})
    stays, out = choose(method, rows, 6, segments, [7])
    want = method.select(visual_tokens(rows[:, :6], keep=[7], frames=[[4, 4, 4]], modality="video"))
    assert torch.equal(stays, want.keep[0]) and bool(stays[-1]) and torch.equal(out, rows)


@each("name", ["random", "uniform", "pool", "divprune"])
@each("counts", [[16], [12], [4, 4, 9]])
def test_rows_are_those_of_the_method(name: str, counts: list[int]) -> None:
    """Against a loop over the segments; columns beyond the width follow with the same weights."""
    method = registry.build(name, {})
    rows = torch.randn(sum(counts), 10, generator=torch.Generator().manual_seed(1))
    keep = [max(1, count // 3) for count in counts]
    stays, out = choose(method, rows, 6, build_segments(counts, None, "image", rows.device), keep)
    start = 0
    for index, (count, number) in enumerate(zip(counts, keep, strict=True)):
        own = rows[start : start + count]
        alone = build_segments([count], None, "image", rows.device)
        if name == "random":  # draws by the segment's place
            alone.ordinal[0] = index
        selection = method.select(tokenprune.selection.tokens.VisualTokens(alone, [number], _Hidden(own[None, :, :6])))
        assert stays[start : start + count].tolist() == selection.keep[0].tolist()
        for place in selection.keep[0].nonzero().flatten().tolist():
            members = [place] if selection.assign is None else (selection.assign[0] == place).nonzero().flatten()
            torch.testing.assert_close(out[start + place], own[members].mean(0))
        start += count


def test_every_frame_has_its_budget() -> None:
    half, frames = served(DivPrune(), 0.5), served(DivPrune(), 0.5, per="frame")

    def made(setting: Setting, pieces: str, number: int) -> Plan:
        return Plan.build(setting, text_of(pieces), False, number)

    one = made(frames, "a#############", 3)
    assert one.counts == [4, 4, 5] and one.keep == [2, 2, 2] and one.reduced() == [ord("a"), *[9] * 6]
    stamped = made(frames, "a####bc####d####", 3)
    assert stamped.keep == [2, 2, 2] and stamped.between == 0 and stamped.rows == 6
    assert stamped.reduced() == [ord("a"), 9, 9, ord("b"), ord("c"), 9, 9, ord("d"), 9, 9]
    assert Plan.decode(stamped.encode()) == stamped and Plan.decode(one.encode()) == one
    assert made(half, "a####bc####d####", 3).counts == [12]
    assert made(frames, "####b####", 1).counts == [8]
    for pieces, number in (("####b####", 3), ("####", 5), ("########", 0), ("#####", 3)):
        with pytest.raises(OptionError, match='"per": "image"'):
            made(frames, pieces, number)


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


def test_only_a_square_is_taken_for_a_square() -> None:
    """Newlines and several tiles add up to square numbers, too."""
    assert _image_grid("LlavaForConditionalGeneration", 36) == (1, 6, 6)
    assert _image_grid("LlavaForConditionalGeneration", 36, "pixtral") is None
    assert _image_grid("LlavaForConditionalGeneration", 37) is None
    assert _image_grid("InternVLForConditionalGeneration", 16) == (1, 4, 4)
    assert _image_grid("InternVLForConditionalGeneration", 64) is None
    for name in ("LlavaNext", "LlavaOnevision", "Mistral3", "Qwen2VL"):
        assert _image_grid(f"{name}ForConditionalGeneration", 36) is None


def item(count: int) -> dict:
    class Element:
        data = plan(served(DivPrune(), 1), "#" * count).encode()

    return {field_name("image"): Element}


def test_batches_of_the_encoder_hold_what_was_measured() -> None:
    """Counted before reduction: the scheduler would let any number of these one-token images through."""
    items = [("image", item(count)) for count in (4, 4, 4, 20, 1, 9)]
    made = [[items.index(one) for one in chunk] for chunk in split_by_tokens(items, 10)]
    assert made == [[0, 1], [2], [3], [4, 5]]
    seen = []

    def group_and_batch(mm_kwargs, *, device=None):
        seen.append((len(mm_kwargs), device))
        yield from mm_kwargs

    assert list(limit_batches(group_and_batch, 10)(items, device="there")) == items
    assert seen == [(2, "there"), (1, "there"), (1, "there"), (2, "there")]
    assert list(split_by_tokens([("image", {})] * 3, 1)) == [
        [("image", {})] * 3
    ]  # without plans nothing is known, or changed
