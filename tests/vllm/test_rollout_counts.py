# SPDX-License-Identifier: Apache-2.0
"""A rollout serves in full and counts what would have been kept: the same that is kept where it does not hold back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from front_end import TOTAL, FrontEnd, samples, sum_stages
from tokenprune.errors import OptionError

SETTINGS = {
    "divprune": DIVPRUNE,
    "tokens": {"method": "uniform", "keep": 5},
    "dynres": {"method": "dynres", "keep": 0.5},
    "two": {"method": ["downsample", "uniform"], "keep": [0.5, 0.5]},
    "pixelprune": {"method": "pixelprune"},
    "frames": {"method": "evs", "keep": 0.5},
}
CASES = [
    *(("qwen2_5_vl", one) for one in SETTINGS),
    *(("llava_next", one) for one in ("divprune", "two")),
    *(("mistral3", one) for one in ("divprune", "dynres")),
    ("qwen3_vl", "dynres"),
    ("internvl", "divprune"),
]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_what_would_be_kept(folder: Callable[[str], Path], name: str, key: str) -> None:
    real, shadow = f"real-{name}-{key}", f"shadow-{name}-{key}"
    reduced = FrontEnd(folder, name, SETTINGS[key], real)
    held = FrontEnd(folder, name, SETTINGS[key] | {"rollout": 0.0}, shadow)
    for count in (1, 3, 3):
        reduced.ask(count)
        assert held.ask(count) == held.ask(count, {"off": True})
    found, wanted = sum_stages("tokenprune:shadow_tokens_total", shadow), sum_stages(TOTAL, real)
    assert found == wanted and 0 < found["out"] <= found["in"]
    assert (found["out"] < found["in"]) == (key != "frames")  # images stay where frames are compared
    assert set(samples("tokenprune:shadow_requests_total", shadow).items()) == {(("kept", "default"), 3)}
    assert samples(TOTAL, shadow).keys() == {("1", "off", stage) for stage in ("in", "out")}


def test_a_share_is_reduced_and_the_rest_counted(folder: Callable[[str], Path]) -> None:
    """A setting that would be refused is refused on both sides; what cannot be counted is served, and said."""
    name, model = "qwen2_5_vl", "split"
    profiles = {"fast": {"keep": 0.11, "rollout": 1.0}, "ocr": {"off": True}}
    front = FrontEnd(folder, name, DIVPRUNE | {"profiles": profiles, "rollout": 0.25, "min_keep": 0.1}, model)
    ask = front.ask
    whole = ask(1, {"profile": "ocr"})
    less = ask(1, lot=0.2)
    assert len(less) < len(whole) == len(ask(1, lot=0.25)) == len(ask(1, lot=0.9))
    assert len(ask(1, {"profile": "fast"}, lot=0.9)) < len(less)
    for lot in (0.0, 0.9):
        for bad in ({"keep": 2.0}, {"keep": 0.05}, {"method": "divprun"}, {"profile": "fsat"}):
            with pytest.raises(ValueError):
                ask(1, bad, lot=lot)
    ends = CHECKPOINTS[name].prompt(1).partition("<|vision_end|>")[0]
    with pytest.raises(OptionError, match="ends with an image"):
        ask(1, prompt=ends, lot=0.0)
    assert len(ask(1, prompt=ends, lot=0.9)) < len(whole)  # of which the text behind is missing alone
    shadows = samples("tokenprune:shadow_requests_total", model)
    assert shadows == {("kept", "default"): 2, ("input", "default"): 1}
    tokens = samples("tokenprune:shadow_tokens_total", model)
    assert set(tokens) == {("0.25", "divprune", "in"), ("0.25", "divprune", "out")}
    requests = samples("tokenprune:requests_total", model)
    assert sum(requests.values()) == 6 and front.model_config.served_model_name == model


def test_sides_share_nothing_and_each_shares_with_itself(folder: Callable[[str], Path]) -> None:
    front = FrontEnd(folder, "qwen2_5_vl", DIVPRUNE | {"rollout": 0.5}, "sides")

    def hashes(asked: Any, lot: float) -> str:
        return front.process(1, asked, lot=lot)["mm_hashes"]["image"][0]

    asked = [({}, 0.0), ({}, 0.9), ({"keep": 0.5}, 0.9), ({"off": True}, 0.9)]
    assert len({hashes(*one) for one in asked}) == 4
    assert hashes({}, 0.9) == hashes({"keep": 0.25}, 0.6)
