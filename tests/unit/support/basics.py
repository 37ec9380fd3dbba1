# SPDX-License-Identifier: Apache-2.0
"""What tests of all folders use: lists of methods, all of a model that a patch may touch, places of visual tokens."""

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
# What acts on pixels needs a processor; these tests hand the model ready-made tensors. What acts in the encoder changes
# the features, so that an oracle with the unpatched encoder does not fit: see test_encoder.py.
_BEFORE_THE_DECODER = (Site.PRE_ENCODER, Site.IN_ENCODER)
# What acts on attention removes nothing, so there is no cut to look at: see test_pevlm.py.
_ELSEWHERE = (*_BEFORE_THE_DECODER, Site.ATTENTION)
# What compares the frames of videos leaves images alone, and is refused for families without videos. What merges them
# in the tower is another matter: see test_frame_merging.py.
_INFOS = map(tokenprune.method_info, METHODS)
_COMPARING = [info.name for info in _INFOS if select_observables(info.observables, ObservedAt.FRAMES)]
VIDEO_METHODS = [name for name in _COMPARING if tokenprune.method_info(name).site not in _ELSEWHERE]
# What reads something that not every family has: see test_tile_methods.py.
TILE_METHODS = [name for name in METHODS if find_missing_observable(tokenprune.method(name), SUPPORTED["qwen2_vl"])]
# What reads the colours of pixels needs a processor, too: see test_erase.py.
COLOUR_METHODS = [name for name in METHODS if find_pixel_observables(tokenprune.method(name))]
MODEL_METHODS = [
    name
    for name in METHODS
    if tokenprune.method_info(name).site not in _ELSEWHERE
    and name not in (*VIDEO_METHODS, *TILE_METHODS, *COLOUR_METHODS)
]
# Methods that cut once and keep what they are asked for; the others spread their budget over several cuts, or layers.
SINGLE_CUT = [
    name
    for name in MODEL_METHODS
    if len(tokenprune.method(name).stages(Budget(keep=0.3), 4)) == 1 and tokenprune.method(name).min_tokens
]


def at_the_decoder(method: str) -> Method:
    """Return a method that cuts at the decoder: by default flowcut cuts inside the towers that support it."""
    return tokenprune.method(method, **({"inside": False} if method == "flowcut" else {}))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a patch may touch: hooks, instance attributes and configs of all modules, weights left out."""
    seen: dict[str, Any] = {}
    configs: dict[int, Any] = {}  # most modules share one, and writing it out is what takes long
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in ("_parameters", "_buffers", "_modules"):
                value = sorted(value)
            elif isinstance(value, dict):  # hooks among them
                value = {k: id(v) for k, v in value.items()}
            elif hasattr(value, "to_dict"):
                if id(value) not in configs:
                    configs[id(value)] = (id(value), value.to_dict(), getattr(value, "_attn_implementation", None))
                value = configs[id(value)]
            elif not isinstance(value, (int, float, str, type(None))):
                value = id(value)
            seen[f"{name}.{key}"] = value
        seen[f"{name}.class"] = type(module)
    return seen


def check_takes(family: Family, method: str) -> None:
    """Skip the test if `method` refuses models of `family`."""
    if (tokenprune.method_info(method).site is Site.ATTENTION or method in _COMPARING) and not family.video:
        pytest.skip(f"{family.name} takes no video, and {method} says so (test_pevlm.py, test_frames.py)")
    if method in TILE_METHODS and find_missing_observable(tokenprune.method(method), SUPPORTED[family.kind]):
        pytest.skip(f"{family.name} has no thumbnail ahead of tiles, and {method} says so (test_tile_methods.py)")


def pieces(family: Family, inputs: Any, per: str = "image") -> list[list[list[int]]]:
    """Per row the positions of each piece of image that has a budget for itself."""
    rows = []
    for counts, ids in zip(inputs.counts, inputs["input_ids"], strict=True):
        places = ((ids == IMAGE) | (ids == VIDEO)).nonzero().flatten()
        if per == "prompt":
            counts = [len(places)] if len(places) else []
        rows.append([piece.tolist() for piece in places.split(counts)])
    return rows
