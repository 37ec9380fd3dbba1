# SPDX-License-Identifier: Apache-2.0
"""Lists of methods, snapshots of models and positions of visual tokens, for tests of all folders."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import tokenprune
from tokenprune import Budget, Method, Site
from tokenprune.integrations.shared.checks.reading import find_missing_observable
from tokenprune.integrations.shared.towers.tower_scores import find_pixel_observables
from tokenprune.models.families import SUPPORTED
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from zoo import IMAGE, VIDEO, Family

METHODS = tokenprune.available_methods()
# Methods that act on pixels need a processor, but these tests pass tensors to the model. Methods that act in the
# encoder change the features, so the oracle with the unpatched encoder does not apply: see test_encoder.py.
_BEFORE_THE_DECODER = (Site.PRE_ENCODER, Site.IN_ENCODER)
# Methods that change attention remove no tokens and cut nowhere: see test_pevlm.py.
_ELSEWHERE = (*_BEFORE_THE_DECODER, Site.ATTENTION)
# Methods that compare frames ignore images and are refused for families without videos. Methods that merge frames in
# the tower are tested in test_frame_merging.py.
_INFOS = map(tokenprune.method_info, METHODS)
_COMPARING = [info.name for info in _INFOS if select_observables(info.observables, ObservedAt.FRAMES)]
VIDEO_METHODS = [name for name in _COMPARING if tokenprune.method_info(name).site not in _ELSEWHERE]
# These methods read observables that some families lack: see test_tile_methods.py.
TILE_METHODS = [name for name in METHODS if find_missing_observable(tokenprune.method(name), SUPPORTED["qwen2_vl"])]
# These methods read pixel colors, which need a processor: see test_erase.py.
COLOUR_METHODS = [name for name in METHODS if find_pixel_observables(tokenprune.method(name))]
MODEL_METHODS = [
    name
    for name in METHODS
    if tokenprune.method_info(name).site not in _ELSEWHERE
    and name not in (*VIDEO_METHODS, *TILE_METHODS, *COLOUR_METHODS)
]
# Methods with a single cut that keep exactly the budget; the others spread it over several cuts or layers.
SINGLE_CUT = [
    name
    for name in MODEL_METHODS
    if len(tokenprune.method(name).stages(Budget(keep=0.3), 4)) == 1 and tokenprune.method(name).min_tokens
]


def at_the_decoder(method: str) -> Method:
    """Return a method that cuts at the decoder: by default flowcut cuts inside the towers that support it."""
    return tokenprune.method(method, **({"inside": False} if method == "flowcut" else {}))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return all state that a patch may change: hooks, instance attributes and configs of all modules, without
    weights."""
    state: dict[str, Any] = {}
    configs: dict[int, Any] = {}  # most modules share a config, and `to_dict` is slow
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in ("_parameters", "_buffers", "_modules"):
                value = sorted(value)
            elif isinstance(value, dict):  # this includes hooks
                value = {k: id(v) for k, v in value.items()}
            elif hasattr(value, "to_dict"):
                if id(value) not in configs:
                    configs[id(value)] = (id(value), value.to_dict(), getattr(value, "_attn_implementation", None))
                value = configs[id(value)]
            elif not isinstance(value, (int, float, str, type(None))):
                value = id(value)
            state[f"{name}.{key}"] = value
        state[f"{name}.class"] = type(module)
    return state


def check_takes(family: Family, method: str) -> None:
    """Skip the test if `method` refuses models of `family`."""
    if (tokenprune.method_info(method).site is Site.ATTENTION or method in _COMPARING) and not family.video:
        pytest.skip(f"{family.name} does not support videos, so it refuses {method} (test_pevlm.py, test_frames.py)")
    if method in TILE_METHODS and find_missing_observable(tokenprune.method(method), SUPPORTED[family.kind]):
        pytest.skip(f"{family.name} lacks a thumbnail before the tiles, so it refuses {method} (test_tile_methods.py)")


def pieces(family: Family, inputs: Any, per: str = "image") -> list[list[list[int]]]:
    """Return, for each row, the positions of each segment with a separate budget."""
    rows = []
    for counts, ids in zip(inputs.counts, inputs["input_ids"], strict=True):
        positions = ((ids == IMAGE) | (ids == VIDEO)).nonzero().flatten()
        if per == "prompt":
            counts = [len(positions)] if len(positions) else []
        rows.append([segment.tolist() for segment in positions.split(counts)])
    return rows
