# SPDX-License-Identifier: Apache-2.0
"""`check_model` passes on models of unknown type, and detects broken models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tokenprune
from families import FAMILIES
from tokenprune import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.models.families import SUPPORTED
from tokenprune.testing import ConformanceError, check_model
from tokenprune.testing.models import _mask
from zoo import Family

UNKNOWN = ("llava", "internvl", "aya_vision", "ovis2", "kimi_k25", "qwen3_5")


def build_unknown(family: Family) -> tuple[Any, dict[str, Any]]:
    """Return a model of an unregistered type, and a ragged batch with three images."""
    model = family.build().eval()
    model.config.model_type = "of_a_checkpoint"
    assert model.config.model_type not in SUPPORTED
    return model, dict(family.make_inputs(images=(2, 1)))


@pytest.mark.parametrize("name", UNKNOWN)
def test_passes_on_models_of_unknown_type(name: str) -> None:
    model, inputs = build_unknown(FAMILIES[name])
    result = check_model(model, inputs)
    assert 0 < result.kept < result.visual_tokens and not tokenprune.is_patched(model)
    assert result.step is not None and result.step < 1e-5
    assert result.oracle is None if name == "qwen3_5" else result.oracle is not None and result.oracle < 1e-5


def test_a_prefix_that_sees_both_ways_has_no_step() -> None:
    model, inputs = FAMILIES["paligemma"].build().eval(), dict(FAMILIES["paligemma"].make_inputs(images=(1, 1)))
    result = check_model(model, inputs)
    assert result.step is None and result.oracle is not None and result.oracle < 1e-5


class RenumberedRotary(nn.Module):
    """Computes rotary angles from token indices, and ignores the position ids."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, position_ids=torch.arange(position_ids.shape[-1])[None])


class RandomHead(nn.Module):
    """Adds different noise in each call."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.rand_like(hidden)


def break_positions(model: Any, inputs: dict[str, Any]) -> None:
    model.model.language_model.rotary_emb = RenumberedRotary(model.model.language_model.rotary_emb)


def leave_state(model: Any, inputs: dict[str, Any]) -> None:
    """Set an attribute in a pruned call that changes later outputs."""

    def shift(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        width = output[0].shape[1]
        module.fewer = getattr(module, "fewer", False) or 1 < width < inputs["input_ids"].shape[1]
        return output[0] + float(module.fewer), *output[1:]

    model.model.language_model.layers[1].self_attn.register_forward_hook(shift, with_kwargs=True)


BROKEN = {
    "two forwards": lambda model, inputs: setattr(model, "lm_head", nn.Sequential(model.lm_head, RandomHead())),
    "logits of kept tokens differ": break_positions,
    "after unpatch": leave_state,
    "no visual token": lambda model, inputs: inputs.pop("pixel_values"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_models_are_detected(message: str) -> None:
    model = FAMILIES["llava"].build().eval()
    inputs = dict(FAMILIES["llava"].make_inputs(images=(1, 1)))
    BROKEN[message](model, inputs)
    with pytest.raises(ConformanceError, match=message):
        check_model(model, inputs)
    assert not tokenprune.is_patched(model)


def test_unsupported_models_raise_with_advice() -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), dict(family.make_inputs(images=(1, 1)))
    with pytest.raises(OptionError, match=r"model\.eval\(\)"):
        check_model(model.train(), inputs)
    with pytest.raises(ConformanceError, match=r"keep=1\.0 dropped none of"):
        check_model(model.eval(), inputs, keep=1.0)
    with pytest.raises(UnsupportedModelError):
        check_model(nn.Linear(2, 2).eval(), inputs)
    kept = torch.ones(1, 4, dtype=torch.bool)
    for names, kwargs in ((["hidden_states"], {}), (["hidden_states", "attention_mask"], {"attention_mask": kept})):
        with pytest.raises(UnsupportedSetupError, match=r'"sdpa" or "eager"'):
            _mask(kept, names, nn.Identity(), (torch.zeros(1, 4, 2),), kwargs)
