# SPDX-License-Identifier: Apache-2.0
"""Errors are raised early and name an alternative."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, MllamaConfig, ViTConfig, ViTModel

import tokenprune
from basics import METHODS
from each import each
from tokenprune import OptionError, TokenPruneError, UnknownMethodError, UnsupportedModelError
from tokenprune.budgets.percentage import warn_about_percentage
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
    message = str(error.value)
    assert (
        "did you mean" not in message
        and "`tokenprune methods`" in message
        and ("nearest are" in message) == (method != 3)
    )


COMMAND_LINE = "is written for the command line. "


@each(
    ("arguments", "error", "text"),
    [
        (dict(method="dart", layers=1), OptionError, "did you mean 'layer'"),
        (dict(method="dart", pivot_images=2), OptionError, "did you mean 'pivot_image'"),
        (dict(method="dart", zzz=2), OptionError, "pivot_image, pivot_text"),
        (dict(method="fastv", Layer=2), OptionError, "did you mean 'layer'"),
        (dict(method="dart", layer=1.0), OptionError, "layer=1.0"),
        (dict(method="dart", layer=4), OptionError, "layer=4.*1 to 3"),
        (dict(method="dart", pivot_image=0), OptionError, "pivot_image=0"),
        (dict(method="dart", pivot_text=-1), OptionError, "pivot_text=-1"),
        (dict(method="uniform", layer=2), OptionError, "no option.*none"),
        (dict(config={"method": "divprune", "kep": 0.25}), OptionError, "did you mean 'keep'"),
        (dict(config={"method": ["divprune", "fastv"], "kep": 0.25}), OptionError, "did you mean 'keep'"),
        (dict(config={"schema": 1, "setting": {"method": "divprune", "kepp": 0.25}}), OptionError, "mean 'keep'"),
        (dict(method="divprune", kep=0.25), OptionError, "did you mean 'keep'"),
        (dict(method=["divprune", "fastv"], kep=0.25), OptionError, "did you mean 'keep'"),
        (dict(method="divprune", gaurd="auto"), OptionError, "did you mean 'guard'"),
        (dict(method="downsample", procesor=None), OptionError, "did you mean 'processor'"),
        (dict(method="divprune+fastv"), UnknownMethodError, rf"{COMMAND_LINE}Pass a list .*: \['divprune', 'fastv'\]"),
        (dict(method="divprune + fastv:layer=2"), UnknownMethodError, rf"{COMMAND_LINE}Pass a list .*\['divprune', "),
        (
            dict(method="fastv:layer=2"),
            UnknownMethodError,
            rf'{COMMAND_LINE}Pass options .* tokenprune.method\("fastv"',
        ),
        (dict(config={"method": "divprune+fastv"}), UnknownMethodError, f"{COMMAND_LINE}Pass a list of methods"),
    ],
)
def test_unknown_arguments_suggest_what_was_meant(arguments: dict, error: type, text: str, build) -> None:
    with pytest.raises(error, match=text):
        tokenprune.patch(build(FAMILIES["llava"]), **arguments)


def test_a_number_that_looks_like_a_percentage_is_logged_once(build, caplog) -> None:
    warn_about_percentage.cache_clear()
    model = build(FAMILIES["llava"])
    with caplog.at_level(logging.WARNING, "tokenprune"):
        for keep in (25, 25, 24, 125, 0.25, tokenprune.Budget(tokens=30)):
            with tokenprune.patched(model, "divprune", keep=keep):
                pass
        with tokenprune.patched(model, config={"method": "divprune", "keep": 25}):
            pass
    assert [record.getMessage() for record in caplog.records] == [
        "tokenprune: keep=25 keeps 25 tokens per image, not 25 %. Pass keep=0.25 for a share; Budget(tokens=25) logs "
        "no warning."
    ]


def test_errors_share_a_base() -> None:
    errors = [error for name, error in vars(tokenprune.errors).items() if name.endswith("Error")]
    assert len(errors) == len(tokenprune.errors.__all__) and all(issubclass(error, TokenPruneError) for error in errors)
    assert issubclass(UnknownMethodError, ValueError) and issubclass(UnsupportedModelError, TypeError)


# -- models ------------------------------------------------------------------------------------------------------------


def build_bert() -> nn.Module:
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    return BertModel(BertConfig(**sizes))


def build_vit() -> nn.Module:
    return ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))


def build_mllama() -> nn.Module:
    module = nn.Module()
    module.config = MllamaConfig()
    return module


def build_linear() -> nn.Module:
    return nn.Linear(2, 2)


@each("method", ["fastv", "divprune"])
def test_error_of_a_refused_family_names_the_closest_types(method: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        tokenprune.patch(build_mllama(), method)
    text = str(error.value)
    assert len(text) < 400, "does not list all types"
    assert "mllama" in text and "cross-attention" in text and "docs/reference/families.md" in text
    assert re.search(r"closest supported types are ('[\w-]+'(, |;)){3}", text)


@each(
    ("make", "problem"),
    [
        (build_linear, "Linear is not a transformers model.*docs/reference/families.md"),
        (lambda: None, "NoneType is not a transformers model"),
        (build_bert, "BertModel is a text model without visual tokens. Pass a whole vision-language model"),
        (build_vit, "ViTModel is a vision model without a language model. Pass a whole vision-language model"),
        (lambda: "llava-hf/llava-1.5-7b-hf", "'llava-hf/llava-1.5-7b-hf' is a name or a path.* Load it first"),
        (lambda: Path("models", "llava"), "is a name or a path.* Load it first"),
    ],
)
def test_error_names_the_kind_of_model(make: Any, problem: str) -> None:
    for method in ("divprune", "fastv"):
        with pytest.raises(UnsupportedModelError, match=problem) as error:
            tokenprune.patch(make(), method)
        assert len(str(error.value)) < 400, "does not list all types"


def test_tower_or_decoder_alone_is_rejected(build) -> None:
    model = build(FAMILIES["llava"]).model
    for part, kind in ((model.vision_tower, "a vision model"), (model.language_model, "a text model")):
        with pytest.raises(UnsupportedModelError, match=f"is {kind}"):
            tokenprune.patch(part, "divprune")


@each("method", ["divprune", tokenprune.method("divprune")])
def test_swapped_arguments_are_named_without_the_model(method: Any, build) -> None:
    model = build(FAMILIES["llava"])
    for arguments in ({}, {"keep": 0.5}):
        with pytest.raises(OptionError, match=r"^The model comes first: tokenprune.patch\(model, '?divprune'?\)\.$"):
            tokenprune.patch(method, model, **arguments)
    with pytest.raises(UnknownMethodError) as error:
        tokenprune.patch(model, model)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_decoder_without_tower_is_rejected(family: Family, model) -> None:
    with pytest.raises(UnsupportedModelError):
        tokenprune.patch(model.get_submodule(family.decoder), "fastv")


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.few_families
@pytest.mark.parametrize("method", ["divprune", "fastv", "pyramiddrop", "dyrate"])
@torch.no_grad()
def test_truncated_placeholders(method: str, family: Family, model) -> None:
    """A tokenizer with max_length truncates images. After the error the model works as before."""
    inputs = family.make_inputs(images=(2, 1), padding=None)
    expected = None
    placeholders = (inputs["input_ids"][0] == IMAGE).nonzero().flatten()
    for change in ("fewer", "more"):
        ids = inputs["input_ids"].clone()
        if change == "fewer":
            ids[0, placeholders[-1]] = 100
        else:
            ids[0, -1] = IMAGE
        broken = {**inputs, "input_ids": ids}
        with tokenprune.patched(model, method, keep=0.3):
            expected = model(**inputs).logits if expected is None else expected
            for call, options in ((model, {}), (model.generate, {"max_new_tokens": 1})):
                with pytest.raises(PlaceholderMismatchError, match="truncation") as error:
                    call(**broken, **options)
                assert str(int((ids == IMAGE).sum())) in str(error.value)
                assert str(len((inputs["input_ids"] == IMAGE).nonzero())) in str(error.value)
            assert torch.equal(model(**inputs).logits, expected)
