# SPDX-License-Identifier: Apache-2.0
"""patch, unpatch and patched restore the model, also after a failed patch."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

import tokenprune
from basics import MODEL_METHODS, pieces, snapshot
from each import each
from pruned import check_forward, run_pruned
from tokenprune import AlreadyPatchedError, BudgetError, NotPatchedError, OptionError, TokenPruneError
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.integrations.shared.attachment import get_attachment
from zoo import FAMILIES, Family


@pytest.mark.few_families
@pytest.mark.parametrize("method", MODEL_METHODS)
@torch.no_grad()
def test_unpatch_restores_the_model(method: str, family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    before, snapshot_before = model(**inputs).logits, snapshot(model)
    attention = model.config._attn_implementation
    assert tokenprune.patch(model, method, keep=0.3) is model
    assert tokenprune.is_patched(model)
    assert snapshot(model) != snapshot_before
    assert not torch.equal(model(**inputs).logits, before)
    model.generate(**inputs, max_new_tokens=2)
    assert tokenprune.unpatch(model) is model
    assert not tokenprune.is_patched(model)
    forget_rope_deltas(snapshot_before)
    assert forget_rope_deltas(snapshot(model)) == snapshot_before
    assert model.config._attn_implementation == attention == "sdpa"
    assert torch.equal(model(**inputs).logits, before)


def forget_rope_deltas(state: dict) -> dict:
    """Remove an attribute that stores the last prompt of Qwen's base model, patched or not."""
    for key in [key for key in state if key.endswith(".rope_deltas")]:
        del state[key]
    return state


# Each case raises an error before any change.
FAILING = {
    "unknown method": dict(method="fastvv"),
    "unknown option": dict(method="dart", pivots=3),
    "bad option": dict(method="fastv", query="first"),
    "option of a configured method": dict(method=tokenprune.method("fastv"), layer=1),
    "layer zero": dict(method="fastv", layer=0),
    "layer beyond the last": dict(method="dart", layer=4),
    "layer is a string": dict(method="dart", layer="2"),
    "keep zero": dict(method="fastv", keep=0.0),
    "keep twice": dict(method="fastv", keep=(0.5, 0.5)),
    "no method": dict(method=[]),
    "same layer": dict(method=["fastv", "dart"]),
    "needs a processor": dict(method="downsample", keep=0.5),
    "processor for nothing": dict(method="dart", processor=object()),
    "budgets of different scope": dict(
        method=["divprune", "fastv"], keep=[tokenprune.Budget(keep=0.5), tokenprune.Budget(keep=0.5, per="prompt")]
    ),
}


@each("case", FAILING)
@torch.no_grad()
def test_failing_patch_changes_nothing(case: str, family: Family, model) -> None:
    snapshot_before = snapshot(model)
    with pytest.raises(TokenPruneError):
        tokenprune.patch(model, **FAILING[case])
    assert snapshot(model) == snapshot_before
    assert not tokenprune.is_patched(model)


@each("case", FAILING)
@torch.no_grad()
def test_failing_replacement_keeps_the_first_patch(case: str, build) -> None:
    model, inputs = FAMILIES["qwen2_5_vl"].prepare(build)
    with tokenprune.patched(model, "divprune", keep=0.3):
        before, snapshot_before = model(**inputs).logits, snapshot(model)
        with pytest.raises(TokenPruneError):
            tokenprune.patch(model, **FAILING[case], replace=True)
        assert forget_rope_deltas(snapshot(model)) == forget_rope_deltas(snapshot_before)
        assert torch.equal(model(**inputs).logits, before)


def test_failing_attachment_is_rolled_back(family: Family, model, monkeypatch) -> None:
    snapshot_before = snapshot(model)
    layers = model.get_submodule(family.decoder).layers

    def fail(*args, **kwargs):
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(layers[2], "register_forward_pre_hook", fail)
    with pytest.raises(RuntimeError, match="no more hooks"):
        tokenprune.patch(model, "fastv", keep=0.5)
    monkeypatch.undo()
    assert snapshot(model) == snapshot_before


@torch.no_grad()
def test_patching_twice_is_rejected(build) -> None:
    model, inputs = FAMILIES["llava_next"].prepare(build)
    snapshot_before = snapshot(model)
    with tokenprune.patched(model, "divprune", keep=0.3):
        first = model(**inputs).logits
    tokenprune.patch(model, "dart", keep=0.5)
    try:
        with pytest.raises(AlreadyPatchedError, match=r"dart.*replace=True"):
            tokenprune.patch(model, "divprune", keep=0.3)
        tokenprune.patch(model, "divprune", keep=0.3, replace=True)
        assert torch.equal(model(**inputs).logits, first)
    finally:
        tokenprune.unpatch(model)
    assert snapshot(model) == snapshot_before


@torch.no_grad()
def test_patched_restores_the_previous_patch(build) -> None:
    model, inputs = FAMILIES["internvl"].prepare(build)
    with tokenprune.patched(model, "uniform", keep=0.5):
        first = model(**inputs).logits
        with pytest.raises(AlreadyPatchedError), tokenprune.patched(model, "fastv", keep=0.2):
            pass
        assert torch.equal(model(**inputs).logits, first)
        with pytest.raises(ZeroDivisionError), tokenprune.patched(model, "fastv", keep=0.2, replace=True):
            assert not torch.equal(model(**inputs).logits, first)
            raise ZeroDivisionError
        assert torch.equal(model(**inputs).logits, first)
    with tokenprune.patched(model, "fastv", keep=0.2):
        tokenprune.unpatch(model)  # manual unpatch inside the block
    assert not tokenprune.is_patched(model)


@pytest.mark.parametrize("call", [tokenprune.unpatch, tokenprune.stats])
def test_unpatched_model_has_no_stats(call, build) -> None:
    model = build(FAMILIES["llava"])
    assert not tokenprune.is_patched(model)
    with pytest.raises(NotPatchedError, match="patch"):
        call(model)


@torch.no_grad()
def test_two_models_are_independent(build) -> None:
    llava, qwen = FAMILIES["llava"], FAMILIES["qwen2_vl"]
    a, b = build(llava), build(qwen)
    x, y = llava.make_inputs(), qwen.make_inputs()
    unpatched = b(**y).logits
    with tokenprune.patched(a, "fastv", keep=0.3):
        expected = a(**x).logits
        assert torch.equal(b(**y).logits, unpatched)
        with tokenprune.patched(b, "dart", keep=0.5):
            assert torch.equal(a(**x).logits, expected)
            b(**y)
            assert tokenprune.stats(a).visual_tokens_in == sum(map(sum, x.counts))
            assert tokenprune.stats(b).visual_tokens_in == sum(map(sum, y.counts))


@torch.no_grad()
def test_a_model_inside_another_module(build) -> None:
    """The base model can be patched, too, and an error in a forward does not affect the next call."""
    model, inputs = FAMILIES["llava"].prepare(build)
    with tokenprune.patched(model, "fastv", keep=0.3):
        expected = model(**inputs).logits
        with pytest.raises(Exception, match=r"."):
            model(**{**inputs, "attention_mask": "nonsense"})
        assert torch.equal(model(**inputs).logits, expected)
    with tokenprune.patched(model.model, "fastv", keep=0.3):
        assert torch.equal(model(**inputs).logits, expected)


COMPOSED = [
    (["divprune", "fastv"], [0.5, 0.4]),
    (["fastv", "uniform"], 0.6),
    ([tokenprune.method("fastv", layer=3), tokenprune.method("dart", layer=1)], 0.6),
    (["pool", "dart", tokenprune.method("fastv", layer=3)], 0.7),
]


@pytest.mark.parametrize(("methods", "keep"), COMPOSED, ids=["PL", "order", "two layers", "merge and two"])
def test_composition(methods: list, keep, family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 2))
    stats = check_forward(family, model, inputs, methods, keep)
    layers = [cut.layer for cut in stats.cuts]
    assert layers == sorted(layers) and len(layers) == len(methods)
    for cut, later in zip(stats.cuts, stats.cuts[1:], strict=False):
        assert all(set(b) < set(a) for a, b in zip(cut.kept, later.kept, strict=True))
    first_keep = keep[0] if isinstance(keep, list) else keep
    counts = [max(1, round(first_keep * len(piece))) for row in pieces(family, inputs) for piece in row]
    assert stats.visual_tokens_per_layer[layers[0]] == sum(counts)
    assert stats.visual_tokens_out == stats.visual_tokens_per_layer[-1] < sum(counts)


def test_composition_errors(build) -> None:
    model = build(FAMILIES["llava"])
    for methods in (["fastv", "dart"], ["divprune", "uniform"], ["fastv", "fastv"]):
        with pytest.raises(OptionError, match=f"{methods[0]}.*{methods[1]}"):
            tokenprune.patch(model, methods)
    with pytest.raises(OptionError, match="layer"):
        tokenprune.patch(model, ["divprune", "fastv"], layer=1)
    with pytest.raises(BudgetError, match="2 methods"):
        tokenprune.patch(model, ["divprune", "fastv"], keep=[0.5])


def test_deepcopy_of_unpatched_model_is_independent(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    other = copy.deepcopy(model)
    tokenprune.patch(other, "divprune", keep=0.2)
    with torch.no_grad():
        assert not torch.equal(other(**inputs).logits, model(**inputs).logits)


def test_keeps_follow_the_order_of_methods(build) -> None:
    model, inputs = build(FAMILIES["llava"]), FAMILIES["llava"].make_inputs()
    first, second = (
        run_pruned(model, inputs, methods, keeps)[1].visual_tokens_per_layer
        for methods, keeps in ((["random", "fastv"], [0.75, 0.5]), (["fastv", "random"], [0.5, 0.75]))
    )
    assert first == second and first[0] == sum(round(0.75 * count) for row in inputs.counts for count in row)


def test_states_are_removed_with_their_part(build) -> None:
    """Thread state of a removed part must not be found by a new part with the same id."""
    model, inputs = FAMILIES["llava"].prepare(build)
    gc.collect()
    before = len(get_thread_states())
    for _ in range(3):
        with tokenprune.patched(model, "random", keep=0.3):
            model.generate(**inputs, max_new_tokens=1)
            get_thread_states()[get_attachment(model).engine.parts[0]] = "what a part left"
            assert len(get_thread_states()) > before
    gc.collect()
    assert len(get_thread_states()) == before
