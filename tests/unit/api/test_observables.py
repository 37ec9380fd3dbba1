# SPDX-License-Identifier: Apache-2.0
"""Observables are one class each, and methods have the base class of their site: engines know neither by name."""

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
    """Register the method "reader", which notes what `read` finds; returns where."""
    seen: list[Any] = []

    @tokenprune.register("reader", site=site, needs=needs)
    @dataclass(frozen=True)
    class Reader(tokenprune.Pruner):
        """Note what it sees."""

        layer: int = 2

        @property
        def query_aware(self) -> bool:
            return True

        @property
        def encoder_layers(self) -> tuple:
            return layers

        def score(self, tokens: Any) -> Tensor:
            seen.append(read(tokens))
            return tokens.hidden.float().norm(dim=-1)

    return seen


# -- an observable of one's own is one class


@torch.no_grad()
def test_a_new_observable_is_one_class(family: Family, model) -> None:
    @register_observable("key_norms")
    class KeyNorms(PerToken):
        """`[S, N]`: the length of each key."""

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
    (visual, text, mask), (want, want_text) = norms[0], keys[0]
    torch.testing.assert_close(visual, want)
    torch.testing.assert_close(text[mask], want_text[mask])


@torch.no_grad()
def test_a_new_observable_of_the_tower_is_one_class(build) -> None:
    @register_observable("first_keys")
    class FirstKeys(TowerBlock):
        """`[S, N, H]`: the first number of each head's key."""

        def compute_per_patch(self, seen: Any, protected: int) -> Tensor:
            return seen.key[:, :, protected:, 0]

    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build, images=(1, 2))
    both = reader(
        ("first_keys", "encoder_keys"),
        lambda tokens: (tokens.first_keys(-1), tokens.encoder_keys(-1)),
        "PRE_LLM",
        (-1,),
    )
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    first, keys = both[0]
    heads = first.shape[-1]
    torch.testing.assert_close(first, keys.unflatten(-1, (heads, -1))[..., 0])


@torch.no_grad()
def test_new_observation_point_is_one_class(build) -> None:
    """An observable watches modules that nothing else reads: here the norms in front of attention and MLP."""

    @register_observable("norm_gains")
    class NormGains(Observable):
        """`[S, N, 2]`: the length of each token after a norm of the layer before the cut."""

        where = ObservedAt.OWN
        axes = "SND"

        def attach(self, adapter: Any, layer: int) -> Recorder:
            before = adapter.decoder.layers[layer - 1]
            norms = [before.input_layernorm, before.post_attention_layernorm]
            return Recorder(norms, lambda args, kwargs, output: output.float().norm(dim=-1))

        def compute_visual(self, source: Any, segments: Any, *layer: int | float) -> torch.Tensor:
            return source.gather(torch.stack(source.get_recorded(self.name), -1), segments.position, segments)

    model, inputs = FAMILIES["llava"].prepare(build, images=(1, 2))
    outputs, hooks = [], []
    before = model.model.language_model.layers[1]
    for norm in (before.input_layernorm, before.post_attention_layernorm):
        hooks.append(norm.register_forward_hook(lambda module, args, output: outputs.append(output)))
    seen = reader(("norm_gains",), lambda tokens: (tokens.norm_gains, tokens.segments))
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    (gains, segments), want = seen[0], torch.stack([one.norm(dim=-1) for one in outputs], -1)
    for index, count in enumerate(segments.counts):
        found = want[segments.row[index], segments.position[index, :count]]
        torch.testing.assert_close(gains[index, :count], found)
    with pytest.raises(OptionError, match="norm_gains"):  # no layer ran yet
        reader(("norm_gains",), lambda tokens: tokens.norm_gains, "PRE_LLM")
        tokenprune.patch(model, "reader", keep=0.5)
    assert not tokenprune.is_patched(model)


def test_invalid_observable_is_rejected() -> None:
    class Nowhere(PerToken):
        """Says no place."""

    class Silent(PerToken):
        where = ObservedAt.CUT

    class Abroad(PerToken):
        """Served by nobody known."""

        where = ObservedAt.CUT
        backends = frozenset({"tpu"})

    class Fine(PerToken):
        """Fine."""

        where = ObservedAt.CUT

    for name, cls, says in (
        ("nowhere", Nowhere, "where"), ("silent", Silent, "docstring"), ("abroad", Abroad, "tpu"),
        ("keys", Fine, "taken by tokenprune.selection.observables.states"), ("my-keys", Fine, "identifier"),
        ("_keys", Fine, "identifier"), ("mask", Fine, "attribute"),
        ("stranger", int, "tokenprune.selection.Observable"),
    ):  # fmt: skip
        with pytest.raises(RegistrationError, match=says):
            register_observable(name)(cls)
    for _ in range(2):  # a notebook cell that runs twice
        register_observable("fine")(Fine)


@torch.no_grad()
def test_undeclared_observable_is_rejected(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    for read, says in (
        (lambda tokens: tokens.received_attention, "reads 'received_attention' without declaring it"),
        (lambda tokens: tokens.patches, "reads 'patches' without declaring it"),
        (lambda tokens: tokens.encoder_attention(-1), "reads 'encoder_attention' without declaring it"),
        (lambda tokens: tokens.text.last_row, "no observable 'last_row'"),
        (lambda tokens: tokens.keyz, "Did you mean 'keys'"),
    ):
        reader(("keys",), read)
        with (
            tokenprune.patched(model, "reader", keep=0.5),
            pytest.raises((TokenPruneError, AttributeError), match=says),
        ):
            model(**inputs)


@each("need", [n for n in extend.available_observables() if n not in ("hidden", "normed")])
def test_unsupported_observable_is_rejected_by_backend(need: str) -> None:
    one = observable_registry.find_observable(need)
    for backend, site, in_llm in ((Backend.VLLM, "PRE_LLM", False), (Backend.VLLM_IN_LLM, "IN_LLM", True)):
        reader((need,), lambda tokens: None, site, (-1,))
        if backend not in one.backends:
            with pytest.raises(OptionError, match=f"needs {need}"):
                check_served(tokenprune.method("reader"), in_llm)


def test_needs_accept_text_prefixes() -> None:
    for written, means in (
        ("text.embeddings", "embeddings"), ("text_embeddings", "embeddings"), ("text.attention", "text_attention"),
        ("text_attention", "text_attention"), ("text.keys", "keys"), ("text.hidden", "hidden"),
    ):  # fmt: skip
        reader((written,), lambda tokens: None)
        assert tokenprune.method("reader").needs == {means}
    with pytest.raises(RegistrationError, match=r"unknown needs \['text.nothing'\]"):
        reader(("text.nothing",), lambda tokens: None)


# -- base classes of the sites


def test_methods_have_only_members_of_their_site() -> None:
    members = {"compute_shares", "choose", "block_starts", "plan", "score", "select", "next_rate"}
    own = {
        "fastv": {"score", "select"}, "divprune": {"score", "select"}, "vscan": {"score", "select"},
        "dyrate": {"score", "select", "next_rate"}, "tome": {"plan"}, "dymu": {"plan"},
        "downsample": {"compute_shares"}, "dynres": {"compute_shares"}, "view_select": {"choose"},
        "pevlm": {"block_starts"},
    }  # fmt: skip
    for name, has in own.items():
        cls = tokenprune.method_info(name).cls
        assert {member for member in members if hasattr(cls, member)} == has, name
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


# -- engines know no method and no observable


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node


def test_engines_use_only_base_class_members() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for folder in ("integrations", "bench", "tuning", "calibration", "cli", "guard")
        for path in (PACKAGE / folder).rglob("*.py")
        for call in calls(path)
        if call.func.id in ("getattr", "hasattr")
        and ast.unparse(call.args[0]) in ("method", "self.method", "step.method", "other")
        and isinstance(call.args[1], ast.Constant)
    ]
    assert not found


def test_engines_contain_no_observable_names() -> None:
    names = {name for name in extend.available_observables() if "_" in name}  # others are words of their own
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in (PACKAGE / "integrations").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    # What DECODE ranks by, in the message of an error.
    assert all("last_row_attention" in one and "decode_pruning" in one for one in found), found
