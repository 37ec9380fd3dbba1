# SPDX-License-Identifier: Apache-2.0
"""Cuts inside the decoder without an engine: blocks, settings, what a server must not be combined with."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from conftest import OPTIONS
from tokenprune.base import Selection
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.vllm.in_llm import limits
from tokenprune.integrations.vllm.in_llm.layout import Piece, Share, kept, lay_out
from tokenprune.integrations.vllm.in_llm.scheduler import WholePictures, before_pictures
from tokenprune.integrations.vllm.plugin import missing_hooks
from tokenprune.integrations.vllm.settings import Setting, check_method, check_override
from tokenprune.methods.fastv import FastV
from tokenprune.tokens import VisualTokens

BLOCK, WIDTH = 4, 40
DART = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
FASTV = {"method": "fastv", "keep": 0.25, "experimental_in_llm": True}


@dataclass
class Prompt:
    """A request of the little engine below: its tokens, the pictures among them, and its blocks of the KV cache."""

    tokens: list[str]
    pieces: list[Piece]
    table: list[int]
    computed: int = 0

    def remaining(self, end: int) -> list[int]:
        """Places of the first `end` tokens that are left behind the cut; the last ones of a picture are kept."""
        gone = {place for piece in self.pieces if piece.end <= end for place in piece.places[: piece.drop]}
        return [place for place in range(end) if place not in gone]


def prompts(draw: random.Random, aligned: bool, many: int) -> list[Prompt]:
    """Prompts that begin alike, as far as some place behind the first picture."""
    shared = ["start"] * draw.randrange(0, 9)
    made = []
    pieces: list[Piece] = []
    for ordinal in range(draw.randrange(1, 4)):
        count = draw.choice([5, 8, 11, 19, 32])
        places = tuple(range(len(shared), len(shared) + count))
        wanted = draw.randrange(1, count + 1)
        keep = count - BLOCK * max(0, min((count - wanted) // BLOCK, count // BLOCK - 1)) if aligned else wanted
        pieces.append(Piece(places, keep, ordinal, ordinal, "image"))
        shared += [f"picture {ordinal}"] * count + ["text"] * draw.randrange(0, 7)
    free = itertools.count(1)
    blocks: dict[tuple[str, ...], int] = {}
    for number in range(many):
        tokens = shared + [f"question {number}"] * draw.randrange(1, 9)
        table = []
        for end in range(BLOCK, len(tokens) + BLOCK, BLOCK):
            # Full blocks are shared by prompts that begin alike, others are a prompt's own.
            key = (*tokens[:end], *([] if end <= len(tokens) else [f"of {number}"]))
            table.append(blocks.setdefault(key, next(free)))
        table += [0] * (WIDTH - len(table))
        made.append(Prompt(tokens, pieces, table))
    return made


def run(draw: random.Random, requests: list[Prompt], aligned: bool) -> bool:
    """Read the prompts step by step, in chunks that split no picture, all in one memory; returns whether every prompt
    finds behind the cut, at each step, what it has written itself."""
    memory: dict[int, tuple[str, ...]] = {}
    while active := [one for one in requests if one.computed < len(one.tokens)]:
        shares = []
        for one in active:
            end = draw.randrange(one.computed, len(one.tokens)) + 1
            for piece in one.pieces:
                end = piece.end if piece.first < end < piece.end else end
            shares.append(Share(one.computed, end, one.pieces))
        layout = lay_out(shares, WIDTH, BLOCK, aligned)
        tables = [[one.table[column] for column in layout.columns[row]] for row, one in enumerate(active)]
        for row, (one, share) in enumerate(zip(active, shares, strict=True)):
            mine = slice(layout.starts[row], layout.starts[row + 1])
            new = one.remaining(share.end)[share.before :]
            assert len(new) == share.queries == mine.stop - mine.start
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
            one.computed = share.end
    return True


@pytest.mark.parametrize("seed", range(40))
def test_everybody_finds_his_own_tokens(seed: int) -> None:
    """Prompts with common beginnings share blocks, in whatever order and chunks they are read."""
    draw = random.Random(seed)
    assert run(draw, prompts(draw, True, 3), True)
    assert run(draw, prompts(draw, False, 1), False)


def test_packed_tokens_overwrite_what_others_share() -> None:
    """The reason for whole blocks: without them concurrent prompts write into each other's."""
    spoilt = 0
    for seed in range(40):
        draw = random.Random(seed)
        spoilt += not run(draw, prompts(draw, False, 3), False)
    assert spoilt > 20


def test_text_behind_a_picture_keeps_its_slot() -> None:
    pieces = [Piece(tuple(range(3, 22)), 7, 0, 0, "image")]
    layout = lay_out([Share(0, 30, pieces)], WIDTH, BLOCK, True)
    slots = layout.columns[0][layout.column] * BLOCK + layout.offset
    assert slots[:3].tolist() == [0, 1, 2] and slots[10:].tolist() == list(range(22, 30))
    assert slots[3:10].tolist() == [3, 16, 17, 18, 19, 20, 21]  # blocks 1 to 3 are left out


def test_how_many_stay() -> None:
    for block in (16, 32):
        for count in range(1, 200):
            for keep in (0.1, 0.25, 0.6, 1.0, 5):
                setting = Setting.of(DART | {"keep": keep})
                wanted = setting.wanted(count)
                expected = count
                while expected - block >= max(wanted, block):
                    expected -= block
                assert kept(setting, count, block) == expected
                assert kept(setting, count, None) == wanted
    assert kept(Setting.of({"off": True}), 100, 16) == 100


def test_a_picture_in_parts_is_an_error() -> None:
    piece = Piece(tuple(range(4, 24)), 8, 0, 0, "image")
    for computed, end in ((0, 10), (5, 30), (10, 12)):
        with pytest.raises(TokenPruneError, match="came in parts"):
            _ = Share(computed, end, [piece]).cut


def feature(offset: int, length: int) -> Any:
    return SimpleNamespace(mm_position=PlaceholderRange(offset, length), modality="image")


def test_hits_end_before_pictures() -> None:
    features = [feature(6, 10), feature(17, 13), feature(40, 4)]
    ends = {hit: before_pictures(hit, features, BLOCK) for hit in range(0, 60, BLOCK)}
    # A hit of 20 ends in the second picture, whose block begins in the first one, which begins in the second block.
    assert ends == {0: 0, 4: 4, 8: 4, 12: 4, 16: 16, 20: 16, 24: 16, 28: 16, 32: 32, 36: 36, 40: 40, 44: 44, 48: 48} | {
        52: 52, 56: 56
    }  # fmt: skip
    assert before_pictures(8, [feature(6, 4), feature(2, 3)], BLOCK) == 0


class Base:
    """vLLM's scheduler, as far as it matters: it takes what it is given, or stops before a picture."""

    stop: int | None = None

    def _try_schedule_encoder_inputs(self, request: Any, computed: int, new: int, budget: int, **_: Any) -> Any:
        new = new if self.stop is None else min(new, self.stop)
        return [0], new, budget - 1, [1], [2]


class Fake(WholePictures, Base):
    def __init__(self, whole: bool) -> None:
        self._whole_prompts = whole


def test_chunks_end_before_pictures() -> None:
    request = SimpleNamespace(mm_features=[feature(6, 10)])
    fake = Fake(False)
    for computed, asked, given in ((0, 5, 5), (0, 6, 6), (0, 9, 6), (0, 16, 16), (2, 9, 4), (6, 3, 0), (6, 10, 10)):
        assert fake._try_schedule_encoder_inputs(request, computed, asked, 9, shift_computed_tokens=0)[1] == given
    whole = Fake(True)
    assert whole._try_schedule_encoder_inputs(request, 0, 20, 9) == ([0], 20, 8, [1], [2])
    whole.stop = 6
    assert whole._try_schedule_encoder_inputs(request, 0, 20, 9) == ([], 0, 9, [], [])


# -- settings


def test_settings() -> None:
    setting = Setting.of(DART)
    assert setting.in_llm and setting.removes_nothing and setting.count(100) == 100
    assert Setting.of(setting.as_dict()) == setting and setting.cache_key()["experimental_in_llm"] is True
    with pytest.raises(OptionError, match='"experimental_in_llm": true allows it'):
        Setting.of({key: value for key, value in DART.items() if key != "experimental_in_llm"})
    with pytest.raises(OptionError, match=r"leave experimental_in_llm out\. Servable are dart, fastv"):
        Setting.of({"method": "divprune", "experimental_in_llm": True})
    with pytest.raises(OptionError, match="must be true or false, not 1"):
        Setting.of(DART | {"experimental_in_llm": 1})


class TwoCuts(FastV):
    def stages(self, budget: Any, layers: int) -> list[Any]:
        return [(self, budget), (self, budget)]


class Unlike(FastV):
    """Reads what stands behind a picture, and denies it."""

    query_aware = False


class Merging(FastV):
    def select(self, tokens: VisualTokens) -> Selection:
        kept = super().select(tokens)
        return replace(kept, assign=torch.where(kept.keep, torch.arange(kept.keep.shape[1]), -1))


class Greedy(FastV):
    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(tokens.mask)


class Ahead(FastV):
    reads = frozenset({"next_row_attention"})


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (TwoCuts(), "cuts at several layers"),
        (Unlike(), "query_aware has to be True"),
        (Merging(), "it merges tokens"),
        (Greedy(), "where .* were asked for"),
        (Ahead(), "needs next_row_attention"),
    ],
)
def test_methods_that_cannot_be_served(method: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        check_method(method, in_llm=True)


def test_requests_can_only_switch_it_off() -> None:
    server, other = Setting.of(DART), Setting.of({"method": "divprune"})
    for request in ({}, {"keep": 0.25}, {"off": True}, DART):
        check_override(server, Setting.of(DART, request))
    for request in ({"keep": 0.5}, {"pivot_image": 5}, {"method": "divprune"}, FASTV):
        with pytest.raises(OptionError, match="matter of the whole server"):
            check_override(server, Setting.of(DART, request))
    with pytest.raises(OptionError, match="matter of the whole server"):
        check_override(other, Setting.of({"method": "divprune"}, FASTV))
    check_override(other, Setting.of({"method": "divprune"}, {"method": "pool"}))


# -- what a server must not be combined with


def engine_config(folder: Path, setting: Any, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"disable_chunked_mm_input": True} | options
    return EngineArgs(
        str(folder), mm_processor_kwargs={"tokenprune": setting}, **OPTIONS | options
    ).create_engine_config()


@pytest.fixture(scope="module")
def good(folder: Any) -> Any:
    return engine_config(folder("llava_deep"), DART)


def test_every_hook_is_there() -> None:
    assert missing_hooks(limits.ENGINE_HOOKS) == [] and missing_hooks(limits.WORKER_HOOKS) == []


def test_a_good_server_gets_our_scheduler(good: Any) -> None:
    from tokenprune.integrations.vllm.in_llm.scheduler import InLLMScheduler

    assert good.scheduler_config.get_scheduler_cls() is InLLMScheduler
    limits.check_engine(good, Setting.of(DART))
    assert limits.SCHEDULERS[True].endswith("AsyncInLLMScheduler")


@pytest.mark.parametrize(
    ("setting", "options", "says"),
    [
        (DART, {"enforce_eager": False}, "--enforce-eager"),
        (DART, {"disable_chunked_mm_input": False}, "--disable-chunked-mm-input"),
        (DART, {"enable_lora": True}, "LoRA"),
        (DART | {"pivot_text": 4}, {}, "--no-enable-prefix-caching, or set pivot_text to 0(.|\n)*no-enable-chunked"),
        (FASTV, {}, "--no-enable-prefix-caching\n.*--no-enable-chunked-prefill"),
        (DART | {"layer": 4}, {}, "layer=4: choose a layer from 1 to 3"),
        (DART, {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        (DART, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
    ],
)
def test_refused_when_it_starts(folder: Any, setting: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=says):
        engine_config(folder("llava_deep"), setting, **options)


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("parallel_config", "data_parallel_size", 2, "--data-parallel-size"),
        ("parallel_config", "decode_context_parallel_size", 2, "--decode-context-parallel-size"),
        ("parallel_config", "enable_dbo", True, "--enable-dbo"),
        ("parallel_config", "ubatch_size", 2, "--ubatch-size"),
        ("", "kv_transfer_config", object(), "--kv-transfer-config"),
        ("cache_config", "kv_offloading_size", 1.0, "--kv-offloading-size"),
        ("", "ec_transfer_config", object(), "--ec-transfer-config"),
        ("cache_config", "kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
        ("cache_config", "prefix_match_unit", 16, "--prefix-match-unit"),
        ("scheduler_config", "long_prefill_token_threshold", 64, "--long-prefill-token-threshold"),
        ("scheduler_config", "scheduler_cls", "some.Scheduler", "--scheduler-cls"),
        ("model_config", "runner_type", "pooling", "only generation"),
    ],
)
def test_refused(good: Any, monkeypatch: Any, part: str, name: str, value: Any, says: str) -> None:
    """What vLLM's CPU build would not let us ask for in earnest."""
    monkeypatch.setattr(getattr(good, part) if part else good, name, value)
    with pytest.raises(UnsupportedSetupError, match=says):
        limits.check_engine(good, Setting.of(DART))


def test_the_other_runner_is_refused(good: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedSetupError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        limits.check_engine(good, Setting.of(DART))


def test_other_families_are_refused(folder: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="does not serve Gemma3ForConditionalGeneration: it serves Llava"):
        engine_config(folder("gemma3"), DART)
    with pytest.raises(UnsupportedSetupError, match="choose a layer from 3 to 4 of this model"):
        engine_config(folder("qwen3_vl_deep"), DART, max_num_batched_tokens=1200)


def test_layers_with_a_window_are_refused() -> None:
    def decoder(**changes: Any) -> Any:
        attention = SimpleNamespace(
            layer_name="0", sliding_window=None, kv_sharing_target_layer_name=None,
            attn_backend=SimpleNamespace(get_name=lambda: changes.get("backend", "CPU_ATTN")),
        )  # fmt: skip
        vars(attention).update({key: value for key, value in changes.items() if key != "backend"})
        return SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=attention))])

    limits.check_layers(decoder())
    for change in ({"sliding_window": 512}, {"kv_sharing_target_layer_name": "1"}):
        with pytest.raises(UnsupportedModelError, match="sliding window or shares"):
            limits.check_layers(decoder(**change))
    with pytest.raises(UnsupportedSetupError, match="FLASHINFER: start with --attention-backend FLASH_ATTN or"):
        limits.check_layers(decoder(backend="FLASHINFER"))
    with pytest.raises(UnsupportedModelError, match=r"no self_attn\.attn"):
        limits.check_layers(SimpleNamespace(layers=[SimpleNamespace()]))
