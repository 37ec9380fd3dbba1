# SPDX-License-Identifier: Apache-2.0
"""Patches of all kinds of towers: restored models, copies, failures, gradients, half precision, large budgets."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tokenprune
from basics import snapshot
from each import each
from families import FAMILIES
from made_up_thresholds import by_hand
from merging_models import SUPPORTED, UNITS
from packed_towers import DIFFERENT, drawn
from tests.unit.methods.test_ipcv import build_model
from tests.unit.tower.test_encoder_models import PACKED
from tests.unit.tower.test_frame_merging import SET, make_clips
from tile_towers import NAMES as TILES
from tokenprune import UnsupportedSetupError
from tower_features import encode


@dataclass(frozen=True)
class Setup:
    """A method inside the tower of a family. trained: pattern of the tower's parameters that get gradients."""

    name: str
    method: str
    trained: str
    options: dict[str, Any] = field(default_factory=lambda: {"keep": 0.5})

    def make_inputs(self) -> Any:
        if self.method == "earlytom":
            return make_clips(FAMILIES[self.name], [True, True])
        inputs = FAMILIES[self.name].make_inputs()
        return drawn(inputs) if self.method == "pixelprune" else inputs

    def patch(self, model: Any) -> Any:
        thresholds = {"thresholds": by_hand(model, [0.3, 0.3, 1.0])} if self.method == "dymu" else {}
        return tokenprune.patched(model, self.method, **self.options, **thresholds)


# A bias of the keys does not change the softmax. LLaVA does not read the last block.
FIRST_BLOCKS = r"layers\.[01]\.(?!.*k_proj\.bias)"
SETUPS = [
    *(Setup(name, "tome", FIRST_BLOCKS) for name in SUPPORTED),
    *(Setup(name, "tome", r"\.mlp\.|lambda") for name in UNITS),
    *(Setup(name, "tome", r"blocks\.") for name in PACKED),
    Setup("llava", "dymu", FIRST_BLOCKS),
    Setup("qwen3_vl", "pixelprune", r"patch_embed\.proj\.weight", {}),
    Setup("llava_onevision", "earlytom", r"layers\.(?!.*k_proj\.bias)", {"keep": 0.5, **SET}),
    Setup("llava_next_video", "earlytom", FIRST_BLOCKS, {"keep": 0.5, **SET}),
]
OF_ALL = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: f"{setup.name}-{setup.method}")


def tower_of(model: Any) -> Any:
    return next(getattr(model.model, n) for n in ("vision_tower", "visual", "vision_model") if hasattr(model.model, n))


def state_of(model: Any) -> dict[str, Any]:
    return {name: value for name, value in snapshot(model).items() if not name.endswith(".rope_deltas")}


@OF_ALL
@torch.no_grad()
def test_unpatch_restores_the_model(setup: Setup, build) -> None:
    model, inputs = build(FAMILIES[setup.name]), setup.make_inputs()
    before, state = model(**inputs).logits, state_of(model)
    with setup.patch(model):
        want, kept = model(**inputs).logits, tokenprune.stats(model).visual_tokens_out
        assert state_of(model) != state and not torch.equal(want, before)
        model.generate(**inputs, max_new_tokens=2)
        twin = copy.deepcopy(model)
    assert state_of(model) == state and torch.equal(model(**inputs).logits, before)
    assert torch.equal(twin(**inputs).logits, want) and tokenprune.stats(twin).visual_tokens_out == kept
    tokenprune.unpatch(twin)
    assert torch.equal(twin(**inputs).logits, before)


@OF_ALL
@torch.no_grad()
def test_failing_forward_leaves_no_state(setup: Setup, build) -> None:
    model, inputs = build(FAMILIES[setup.name]), setup.make_inputs()
    _, mlp, *_ = (module for name, module in tower_of(model).named_modules() if name.endswith(".mlp"))
    with setup.patch(model):
        want = model(**inputs).logits
        handle = mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        assert torch.equal(model(**inputs).logits, want)


@OF_ALL
def test_gradients_reach_the_tower_without_checkpointing(setup: Setup, build) -> None:
    """Re-entrant checkpointing runs blocks without gradients, and again for the gradients of their input."""
    model, inputs = copy.deepcopy(build(FAMILIES[setup.name])), setup.make_inputs()
    with setup.patch(model):
        model(**inputs).logits[:, -1].logsumexp(-1).sum().backward()
        gradients = {name: p.grad for name, p in tower_of(model).named_parameters() if re.search(setup.trained, name)}
        assert gradients and all(grad.abs().sum() > 0 for grad in gradients.values())
        model.train()
        for reentrant in (True, False):
            tower_of(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
            with pytest.raises(UnsupportedSetupError, match=r"(?i)checkpointing"):
                model(**inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OF_ALL
@torch.no_grad()
def test_half_precision(setup: Setup, dtype: torch.dtype) -> None:
    if setup.method == "dymu":
        pytest.skip("thresholds are for one dtype: see test_dymu.py")
    model, inputs = FAMILIES[setup.name].build().to(dtype), setup.make_inputs()
    inputs |= {name: inputs[name].to(dtype) for name in inputs if name in ("pixel_values", "pixel_values_videos")}
    with setup.patch(model):
        assert model(**inputs).logits.isfinite().all()
        assert 0.45 < tokenprune.stats(model).keep_ratio < 0.65 or setup.method == "pixelprune"


@each("setup", [setup for setup in SETUPS if setup.name in ("llava", "qwen2_vl", "qwen3_vl", "llava_onevision")])
@torch.no_grad()
def test_features_of_the_unpatched_model_raise(setup: Setup, build) -> None:
    model, inputs = build(FAMILIES[setup.name]), setup.make_inputs()
    encoded = encode(model, inputs)
    rest = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
    message = r"not encoded by the patched model|Pass pixels"
    with setup.patch(model), pytest.raises(UnsupportedSetupError, match=message):
        model(**rest, mm_encoder_outputs=encoded)


LARGE = [
    *((name, "tome", {}) for name in UNITS),
    ("llava", "flowcut", {"inside": True}),
    *((name, "towerdrop", {"layer": 1}) for name in (*TILES, "lfm2_vl", *DIFFERENT)),
    *(("qwen2_5_vl", "towerdrop", {"layer": 1, "score": score}) for score in ("change", "norm")),
    *((name, "ipcv", {"layer": 1}) for name in DIFFERENT),
    *((name, "saint", {}) for name in ("llava", "internvl", "llava_next", "qwen2_5_vl")),
    *((name, "saint", {"threshold": 1.1}) for name in ("llava", "internvl", "llava_next", "qwen2_5_vl")),
]
LARGE_BUDGETS = [Setup(name, method, "", {"keep": 10**4, "guard": "off", **options}) for name, method, options in LARGE]


@pytest.mark.parametrize("setup", LARGE_BUDGETS, ids=lambda setup: f"{setup.name}-{setup.method}-{len(setup.options)}")
@torch.no_grad()
def test_budget_above_the_count_is_bit_equal(setup: Setup, build) -> None:
    """The method acts, unlike with keep=1.0 (test_identity.py), and keeps all tokens."""
    model = build_model(setup.name, build) if setup.method == "ipcv" else build(FAMILIES[setup.name])
    inputs = FAMILIES[setup.name].make_inputs(images=(2, 1))
    want = model(**inputs).logits
    with setup.patch(model):
        assert torch.equal(model(**inputs).logits, want)
