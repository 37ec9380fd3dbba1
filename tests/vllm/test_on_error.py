# SPDX-License-Identifier: Apache-2.0
"""Requests that a setting cannot serve: a server refuses them, or serves them unpruned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from front_end import FrontEnd, samples
from test_log import read_events
from test_placeholders_in_text import IMAGE as PAD
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.vllm.frontend import items, pixels
from tokenprune.integrations.vllm.frontend.served import MethodError

NAME = "qwen2_5_vl"
# A prompt that ends with an image, so the position of its answer is unknown.
ENDS = CHECKPOINTS[NAME].prompt(1).partition("<|vision_end|>")[0]
STRICT = {"profiles": {"strict": {"keep": 0.5, "on_error": "refuse"}}, "log": "json"}


def failures(model: str) -> dict[tuple[str, ...], float]:
    return samples("tokenprune:failures_total", model)


def test_it_is_served_in_full_or_refused(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    ask = FrontEnd(folder, NAME, DIVPRUNE | STRICT | {"on_error": "full"}, "falling").ask
    unpruned = ask(1, {"off": True}, prompt=ENDS)
    read_events(caplog)
    assert ask(1, prompt=ENDS) == unpruned
    (line,) = read_events(caplog)
    assert line["full"] == "failure" and line["method"] == "off" and line["profile"] == "default"
    assert line["tokens_in"] == line["tokens_out"] > 0 and "shadow" not in line
    with pytest.raises(OptionError, match="ends with an image"):
        ask(1, {"profile": "strict"}, prompt=ENDS)
    assert read_events(caplog) == [{"event": "refusal", "reason": "input"}]
    assert failures("falling") == {("input", "default"): 1, ("input", "strict"): 1}
    # A wrong setting is a fault of the request, not a failure.
    for bad in ({"keep": 2.0}, {"method": "divprun"}, {"profile": "fsat"}, [1]):
        with pytest.raises(TokenPruneError):
            ask(1, bad, prompt=ENDS)
    assert sum(failures("falling").values()) == 2
    assert samples("tokenprune:requests_total", "falling") == {("key", "request"): 1, ("default", "default"): 1}


def test_default_refuses_the_request(folder: Callable[[str], Path]) -> None:
    ask = FrontEnd(folder, NAME, DIVPRUNE, "refusing it").ask
    for prompt, says in (
        (ENDS, "ends with an image"),
        (CHECKPOINTS[NAME].prompt(1, f"a {PAD}?"), "2 image placeholders"),
    ):
        with pytest.raises(OptionError, match=says):
            ask(1, prompt=prompt)
    assert failures("refusing it") == {("input", "default"): 2}
    assert samples("tokenprune:refusals_total", "refusing it") == {("input",): 2}


@pytest.mark.parametrize("method", ["divprune", "dynres", "pixelprune", ["downsample", "uniform"]])
@pytest.mark.parametrize("size", [(1, 1), (1, 450), (3, 900), (2000, 2)])
def test_images_of_clients_cause_no_method_failure(
    folder: Callable[[str], Path], method: Any, size: tuple[int, int]
) -> None:
    """Images of any size are served, refused as an input, or refused by vLLM."""
    model = f"image {method} {size}"
    for more in ({}, {"rollout": 0.0}):
        front = FrontEnd(folder, NAME, {"method": method, "keep": 0.5} | more, model)
        try:
            front.ask([Image.new("RGB", size)], cached=False)
        except Exception as error:
            assert not isinstance(error, MethodError), error
    assert not {outcome for outcome, *_ in failures(model)} - {"input"}
    assert not {outcome for outcome, *_ in samples("tokenprune:shadow_requests_total", model)} & {"failed"}


@pytest.mark.parametrize("stage", ["shrink", "plan"])
def test_a_methods_own_error(folder: Callable[[str], Path], stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of any class, before the image is read and after it is resized. In shadow, clients see no error."""
    setting = {"method": ["downsample", "uniform"], "keep": [0.5, 0.5]}
    model, plan = f"own {stage}", items.PromptItem.make_plan
    ask = FrontEnd(folder, NAME, setting | STRICT | {"on_error": "full"}, model).ask
    ask_in_shadow = FrontEnd(folder, NAME, setting | {"rollout": 0.0}, f"{model} shadow").ask
    unpruned = ask(2, {"off": True})

    def fail(self: Any, *args: Any) -> Any:
        if stage == "plan" and args[0].off:
            return plan(self, *args)
        raise ZeroDivisionError("a secret of the server's")

    monkeypatch.setattr(
        *((pixels.Shrinker, "_changed") if stage == "shrink" else (items.PromptItem, "make_plan")), fail
    )
    assert ask(2) == unpruned
    with pytest.raises(
        OptionError, match=r"downsample\+uniform failed on this request \(ZeroDivisionError\)"
    ) as caught:
        ask(2, {"profile": "strict"})
    assert "secret" not in str(caught.value)
    assert failures(model) == {("full", "default"): 1, ("refused", "strict"): 1}
    if stage == "shrink":
        assert ask_in_shadow(2) == unpruned
        assert samples("tokenprune:shadow_requests_total", f"{model} shadow") == {("failed", "default"): 1}


def test_errors_of_vllm_are_not_counted(folder: Callable[[str], Path]) -> None:
    ask = FrontEnd(folder, NAME, DIVPRUNE | {"on_error": "full"}, "not ours").ask
    with pytest.raises(Exception) as caught:
        ask(1, prompt="no place for an image")
    assert not isinstance(caught.value, TokenPruneError) and failures("not ours") == {}
    assert json.dumps(str(caught.value))
