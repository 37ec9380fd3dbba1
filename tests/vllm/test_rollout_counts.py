# SPDX-License-Identifier: Apache-2.0
"""A rollout serves requests unpruned, and counts the tokens that it would have kept."""

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
    *(("qwen2_5_vl", key) for key in SETTINGS),
    *(("llava_next", key) for key in ("divprune", "two")),
    *(("mistral3", key) for key in ("divprune", "dynres")),
    ("qwen3_vl", "dynres"),
    ("internvl", "divprune"),
]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_shadow_counts_match(folder: Callable[[str], Path], name: str, key: str) -> None:
    pruned_name, shadow_name = f"real-{name}-{key}", f"shadow-{name}-{key}"
    pruned_front = FrontEnd(folder, name, SETTINGS[key], pruned_name)
    shadow_front = FrontEnd(folder, name, SETTINGS[key] | {"rollout": 0.0}, shadow_name)
    for count in (1, 3, 3):
        pruned_front.ask(count)
        assert shadow_front.ask(count) == shadow_front.ask(count, {"off": True})
    counted, expected = sum_stages("tokenprune:shadow_tokens_total", shadow_name), sum_stages(TOTAL, pruned_name)
    assert counted == expected and 0 < counted["out"] <= counted["in"]
    assert (counted["out"] < counted["in"]) == (key != "frames")  # methods that compare frames keep images unpruned
    assert set(samples("tokenprune:shadow_requests_total", shadow_name).items()) == {(("kept", "default"), 3)}
    assert samples(TOTAL, shadow_name).keys() == {("1", "off", stage) for stage in ("in", "out")}


def test_rollout_prunes_a_share_of_requests(folder: Callable[[str], Path]) -> None:
    """Wrong settings are refused in both groups. A request that cannot be counted is served and recorded."""
    name, model = "qwen2_5_vl", "split"
    profiles = {"fast": {"keep": 0.11, "rollout": 1.0}, "ocr": {"off": True}}
    front = FrontEnd(folder, name, DIVPRUNE | {"profiles": profiles, "rollout": 0.25, "min_keep": 0.1}, model)
    ask = front.ask
    unpruned = ask(1, {"profile": "ocr"})
    pruned = ask(1, lot=0.2)
    assert len(pruned) < len(unpruned) == len(ask(1, lot=0.25)) == len(ask(1, lot=0.9))
    assert len(ask(1, {"profile": "fast"}, lot=0.9)) < len(pruned)
    for lot in (0.0, 0.9):
        for bad in ({"keep": 2.0}, {"keep": 0.05}, {"method": "divprun"}, {"profile": "fsat"}):
            with pytest.raises(ValueError):
                ask(1, bad, lot=lot)
    ends = CHECKPOINTS[name].prompt(1).partition("<|vision_end|>")[0]
    with pytest.raises(OptionError, match="ends with an image"):
        ask(1, prompt=ends, lot=0.0)
    assert len(ask(1, prompt=ends, lot=0.9)) < len(unpruned)  # shorter only by the text after the image
    shadows = samples("tokenprune:shadow_requests_total", model)
    assert shadows == {("kept", "default"): 2, ("input", "default"): 1}
    tokens = samples("tokenprune:shadow_tokens_total", model)
    assert set(tokens) == {("0.25", "divprune", "in"), ("0.25", "divprune", "out")}
    requests = samples("tokenprune:requests_total", model)
    assert sum(requests.values()) == 6 and front.model_config.served_model_name == model


def test_groups_have_separate_cache_entries(folder: Callable[[str], Path]) -> None:
    front = FrontEnd(folder, "qwen2_5_vl", DIVPRUNE | {"rollout": 0.5}, "sides")

    def hashes(override: Any, lot: float) -> str:
        return front.process(1, override, lot=lot)["mm_hashes"]["image"][0]

    requests = [({}, 0.0), ({}, 0.9), ({"keep": 0.5}, 0.9), ({"off": True}, 0.9)]
    assert len({hashes(*request) for request in requests}) == 4
    assert hashes({}, 0.9) == hashes({"keep": 0.25}, 0.6)
