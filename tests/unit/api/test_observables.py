# SPDX-License-Identifier: Apache-2.0
"""Observables are classes, methods derive from the base class of their site, and engines use neither by name."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from tokenprune import OptionError, Site, TokenPruneError
from tokenprune import selection as extend
from tokenprune.errors import RegistrationError
from tokenprune.integrations.shared import checks
from tokenprune.integrations.vllm.settings.parse import check_method as check_served
from tokenprune.methods import registry
from tokenprune.selection import observable_registry as observable_registry
from tokenprune.selection.observable import Backend, Observable, ObservedAt, PerToken, Recorder
from tokenprune.selection.observable_bases import TowerBlock
from tokenprune.selection.observable_registry import register_observable
from zoo import FAMILIES, Family

PACKAGE = Path(tokenprune.__file__).parent

pytestmark = pytest.mark.usefixtures("restored_registries")


def reader(needs: tuple[str, ...], read: Any, site: str = "IN_LLM", layers: tuple = ()) -> list[Any]:
    """Register the method "reader", and return the list to which it appends the results of `read`."""
    values: list[Any] = []

    @tokenprune.register("reader", site=site, needs=needs)
    @dataclass(frozen=True)
    class Reader(tokenprune.Pruner):
        """Record the observables."""

        layer: int = 2

        @property
        def query_aware(self) -> bool:
            return True

        @property
        def encoder_layers(self) -> tuple:
            return layers

        def score(self, tokens: Any) -> Tensor:
            values.append(read(tokens))
            return tokens.hidden.float().norm(dim=-1)

    return values


# -- a new observable is a class


@torch.no_grad()
def test_a_new_observable_is_one_class(family: Family, model) -> None:
    @register_observable("key_norms")
    class KeyNorms(PerToken):
        """`[S, N]`: the norm of each key."""

        where = ObservedAt.LAYER_BEFORE
        axes = "SN"

        def read_values(self, source: Any) -> Tensor:
            return source.attention_before.keys(source.width).float().norm(dim=-1)

    norms = reader(("key_norms",), lambda tokens: (tokens.key_norms, tokens.text.key_norms, tokens.text.mask))
    with pytest.raises(OptionError, match="key_norms, but vLLM's layers provide only first_row_attention, keys,"):
        check_served(tokenprune.method("reader"), in_llm=True)
    inputs = family.make_inputs(images=(1, 2))
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    keys = reader(("keys",), lambda tokens: (tokens.keys.float().norm(dim=-1), tokens.text.keys.float().norm(dim=-1)))
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    (visual, text, mask), (expected, expected_text) = norms[0], keys[0]
    torch.testing.assert_close(visual, expected)
    torch.testing.assert_close(text[mask], expected_text[mask])


@torch.no_grad()
def test_a_new_observable_of_the_tower_is_one_class(build) -> None:
    @register_observable("first_keys")
    class FirstKeys(TowerBlock):
        """`[S, N, H]`: the first channel of each head's key."""

        def compute_per_patch(self, seen: Any, protected: int) -> Tensor:
            return seen.key[:, :, protected:, 0]

    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(1, 2))
    values = reader(
        ("first_keys", "encoder_keys"),
        lambda tokens: (tokens.first_keys(-1), tokens.encoder_keys(-1)),
        "PRE_LLM",
        (-1,),
    )
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    first, keys = values[0]
    heads = first.shape[-1]
    torch.testing.assert_close(first, keys.unflatten(-1, (heads, -1))[..., 0])


@torch.no_grad()
def test_new_observation_point_is_one_class(build) -> None:
    """An observable hooks modules that no built-in observable reads: the norms before attention and MLP."""

    @register_observable("norm_gains")
    class NormGains(Observable):
        """`[S, N, 2]`: the norm of each token after the two norm modules of the layer before the cut."""

        where = ObservedAt.OWN
        axes = "SND"

        def attach(self, adapter: Any, layer: int) -> Recorder:
            previous_layer = adapter.decoder.layers[layer - 1]
            norms = [previous_layer.input_layernorm, previous_layer.post_attention_layernorm]
            return Recorder(norms, lambda args, kwargs, output: output.float().norm(dim=-1))

        def compute_visual(self, source: Any, segments: Any, *layer: int | float) -> torch.Tensor:
            return source.gather(torch.stack(source.get_recorded(self.name), -1), segments.position, segments)

    model, inputs = FAMILIES["llava"].prepare(build, images=(1, 2))
    outputs, hooks = [], []
    previous_layer = model.model.language_model.layers[1]
    for norm in (previous_layer.input_layernorm, previous_layer.post_attention_layernorm):
        hooks.append(norm.register_forward_hook(lambda module, args, output: outputs.append(output)))
    values = reader(("norm_gains",), lambda tokens: (tokens.norm_gains, tokens.segments))
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    (gains, segments), expected = values[0], torch.stack([states.norm(dim=-1) for states in outputs], -1)
    for index, count in enumerate(segments.counts):
        expected_norms = expected[segments.row[index], segments.position[index, :count]]
        torch.testing.assert_close(gains[index, :count], expected_norms)
    with pytest.raises(OptionError, match="norm_gains"):  # no layer ran yet
        reader(("norm_gains",), lambda tokens: tokens.norm_gains, "PRE_LLM")
        tokenprune.patch(model, "reader", keep=0.5)
    assert not tokenprune.is_patched(model)


def test_invalid_observable_is_rejected() -> None:
    class Nowhere(PerToken):
        """Has no observation point."""

    class Silent(PerToken):
        where = ObservedAt.CUT

    class Abroad(PerToken):
        """Has an unknown backend."""

        where = ObservedAt.CUT
        backends = frozenset({"tpu"})

    class Fine(PerToken):
        """Fine."""

        where = ObservedAt.CUT

    for name, cls, message in (
        ("nowhere", Nowhere, "where"), ("silent", Silent, "docstring"), ("abroad", Abroad, "tpu"),
        ("keys", Fine, "taken by tokenprune.selection.observables.states"), ("my-keys", Fine, "identifier"),
        ("_keys", Fine, "identifier"), ("mask", Fine, "attribute"),
        ("stranger", int, "tokenprune.selection.Observable"),
    ):  # fmt: skip
        with pytest.raises(RegistrationError, match=message):
            register_observable(name)(cls)
    for _ in range(2):  # a notebook cell that runs twice
        register_observable("fine")(Fine)


@torch.no_grad()
def test_undeclared_observable_is_rejected(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    for read, message in (
        (lambda tokens: tokens.received_attention, "reads 'received_attention' without declaring it"),
        (lambda tokens: tokens.patches, "reads 'patches' without declaring it"),
        (lambda tokens: tokens.encoder_attention(-1), "reads 'encoder_attention' without declaring it"),
        (lambda tokens: tokens.text.last_row, "no observable 'last_row'"),
        (lambda tokens: tokens.keyz, "Did you mean 'keys'"),
    ):
        reader(("keys",), read)
        with (
            tokenprune.patched(model, "reader", keep=0.5),
            pytest.raises((TokenPruneError, AttributeError), match=message),
        ):
            model(**inputs)


@each("need", [n for n in extend.available_observables() if n not in ("hidden", "normed")])
def test_unsupported_observable_is_rejected_by_backend(need: str) -> None:
    observable = observable_registry.find_observable(need)
    for backend, site, in_llm in ((Backend.VLLM, "PRE_LLM", False), (Backend.VLLM_IN_LLM, "IN_LLM", True)):
        reader((need,), lambda tokens: None, site, (-1,))
        if backend not in observable.backends:
            with pytest.raises(OptionError, match=f"needs {need}"):
                check_served(tokenprune.method("reader"), in_llm)


def test_needs_accept_text_prefixes() -> None:
    for need, expected in (
        ("text.embeddings", "embeddings"), ("text_embeddings", "embeddings"), ("text.attention", "text_attention"),
        ("text_attention", "text_attention"), ("text.keys", "keys"), ("text.hidden", "hidden"),
    ):  # fmt: skip
        reader((need,), lambda tokens: None)
        assert tokenprune.method("reader").needs == {expected}
    with pytest.raises(RegistrationError, match=r"unknown needs \['text.nothing'\]"):
        reader(("text.nothing",), lambda tokens: None)


# -- base classes of the sites


def test_methods_have_only_members_of_their_site() -> None:
    members = {"compute_shares", "choose", "block_starts", "plan", "score", "select", "next_rate"}
    members_of_method = {
        "fastv": {"score", "select"}, "divprune": {"score", "select"}, "vscan": {"score", "select"},
        "dyrate": {"score", "select", "next_rate"}, "tome": {"plan"}, "dymu": {"plan"},
        "downsample": {"compute_shares"}, "dynres": {"compute_shares"}, "view_select": {"choose"},
        "pevlm": {"block_starts"},
    }  # fmt: skip
    for name, expected in members_of_method.items():
        cls = tokenprune.method_info(name).cls
        assert {member for member in members if hasattr(cls, member)} == expected, name
        assert issubclass(cls, registry.BASES[cls.site])
    assert not {member for member in members if hasattr(tokenprune.Method, member)}


def test_needs_depend_on_options() -> None:
    assert tokenprune.method("fastv").needs == {"last_row_attention"} == tokenprune.method_info("fastv").observables
    assert tokenprune.method("fastv", query="all").needs == {"received_attention"}
    with pytest.raises(RegistrationError, match="leave out needs="):
        tokenprune.register("fast", site="IN_LLM", needs=("keys",))(
            dataclass(frozen=True)(type("Fast", (registry.method_class("fastv"),), {"__doc__": "Fast."}))
        )


@each(
    ("site", "base", "member", "names"),
    [
        ("PRE_LLM", tokenprune.Method, "score", "Pruner"),
        ("IN_LLM", tokenprune.Method, "select", "Pruner"),
        ("PRE_ENCODER", tokenprune.Method, "shares", "ResizeMethod"),
        ("PRE_ENCODER", tokenprune.Method, "choose", "ImageChooser"),
        ("ATTENTION", tokenprune.Method, "block_starts", "AttentionPattern"),
        ("PRE_ENCODER", tokenprune.Pruner, None, "selection.ResizeMethod or tokenprune.selection.ImageChooser"),
        ("IN_ENCODER", tokenprune.Pruner, None, "selection.EncoderMethod"),
        ("DECODE", tokenprune.Pruner, None, "DecodeMethod"),
        ("PRE_LLM", extend.ResizeMethod, None, "Pruner"),
    ],
)
def test_wrong_base_names_the_base_of_the_site(site: str, base: type, member: str | None, names: str) -> None:
    members = {"__doc__": "Old.", "site": Site(site)} | ({member: lambda self, *args: None} if member else {})
    cls = dataclass(frozen=True)(type("Old", (base,), members))
    with pytest.raises(RegistrationError, match=f"must derive from tokenprune.*{names}"):
        tokenprune.register("old", site=site)(cls)
    assert re.search(f"must derive from tokenprune.*{names}", str(checks.find_unsupported_reason(cls())))


def test_question_free_options_are_suggested() -> None:
    for name, options in (("dart", {"pivot_text": 0}), ("vscan", {"stage2": False})):
        method = tokenprune.method(name)
        assert method.query_aware and dict(method.query_free) == options
        assert not dataclasses.replace(method, **options).query_aware


# -- engines contain no names of methods and observables


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node


def test_engines_use_only_base_class_members() -> None:
    uses = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for folder in ("integrations", "bench", "tuning", "calibration", "cli", "guard")
        for path in (PACKAGE / folder).rglob("*.py")
        for call in calls(path)
        if call.func.id in ("getattr", "hasattr")
        and ast.unparse(call.args[0]) in ("method", "self.method", "step.method", "other")
        and isinstance(call.args[1], ast.Constant)
    ]
    assert not uses


def test_engines_contain_no_observable_names() -> None:
    names = {name for name in extend.available_observables() if "_" in name}  # single words also have other uses
    uses = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in (PACKAGE / "integrations").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    # The allowed match is an error message about DECODE.
    assert all("last_row_attention" in use and "decode_pruning" in use for use in uses), uses
