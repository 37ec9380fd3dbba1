# SPDX-License-Identifier: Apache-2.0
"""What cannot work says so at once, and says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, MllamaConfig

import tokenprune
from basics import METHODS
from each import each
from tokenprune import OptionError, TokenPruneError, UnknownMethodError, UnsupportedModelError
from tokenprune.errors import PlaceholderMismatchError
from zoo import FAMILIES, IMAGE, Family

# -- names and options -------------------------------------------------------------------------------------------------


@each("name", [n for n in METHODS if len(n) > 3])
def test_close_matches(name: str, build) -> None:
    for typo in (name[:-1], name.upper(), name + "x"):
        with pytest.raises(UnknownMethodError, match=f"did you mean.*'{name}'") as error:
            tokenprune.patch(build(FAMILIES["llava"]), typo)
        assert "`tokenprune methods` lists them all" in str(error.value)


@pytest.mark.parametrize("method", ["qwertyuiop", 3, ["fastv", "qwertyuiop"]], ids=str)
def test_no_close_match(method: Any, build) -> None:
    with pytest.raises(UnknownMethodError, match="unknown method") as error:
        tokenprune.patch(build(FAMILIES["llava"]), method)
    said = str(error.value)
    assert "did you mean" not in said and "`tokenprune methods`" in said and ("nearest are" in said) == (method != 3)


@each(
    ("method", "options", "text"),
    [
        ("dart", dict(layers=1), "did you mean 'layer'"),
        ("dart", dict(pivot_images=2), "did you mean 'pivot_image'"),
        ("dart", dict(zzz=2), "pivot_image, pivot_text"),
        ("dart", dict(layer=True), "layer=True"),
        ("dart", dict(layer=1.0), "layer=1.0"),
        ("dart", dict(layer=-1), "layer=-1"),
        ("dart", dict(layer=4), "layer=4.*1 to 3"),
        ("dart", dict(pivot_image=0), "pivot_image=0"),
        ("dart", dict(pivot_text=-1), "pivot_text=-1"),
        ("fastv", dict(query="First"), "query='First'"),
        ("fastv", dict(layer="2"), "layer='2'"),
        ("random", dict(seed="x"), "seed='x'"),
        ("uniform", dict(layer=2), "no option.*none"),
    ],
)
def test_options(method: str, options: dict, text: str, build) -> None:
    with pytest.raises(OptionError, match=text):
        tokenprune.patch(build(FAMILIES["llava"]), method, **options)


def test_errors_share_a_base() -> None:
    errors = [one for name, one in vars(tokenprune.errors).items() if name.endswith("Error")]
    assert len(errors) == len(tokenprune.errors.__all__) and all(issubclass(error, TokenPruneError) for error in errors)
    assert issubclass(UnknownMethodError, ValueError) and issubclass(UnsupportedModelError, TypeError)


# -- models ------------------------------------------------------------------------------------------------------------


def bert() -> nn.Module:
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    return BertModel(BertConfig(**sizes))


def mllama() -> nn.Module:
    module = nn.Module()
    module.config = MllamaConfig()
    return module


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@each("make", [linear, bert, mllama, lambda: None])
@each("method", ["fastv", "divprune"])
def test_unsupported_models(make: Any, method: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tokenprune.patch(make(), method)
    text = str(error.value)
    assert all(family in text for family in FAMILIES), "names the supported families"
    assert "register_adapter" in text, "says how to add one"
    if make is mllama:
        assert "mllama" in text and "cross-attention" in text


def test_a_decoder_alone_is_unsupported(family: Family, model) -> None:
    with pytest.raises(UnsupportedModelError):
        tokenprune.patch(model.get_submodule(family.decoder), "fastv")


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.few_families
@pytest.mark.parametrize("method", ["divprune", "fastv", "pyramiddrop", "dyrate"])
@torch.no_grad()
def test_truncated_placeholders(method: str, family: Family, model) -> None:
    """A tokenizer with max_length cuts images in half; nothing of the call is left behind."""
    inputs = family.make_inputs(images=(2, 1), padding=None)
    want = None
    places = (inputs["input_ids"][0] == IMAGE).nonzero().flatten()
    for change in ("fewer", "more"):
        ids = inputs["input_ids"].clone()
        if change == "fewer":
            ids[0, places[-1]] = 100
        else:
            ids[0, -1] = IMAGE
        broken = {**inputs, "input_ids": ids}
        with tokenprune.patched(model, method, keep=0.3):
            want = model(**inputs).logits if want is None else want
            for call, more in ((model, {}), (model.generate, {"max_new_tokens": 1})):
                with pytest.raises(PlaceholderMismatchError, match="truncation") as error:
                    call(**broken, **more)
                assert str(int((ids == IMAGE).sum())) in str(error.value)
                assert str(len((inputs["input_ids"] == IMAGE).nonzero())) in str(error.value)
            assert torch.equal(model(**inputs).logits, want)
