# SPDX-License-Identifier: Apache-2.0
"""The check that a user runs on a model that no table knows: it passes, and finds what is wrong."""

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


def unknown(family: Family) -> tuple[Any, dict[str, Any]]:
    """A model of a type that stands in no table, and a ragged batch with three images."""
    model = family.build().eval()
    model.config.model_type = "of_a_checkpoint"
    assert model.config.model_type not in SUPPORTED
    return model, dict(family.make_inputs(images=(2, 1)))


@pytest.mark.parametrize("name", UNKNOWN)
def test_it_passes_on_models_that_no_table_knows(name: str) -> None:
    model, inputs = unknown(FAMILIES[name])
    found = check_model(model, inputs)
    assert 0 < found.kept < found.visual_tokens and not tokenprune.is_patched(model)
    assert found.step is not None and found.step < 1e-5
    assert found.oracle is None if name == "qwen3_5" else found.oracle is not None and found.oracle < 1e-5


def test_a_prefix_that_sees_both_ways_has_no_step() -> None:
    model, inputs = FAMILIES["paligemma"].build().eval(), dict(FAMILIES["paligemma"].make_inputs(images=(1, 1)))
    found = check_model(model, inputs)
    assert found.step is None and found.oracle is not None and found.oracle < 1e-5


class CountsAnew(nn.Module):
    """Rotary angles by the number of a token among those that arrive, whatever positions it has."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, position_ids=torch.arange(position_ids.shape[-1])[None])


class Restless(nn.Module):
    """A head that never gives the same twice."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.rand_like(hidden)


def counts_anew(model: Any, inputs: dict[str, Any]) -> None:
    model.model.language_model.rotary_emb = CountsAnew(model.model.language_model.rotary_emb)


def remembers(model: Any, inputs: dict[str, Any]) -> None:
    """An attribute that a pruned call leaves changed."""

    def shift(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        width = output[0].shape[1]
        module.fewer = getattr(module, "fewer", False) or 1 < width < inputs["input_ids"].shape[1]
        return output[0] + float(module.fewer), *output[1:]

    model.model.language_model.layers[1].self_attn.register_forward_hook(shift, with_kwargs=True)


BROKEN = {
    "two forwards": lambda model, inputs: setattr(model, "lm_head", nn.Sequential(model.lm_head, Restless())),
    "logits of kept tokens differ": counts_anew,
    "after unpatch": remembers,
    "no visual token": lambda model, inputs: inputs.pop("pixel_values"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_it_finds_what_is_wrong(what: str) -> None:
    model = FAMILIES["llava"].build().eval()
    inputs = dict(FAMILIES["llava"].make_inputs(images=(1, 1)))
    BROKEN[what](model, inputs)
    with pytest.raises(ConformanceError, match=what):
        check_model(model, inputs)
    assert not tokenprune.is_patched(model)


def test_what_cannot_be_checked_says_what_to_do() -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), dict(family.make_inputs(images=(1, 1)))
    with pytest.raises(OptionError, match=r"model\.eval\(\)"):
        check_model(model.train(), inputs)
    with pytest.raises(ConformanceError, match=r"keep=1\.0 dropped none of"):
        check_model(model.eval(), inputs, keep=1.0)
    with pytest.raises(UnsupportedModelError):
        check_model(nn.Linear(2, 2).eval(), inputs)
    kept = torch.ones(1, 4, dtype=torch.bool)
    for names, given in ((["hidden_states"], {}), (["hidden_states", "attention_mask"], {"attention_mask": kept})):
        with pytest.raises(UnsupportedSetupError, match=r'"sdpa" or "eager"'):
            _mask(kept, names, nn.Identity(), (torch.zeros(1, 4, 2),), given)
