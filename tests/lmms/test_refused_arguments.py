# SPDX-License-Identifier: Apache-2.0
"""Test that unsupported arguments are refused before weights are loaded, with a message that names the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lmms_eval.api.model import lmms
from lmms_eval.models import MODEL_REGISTRY_V2
from lmms_eval.models.registry_v2 import ModelManifest

from conftest import CPU, DEMO
from tokenprune import BudgetError, OptionError, TokenPruneError, UnsupportedModelError
from tokenprune_bench.lmms_eval import model as integration

NOWHERE = f"pretrained=/there/is/no/such/model,{CPU}"


@pytest.mark.parametrize(
    "args, error, words",
    [
        ("method=dart", OptionError, "base= is missing"),
        ("base=llava_hff,method=dart", OptionError, "Did you mean 'llava_hf'"),
        ("base=vllm,method=dart", UnsupportedModelError, "base=vllm does not use a supported model of transformers"),
        ("base=openai_compatible,method=dart", UnsupportedModelError, "base=openai_compatible"),
        ("base=llava_hf", OptionError, "method= is missing"),
        ("base=llava_hf,method=dart,keep=2.5", BudgetError, "is not a valid share"),
        ("base=llava_hf,method=fastv,keep=0.25,layer=first", OptionError, "layer='first'"),
        ("base=qwen2_5_vl,method=dart,max_pixel=9", OptionError, "did you mean 'max_pixels'"),
        ("base=qwen3_5,method=none,nonsense=9", OptionError, "Unknown argument 'nonsense'"),
    ],
)
def test_before_anything_is_loaded(evaluate: Callable[..., Any], args: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        evaluate(f"{args},{NOWHERE}", "tokenprune_colour")
    assert words in str(raised.value)
    if "base=" in words:
        assert "docs/measure/lmms-eval.md" in str(raised.value)


def test_a_method_that_the_model_refuses(evaluate: Callable[..., Any]) -> None:
    with pytest.raises(TokenPruneError, match="pevlm"):
        evaluate(f"base=llava_hf,method=pevlm,pretrained={DEMO},{CPU}", "tokenprune_colour")


class Remote(lmms):
    """A model of another package that accepts any argument. Only its instance shows that it contains no model."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        assert kwargs == {"endpoint": "here"}

    def loglikelihood(self, requests: list[Any]) -> Any: ...

    generate_until = generate_until_multi_round = loglikelihood


def test_a_base_that_holds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_manifests", "_alias_to_model_id"):
        monkeypatch.setattr(MODEL_REGISTRY_V2, name, dict(getattr(MODEL_REGISTRY_V2, name)))
    MODEL_REGISTRY_V2.register_manifest(ModelManifest("remote", simple_class_path=f"{__name__}.Remote"))
    with pytest.raises(UnsupportedModelError, match="base=remote does not contain a generative model of transformers"):
        integration.load("remote", method="none", endpoint="here")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'decord'")

    monkeypatch.setattr(MODEL_REGISTRY_V2, "get_model_class", fail)
    with pytest.raises(TokenPruneError, match=r"'decord'.*tokenprune-bench\[lmms-eval\]"):
        integration.load("llava_hf", method="dart")
