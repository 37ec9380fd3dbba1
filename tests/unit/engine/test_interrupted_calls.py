# SPDX-License-Identifier: Apache-2.0
"""An interrupted forward does not change the next call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import StaticCache

import tokenprune
from tokenprune import UnsupportedSetupError
from tokenprune.api import get_attachment
from zoo import FAMILIES

LLAVA = FAMILIES["llava"]


class Logits(nn.Module):
    """Model with positional inputs, as torch.export and torch.jit.trace require."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, values, strict=True)), use_cache=False).logits


def raise_in_layer(error: type[BaseException]) -> Callable[[Any, dict[str, Any]], None]:
    def run(model: Any, inputs: dict[str, Any]) -> None:
        def fail(*args: Any) -> None:
            raise error

        with pytest.raises(error), model.model.language_model.layers[2].register_forward_pre_hook(fail):
            model(**inputs)

    return run


def export(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    module = Logits(model, list(inputs))
    return torch.export.export(module, tuple(inputs.values()), strict=False).module()(*inputs.values())


def trace(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    module, values = Logits(model, list(inputs)), tuple(inputs.values())
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(module, values, check_trace=False)(*values)


def make_graph(model: Any, inputs: dict[str, Any]) -> None:
    make_fx(Logits(model, list(inputs)), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs.values())


def trace_symbols(model: Any, inputs: dict[str, Any]) -> None:
    torch.fx.symbolic_trace(model, concrete_args={"use_cache": False})


def run_fake(model: Any, inputs: dict[str, Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(**{name: mode.from_tensor(value) for name, value in inputs.items()})


def differentiate(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    def loss(pixels: torch.Tensor) -> torch.Tensor:
        return model(**inputs | {"pixel_values": pixels}).logits.logsumexp(-1).sum()

    with torch.enable_grad():
        return torch.func.grad(loss)(inputs["pixel_values"])


def vectorize(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    pixels = torch.stack([inputs["pixel_values"]])
    return torch.vmap(lambda pixels: model(**inputs | {"pixel_values": pixels}).logits)(pixels)[0]


def abort_stream(error: type[BaseException]) -> Callable[[Any, dict[str, Any]], None]:
    class Streamer:
        def put(self, value: Any) -> None:
            raise error

        def end(self) -> None: ...

    def run(model: Any, inputs: dict[str, Any]) -> None:
        with pytest.raises(error):
            model.generate(**inputs, max_new_tokens=3, streamer=Streamer())

    return run


def kill_thread(model: Any, inputs: dict[str, Any]) -> None:
    thread = threading.Thread(target=raise_in_layer(SystemExit), args=(model, inputs))
    thread.start()
    thread.join()


EVENTS = {
    "error in a layer": raise_in_layer(ZeroDivisionError),
    "KeyboardInterrupt": raise_in_layer(KeyboardInterrupt),
    "GeneratorExit": raise_in_layer(GeneratorExit),
    "aborted stream": abort_stream(GeneratorExit),
    "dead thread": kill_thread,
    "export": export,
    "jit.trace": trace,
    "make_fx": make_graph,
    "symbolic_trace": trace_symbols,
    "fake tensors": run_fake,
    "func.grad": differentiate,
    "vmap": vectorize,
}


@torch.no_grad()
def generate(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    output = model.generate(
        **inputs, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.cat(output.logits)


@torch.no_grad()
@pytest.mark.parametrize(("method", "keep"), [("divprune", 0.4), ("fastv", 0.4), ("tome", 0.4), ("divprune", 1.0)])
@pytest.mark.parametrize("event", EVENTS)
def test_next_generate_gives_the_earlier_answer(event: str, method: str, keep: float) -> None:
    model, inputs, others = LLAVA.build(), LLAVA.make_inputs(), LLAVA.make_inputs(images=(2, 1), seed=3)
    with tokenprune.patched(model, method, keep=keep):
        want = generate(model, inputs)
        with suppress(Exception):
            EVENTS[event](model, others)
        got = generate(model, inputs)
        assert torch.equal(got, want)
        assert not get_attachment(model).engine.calls.active
        assert tokenprune.stats(model).visual_tokens_in == LLAVA.visual_mask(model, inputs).sum()


@torch.no_grad()
@pytest.mark.parametrize("run", [export, differentiate, vectorize], ids=lambda run: run.__name__)
def test_a_patch_that_keeps_all_tokens_runs_without_values(run: Callable) -> None:
    model, inputs = LLAVA.build(), LLAVA.make_inputs()
    want = run(model, inputs)
    with tokenprune.patched(model, ["divprune", "fastv"], keep=1.0, feature_cache=2**20):
        assert torch.equal(run(model, inputs), want)
        assert tokenprune.stats(model).feature_cache.entries == 0


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv", "tome", "vispruner"])
@pytest.mark.parametrize("run", [export, run_fake, differentiate, vectorize], ids=lambda run: run.__name__)
def test_a_method_that_needs_values_is_refused_without_them(run: Callable, method: str) -> None:
    model, inputs = LLAVA.build(), LLAVA.make_inputs()
    with (
        tokenprune.patched(model, method, keep=0.4),
        pytest.raises(UnsupportedSetupError, match=rf"{method} must read values.*keep=1\.0"),
    ):
        run(model, inputs)


@torch.no_grad()
@pytest.mark.parametrize(("method", "interruption"), [("divprune", "raise"), ("fastv", "raise"), ("fastv", "refuse")])
def test_an_interrupted_inner_call_does_not_disturb_the_outer_call(method: str, interruption: str) -> None:
    model, inputs, others = LLAVA.build(), LLAVA.make_inputs(), LLAVA.make_inputs(images=(2, 1))
    depth = []

    def interrupt(*args: Any) -> None:
        if depth:
            return
        depth.append(1)
        if interruption == "raise":
            raise_in_layer(KeyboardInterrupt)(model, others)
        else:
            with pytest.raises(UnsupportedSetupError, match="must read values"):
                run_fake(model, inputs)

    with tokenprune.patched(model, method, keep=0.4):
        want = model(**inputs).logits
        with model.model.language_model.layers[1].register_forward_hook(interrupt):
            got = model(**inputs).logits
        assert depth and torch.equal(got, want)
        assert not get_attachment(model).engine.calls.active


@torch.no_grad()
def test_the_decoder_alone_runs_after_an_interrupted_call_and_unpatch_forgets_it() -> None:
    model, inputs = LLAVA.prepare()
    decoder, embeds = model.model.language_model, model.get_input_embeddings()(inputs["input_ids"])
    want = decoder(inputs_embeds=embeds).last_hidden_state
    tokenprune.patch(model, "divprune", keep=0.4)
    engine = get_attachment(model).engine
    raise_in_layer(KeyboardInterrupt)(model, inputs)
    assert len(engine.calls.active) == 1
    assert torch.equal(decoder(inputs_embeds=embeds).last_hidden_state, want)
    raise_in_layer(KeyboardInterrupt)(model, inputs)
    tokenprune.unpatch(model)
    assert not engine.calls.active


@torch.no_grad()
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_static_cache_continues_after_an_interrupted_call(interrupted: bool) -> None:
    model, inputs, others = LLAVA.build(), LLAVA.make_inputs(), LLAVA.make_inputs(images=(2, 1))
    length, token = inputs["input_ids"].shape[1], inputs["input_ids"][:, -1:]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(token)], dim=1)
    with tokenprune.patched(model, "fastv", keep=0.4):
        steps = []
        for interrupt in (False, interrupted):
            cache = StaticCache(config=model.config.text_config, max_cache_len=length + 4)
            model(**inputs, past_key_values=cache)
            if interrupt:
                raise_in_layer(KeyboardInterrupt)(model, others)
            steps.append(model(input_ids=token, attention_mask=mask, past_key_values=cache).logits)
        assert torch.equal(*steps)
