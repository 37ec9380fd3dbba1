# SPDX-License-Identifier: Apache-2.0
"""Methods run on random tokens while a server loads, so that Triton compiles its kernels.

On a CPU no kernel is compiled, so the tests count the runs that would compile kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

from conftest import DIVPRUNE, Engine
from runner import IN_LLM
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings.items import get_label, get_method
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.worker import warm_up
from tokenprune.methods.pre_llm.divprune import DivPrune
from tokenprune.settings import Setting

PROFILES = {
    "sharp": {"keep": 0.5}, "again": {"keep": 0.5}, "tower": {"method": "visionzip"}, "off": {"off": True},
    "whole": {"keep": 1.0}, "merged": {"method": "tome", "keep": 0.5},
}  # fmt: skip


def kind(count: int) -> tuple[int, bool]:
    """Return the value that determines whether Triton compiles a kernel again."""
    return (count - 1).bit_length(), count % 16 == 0


@pytest.mark.parametrize("largest", [64, 65, 255, 256, 257, 513, 530, 576, 729, 1024, 2880])
def test_each_kind_of_length_is_run(largest: int) -> None:
    runs = list(warm_up.list_lengths(largest))
    assert {kind(count) for count in range(33, largest + 1)} == {kind(count) for count in runs if count > 32}
    assert max(runs) == largest and len(runs) <= 2 * largest.bit_length()


def test_lengths_of_small_and_no_images() -> None:
    assert list(warm_up.list_lengths(0)) == [] and max(warm_up.list_lengths(5)) == 5
    assert (
        warm_up.find_square_grid(576) == (1, 24, 24)
        and warm_up.find_square_grid(63) == (1, 7, 9)
        and warm_up.find_square_grid(7) == (1, 1, 7)
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Setting, int]]:
    """Record the setting and the number of tokens of each run, as if kernels were compiled on this device."""
    recorded: list[tuple[Setting, int]] = []
    run = warm_up._run

    def spy(model: Any, vllm_config: Any, device: torch.device, setting: Setting, *rest: Any) -> None:
        recorded.append((setting, rest[-1]))
        run(model, vllm_config, device, setting, *rest)

    monkeypatch.setattr(warm_up, "uses_kernels", lambda device: True)
    monkeypatch.setattr(warm_up, "_run", spy)
    return recorded


def test_server_runs_its_setting_and_profiles(start: Callable[..., Engine], runs: list[tuple[Setting, int]]) -> None:
    engine = start("llava", DIVPRUNE | {"profiles": PROFILES})
    executed = [(get_label(setting), count) for setting, count in runs]
    largest = 36  # images of this model are square
    labels = [("divprune", "0.25"), ("divprune", "0.5"), ("visionzip", "0.25")]
    assert executed == [(label, count) for label in labels for count in warm_up.list_lengths(largest)]
    checkpoint = engine.checkpoint
    engine.generate([engine.request(checkpoint.prompt(1), checkpoint.images(1))])
    assert len(runs) == len(executed)  # only before the server was ready


def test_any_image_shape_and_longer_videos(start: Callable[..., Engine], runs: list[tuple[Setting, int]]) -> None:
    engine = start("qwen2_5_vl", {"method": "vscan", "stage2": False, "keep": 0.5})
    assert len(runs) == len(set(runs)) > 2
    budget = MultiModalBudget(engine.llm.llm_engine.vllm_config, MULTIMODAL_REGISTRY).mm_max_toks_per_item
    assert max(count for _, count in runs) == budget["video"] > budget["image"]


def test_reload_runs_only_new_settings(start: Callable[..., Engine], runs: list[tuple[Setting, int]]) -> None:
    engine, default = start("llava", DIVPRUNE), parse_setting(DIVPRUNE).to_json()
    at_start = len(runs)

    def reload(**profiles: Any) -> list[Any]:
        new = {name: parse_setting(DIVPRUNE, layer).to_json() for name, layer in profiles.items()}
        return engine.llm.collective_rpc("tokenprune_warm_up", args=({"default": default} | new,))

    assert reload(tower={"method": "visionzip"}, off={"off": True}) == [len(list(warm_up.list_lengths(36)))]
    assert {get_label(setting) for setting, _ in runs[at_start:]} == {("visionzip", "0.25")}
    assert reload(again={"method": "visionzip"}) == [0]
    assert [get_method(setting).name for setting, _ in runs[:at_start]] == ["divprune"] * at_start


@IN_LLM
def test_selection_inside_the_language_model(start: Callable[..., Engine], runs: list[tuple[Setting, int]]) -> None:
    start("llava", {"method": "fastv", "keep": 0.5, "layer": 1, "experimental_in_llm": True},
          disable_chunked_mm_input=True, enable_prefix_caching=False, enable_chunked_prefill=False)  # fmt: skip
    assert [count for _, count in runs] == list(warm_up.list_lengths(36))


def test_devices_without_compiled_kernels_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = type("Worker", (), {"compile_or_warm_up_model": lambda self: "done"})
    warm_up.wrap_warm_up(worker)
    wrapped = worker.compile_or_warm_up_model
    warm_up.wrap_warm_up(worker)
    assert worker.compile_or_warm_up_model is wrapped
    instance = worker()
    instance.device = torch.device("cpu")
    monkeypatch.setattr(warm_up, "warm_up", None)  # would raise
    for active in (False, True):
        instance.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(tokenprune_active=active))  # noqa: B023
        assert instance.compile_or_warm_up_model() == "done"


@pytest.fixture
def model_and_config() -> tuple[Any, Any]:
    """Return a model and its configuration, with the attributes that the warm-up reads."""
    offer = SimpleNamespace(profiles={"default": DIVPRUNE})
    multimodal = SimpleNamespace(tokenprune=DIVPRUNE, tokenprune_server=offer)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal, dtype=torch.bfloat16, max_model_len=40)
    )
    return SimpleNamespace(tokenprune_width=32, tokenprune_norm=None), config


def test_failing_selection_raises_at_load(
    model_and_config: tuple[Any, Any], runs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def select(self: Any, tokens: Any) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(DivPrune, "select", select)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with pytest.raises(UnsupportedSetupError, match=r"divprune failed on .* 48 tokens .*out of registers"):
        warm_up.warm_up(
            *model_and_config, torch.device("cpu"), {"image": 50}, [parse_setting({"method": "divprune", "keep": 0.25})]
        )
    assert "divprune failed on a random item of 48 tokens" in caplog.text


def test_refused_sizes_are_skipped(
    model_and_config: tuple[Any, Any], runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = DivPrune.select

    def even(self: Any, tokens: Any) -> Any:
        if tokens.segments.counts[0] % 2:
            raise OptionError("odd")
        return select(self, tokens)

    setting = parse_setting(DIVPRUNE)  # parsing runs the method, so it precedes the patch
    monkeypatch.setattr(DivPrune, "select", even)
    assert warm_up.warm_up(*model_and_config, torch.device("cpu"), {"image": 64}, [setting]) == [("divprune", 64)]


def test_video_out_of_memory_does_not_stop_the_server(
    model_and_config: tuple[Any, Any], runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def select(self: Any, tokens: Any) -> Any:
        if tokens.segments.counts[0] > room:
            raise torch.OutOfMemoryError("too many tokens")
        return unbounded(self, tokens)

    setting, unbounded, room = parse_setting(DIVPRUNE), DivPrune.select, 64
    monkeypatch.setattr(DivPrune, "select", select)
    executed = warm_up.warm_up(*model_and_config, torch.device("cpu"), {"image": 64, "video": 256}, [setting])
    assert max(count for _, count in executed) == 64
    room, model = 32, SimpleNamespace(tokenprune_width=32, tokenprune_norm=None)
    with pytest.raises(UnsupportedSetupError, match=r"divprune failed on a random item of .* too many tokens"):
        warm_up.warm_up(model, model_and_config[1], torch.device("cpu"), {"image": 64, "video": 256}, [setting])


@pytest.mark.only_v2("where kernels are interpreted")
def test_requests_use_only_warmed_up_kernels(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    programs: list[tuple[str, str]] = []
    run = InterpretedFunction.run

    def spy(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        if self.fn.__module__.startswith("tokenprune."):
            programs.append((self.fn.__name__, repr(sorted(constants.items()))))
        return run(self, *args, grid=grid, warmup=warmup, **constants)

    monkeypatch.setattr(InterpretedFunction, "run", spy)
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "triton")
    profiles = {"tower": {"method": "visionzip"}}
    engine = start("llava", DIVPRUNE | {"profiles": profiles})
    before = set(programs)
    programs.clear()
    checkpoint = engine.checkpoint
    for override in ({}, {"profile": "tower"}):
        engine.generate([engine.request(checkpoint.prompt(1), checkpoint.images(1), override)])
    assert programs and set(programs) <= before
