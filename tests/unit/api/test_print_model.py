# SPDX-License-Identifier: Apache-2.0
"""`print(model)` of a patched model shows the patch. The rest of the model is unchanged."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import tokenprune
from basics import snapshot
from tokenprune import Budget, UnsupportedSetupError
from zoo import FAMILIES


@pytest.fixture
def llava() -> nn.Module:
    return FAMILIES["llava"].build()  # a new model, because the tests set attributes


def list_patch_lines(model: nn.Module) -> list[str]:
    return [line.strip() for line in repr(model).splitlines() if "tokenprune" in line]


def test_second_line_has_method_keep_and_site(llava) -> None:
    plain, before, names = repr(llava), snapshot(llava), list(llava.state_dict())
    with tokenprune.patched(llava, "dart", keep=0.25, pivot_image=8):
        lines = repr(llava).splitlines()
        assert lines.pop(1) == "  tokenprune: dart(pivot_image=8), keep=0.25, site=IN_LLM"
        assert "\n".join(lines) == plain
        assert list(llava.state_dict()) == names
    assert repr(llava) == plain and snapshot(llava) == before
    with tokenprune.patched(llava):
        assert list_patch_lines(llava) == ["tokenprune: divprune(), keep=0.25, site=PRE_LLM"]
    budget = Budget(average_tokens=7)
    with tokenprune.patched(llava, [tokenprune.method("fastv", layer=3), "divprune"], keep=[budget, 64]):
        assert list_patch_lines(llava) == [
            "tokenprune: fastv(layer=3), keep=Budget(average_tokens=7), site=IN_LLM",
            "tokenprune: divprune(), keep=64, site=PRE_LLM",
        ]


def test_the_line_follows_a_replaced_patch(llava) -> None:
    tokenprune.patch(llava, "divprune", keep=0.5)
    tokenprune.patch(llava, "fastv", keep=0.25, replace=True)
    assert list_patch_lines(llava) == ["tokenprune: fastv(), keep=0.25, site=IN_LLM"]
    with pytest.raises(UnsupportedSetupError):
        tokenprune.patch(llava, "pevlm", replace=True)
    assert list_patch_lines(llava) == ["tokenprune: fastv(), keep=0.25, site=IN_LLM"]
    tokenprune.unpatch(llava)
    assert list_patch_lines(llava) == []


def test_original_repr_is_kept(llava) -> None:
    class Says(type(llava)):
        def extra_repr(self) -> str:
            return "of its class"

    llava.__class__ = Says
    with tokenprune.patched(llava, "divprune", keep=0.5):
        assert [line.strip() for line in repr(llava).splitlines()[1:3]] == [
            "of its class",
            "tokenprune: divprune(), keep=0.5, site=PRE_LLM",
        ]
    llava.extra_repr = lambda: "of the instance"
    with tokenprune.patched(llava, "divprune", keep=0.5):
        assert "of the instance\n  tokenprune: divprune()" in repr(llava)
    assert "of the instance" in repr(llava) and not list_patch_lines(llava)


def pickle_copy(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [copy.deepcopy, pickle_copy])
def test_copy_has_its_own_line(llava, way) -> None:
    with tokenprune.patched(llava, "divprune", keep=0.5):
        other = way(llava)
        assert list_patch_lines(other) == list_patch_lines(llava) != []
        tokenprune.unpatch(other)
        assert not list_patch_lines(other) and list_patch_lines(llava)
    assert repr(other) == repr(llava) and "extra_repr" not in vars(other)


def test_a_patch_of_the_inner_model_shows_there(llava) -> None:
    with tokenprune.patched(llava.model, "divprune", keep=0.5):
        assert repr(llava).count("tokenprune:") == 1
        assert repr(llava).index("(model): ") < repr(llava).index("tokenprune:")


@torch.no_grad()
def test_a_compiled_model_shows_it_and_loses_it(llava) -> None:
    compiled = torch.compile(llava, backend="eager")
    before = snapshot(llava)
    tokenprune.patch(compiled, "divprune", keep=0.5)
    assert len(list_patch_lines(compiled)) == 1
    tokenprune.unpatch(compiled)
    assert not list_patch_lines(compiled) and snapshot(llava) == before


def test_a_timm_model_shows_it() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    with tokenprune.patched(model, "tome", r=8):
        assert list_patch_lines(model) == ["tokenprune: tome(r=8), keep=0.25, site=IN_ENCODER"]
    assert not list_patch_lines(model)
