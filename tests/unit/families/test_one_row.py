# SPDX-License-Identifier: Apache-2.0
"""A family is a row of the table for both engines, plus adapter methods where the code differs."""

from __future__ import annotations

import importlib
import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES as BUILT
from tokenprune import UnsupportedModelError, UnsupportedSetupError
from tokenprune.errors import PlaceholderMismatchError
from tokenprune.integrations.hf.families import Adapter, get_adapter, register_adapter, registry
from tokenprune.integrations.shared import checks
from tokenprune.models import families
from tokenprune.models.families import Family, get_config_family

NEW = "made_up"
pytestmark = pytest.mark.usefixtures("restored_registries")


@pytest.fixture
def model(build, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = build(BUILT["llava"])
    monkeypatch.setattr(model.config, "model_type", NEW)
    return model


def test_adapters_override_methods_and_the_facts_that_go_with_them() -> None:
    facts = {"extra_arguments", "adds_after_layers", "shares_keys", "caches_keys"}
    for file in ("plain", "qformer", "retrieval", "special"):
        module = importlib.import_module(f"tokenprune.integrations.hf.families.{file}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, Adapter) and cls is not Adapter:
                members = {name: member for name, member in vars(cls).items() if not name.startswith("__")}
                assert all(
                    isinstance(member, FunctionType | property) or name in facts for name, member in members.items()
                ), cls
                assert all(name.startswith("_") or hasattr(Adapter, name) for name in members), (cls, members)


def test_each_adapter_serves_families_of_the_table() -> None:
    assert registry.ADAPTERS.keys() <= families.SUPPORTED.keys()


@torch.no_grad()
def test_a_row_is_all_that_a_family_needs(model) -> None:
    inputs = BUILT["llava"].make_inputs(images=(2, 1))
    with pytest.raises(UnsupportedSetupError, match=rf"'{NEW}'.*`patches` in its row"):
        tokenprune.patch(model, "fastervlm", keep=0.5)
    tokenprune.patch(model, "divprune", keep=0.5)  # the common contract
    tokenprune.unpatch(model)
    register_adapter(Family(NEW, patches="tiles", square="always", videos="frames", resizing=None))(Adapter)
    with tokenprune.patched(model, "fastervlm", keep=0.5):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out < tokenprune.stats(model).visual_tokens_in
    assert "get the same number of tokens" in str(checks.find_unsupported_reason(tokenprune.method("downsample"), NEW))
    assert get_config_family(SimpleNamespace(model_type=NEW)).patches == "tiles"  # the plugin reads the same row
    # The model limits this: its config lacks the id for videos.
    assert get_adapter(model).family == Family(NEW, patches="tiles", square="always", resizing=None)
    assert NEW in registry.list_supported_families()


def test_a_row_names_where_the_decoder_is(model) -> None:
    register_adapter(Family(NEW, decoder_names=("reader",), norm_name="last"))(Adapter)
    with pytest.raises(UnsupportedModelError, match="has no reader with layers and last"):
        get_adapter(model)


def test_an_adapter_of_ones_own_overrides_a_method(model, monkeypatch: pytest.MonkeyPatch) -> None:
    @register_adapter("mllama", Family(NEW, decoder_names=("language_model",)))
    class CustomAdapter(Adapter):
        def visual_mask(self, call: dict[str, Any]) -> dict[str, Tensor]:
            return {"image": torch.zeros_like(call["input_ids"], dtype=torch.bool)}

    assert type(get_adapter(model)) is CustomAdapter
    monkeypatch.setattr(model.config, "model_type", "mllama")  # refused without a registered adapter
    assert type(get_adapter(model)) is CustomAdapter
    with (
        tokenprune.patched(model, "divprune", keep=0.5),
        pytest.raises(PlaceholderMismatchError, match="has 0 image placeholders"),
    ):
        model(**BUILT["llava"].make_inputs(images=(2, 1)))
