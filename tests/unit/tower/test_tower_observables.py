# SPDX-License-Identifier: Apache-2.0
"""Tower values that methods get, against eager attention maps and hooks of the unpatched model.

Covers towers with and without a class token, Qwen's windows and merge groups, several images, and videos.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import snapshot
from each import each
from families import FAMILIES as EVERY_FAMILY
from module_calls import record_inputs
from oracle import close
from tests.unit.tower.test_encoder_attention import BLOCKS
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings.parse import check_method as check_served
from tokenprune.methods import registry
from tower_values import CLASS_TOKEN, attentions_of, run_tower
from zoo import FAMILIES, Family

# Families with supported towers. For other families, methods that read the tower raise.
BATCHES = {"images": {"images": (1, 2)}, "video": {"video": True, "images": (1, 1)}}
CASES = [
    pytest.param(family, batch, id=f"{name}-{batch}")
    for name, family in FAMILIES.items()
    for batch in BATCHES
    if batch != "video" or family.video
]
NEEDS = ("encoder_received_attention", "encoder_keys", "encoder_queries", "encoder_features")


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tokenprune.available_methods()
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    yield


def register_reader(needs: tuple[str, ...], read: Any, layers: tuple = (-1,)) -> list[Any]:
    records: list[Any] = []

    @tokenprune.register("reader", needs=needs)
    @dataclass(frozen=True)
    class Reader(tokenprune.Pruner):
        """Record the requested values and score tokens by their norm."""

        @property
        def encoder_layers(self) -> tuple:
            return layers

        def score(self, tokens: Any) -> Tensor:
            records.append((tokens.segments, read(tokens)))
            return tokens.hidden.float().norm(dim=-1)

    return records


def naive(family: Family, model: Any, inputs: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Return keys, queries, received attention and features of an unpatched eager model, shape (tokens, channels).

    Values are means over the patches of each placeholder in reading order, and 0 for newlines.
    """
    run, first = run_tower(family, model, inputs, monkeypatch), int(family.name in CLASS_TOKEN)
    # InternVL shuffles patches before its projector.
    features = [out.last_hidden_state[:, first:] for out in run.outputs] if family.name == "internvl" else None
    patches = {
        "encoder_queries": [q[:, :, first:].transpose(1, 2).flatten(2) for q, _, _, _ in run.calls[block]],
        "encoder_keys": [k[:, :, first:].transpose(1, 2).flatten(2) for _, k, _, _ in run.calls[block]],
        # All rows count, including the row of the class token. Its column is left out.
        "encoder_received_attention": [w.mean(2)[..., first:].transpose(1, 2) for *_, w in run.calls[block]],
        "encoder_features": [x if x.ndim == 3 else x[None] for x in features or run.projector_inputs],
    }
    return {name: run.average(torch.cat([x.flatten(0, 1) for x in parts])) for name, parts in patches.items()}


def check_values(records: list[Any], family: Family, model: Any, inputs: Any, want: dict[str, Tensor]) -> None:
    flat = {tuple(index): i for i, index in enumerate(family.visual_mask(model, inputs).nonzero().tolist())}
    for segments, values in records:
        for segment, (row, count) in enumerate(zip(segments.row, segments.counts, strict=True)):
            tokens = [flat[row, position] for position in segments.position[segment, :count].tolist()]
            for name in NEEDS:
                got = values[name][segment]
                got = got.T if name == "encoder_received_attention" else got
                assert got.dtype == torch.float32
                close(got[:count], want[name][tokens], 1e-5)
                assert not got[count:].any()


@pytest.mark.parametrize(("family", "batch"), CASES)
@torch.no_grad()
def test_tower_values_match_naive(family: Family, batch: str, build, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each attention implementation, also in generate, for the last block that is read and an early block."""
    inputs = family.make_inputs(**BATCHES[batch])
    for layer in (-1, 0.25):
        want = naive(family, build(family, "eager"), inputs, BLOCKS[layer][family.name], monkeypatch)

        def read(tokens: Any, layer: Any = layer) -> dict[str, Tensor]:
            return {name: getattr(tokens, name)(layer) for name in NEEDS[:-1]} | {NEEDS[-1]: tokens.encoder_features}

        records = register_reader(NEEDS, read, (layer,))
        for model in (build(family), build(family, "eager")):
            with tokenprune.patched(model, "reader", keep=0.5):
                model(**inputs)
                model.generate(**inputs, max_new_tokens=1)
        assert len(records) == 4
        check_values(records, family, model, inputs, want)


@torch.no_grad()
def test_last_block_is_read_if_the_model_skips_it(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA does not use the output of CLIP's last block, but its queries and keys are available."""
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 2))
    last = len(attentions_of(model)) - 1
    assert BLOCKS[-1]["llava"] < last
    want = naive(family, model, inputs, last, monkeypatch)

    def read(tokens: Any) -> dict[str, Tensor]:
        return {name: getattr(tokens, name)(last) for name in NEEDS[:-1]} | {NEEDS[-1]: tokens.encoder_features}

    records = register_reader(NEEDS, read, (last,))
    with tokenprune.patched(model, "reader", keep=0.5):
        model(**inputs)
    check_values(records, family, model, inputs, want)


@torch.no_grad()
def test_single_observable_is_enough(family: Family, build) -> None:
    """Every observable of the tower also provides the cells of the patches."""
    model, inputs = build(family), family.make_inputs(images=(1, 2))
    for need in (*NEEDS, "encoder_attention", "patches"):

        def read(tokens: Any, need: str = need) -> tuple[Any, Tensor]:
            value = getattr(tokens, need)
            return value(-1) if callable(value) else value, tokens.patches.tile

        records = register_reader((need,), read)
        with tokenprune.patched(model, "reader", keep=0.5):
            model(**inputs)
        (_, (value, tile)), *_ = records
        assert value is not None and tile.shape == records[0][0].mask.shape


def test_vllm_names_unsupported_observables() -> None:
    register_reader(("encoder_features",), lambda tokens: tokens.encoder_features)
    with pytest.raises(OptionError, match="it needs encoder_features, which"):
        check_served(tokenprune.method("reader"))
    for need in NEEDS[:-1]:
        register_reader((need,), lambda tokens, need=need: getattr(tokens, need)(-1))
        check_served(tokenprune.method("reader"))


@torch.no_grad()
def test_unreadable_observables_raise_before_changes(build) -> None:
    model = build(FAMILIES["llava"])
    register_reader(("encoder_keys",), lambda tokens: tokens.encoder_keys(9), (9,))
    with pytest.raises(OptionError, match="block 9 does not exist"):
        tokenprune.patch(model, "reader", keep=0.5)
    assert not tokenprune.is_patched(model)
    for name in ("blip-2", "fuyu", "deepseek_vl_hybrid"):
        family = EVERY_FAMILY[name]
        model, inputs = family.build(), family.make_inputs()
        before = snapshot(model)
        for need in (*NEEDS, "patches"):
            register_reader((need,), lambda tokens: None)
            with pytest.raises(UnsupportedSetupError, match="reader reads the vision tower"):
                tokenprune.patch(model, "reader", keep=0.5)
        assert snapshot(model) == before and model(**inputs) is not None


def test_errors_name_options_that_read_less(build) -> None:
    """The error for an unsupported tower names an option that does not read the tower, if the method has one."""
    model = EVERY_FAMILY["blip-2"].build()
    for name, options, hint in (
        ("mmtok", {}, "mmtok with features='projected'"),
        ("prunesid", {"form": "llava"}, "prunesid with form='qwen'"),
        ("divprune", {"center": "tower"}, "divprune with center='standardised'"),
        ("vispruner", {}, None),  # still needs the tower's attention
        ("scope", {"features": "tower"}, None),
        ("fastervlm", {}, None),
    ):
        with pytest.raises(UnsupportedSetupError, match="Use a method that acts after the tower") as error:
            tokenprune.patch(model, name, keep=0.5, **options)
        assert (hint in str(error.value)) if hint else " with " not in str(error.value)
    tokenprune.patch(model, "mmtok", keep=0.5, features="projected")
    tokenprune.unpatch(model)


@pytest.mark.parametrize("name", ["glm4v", "glm4v_moe"])
@each("batch", [{"images": (1, 2)}, {"video": (5, 5), "images": (0, 0)}])
@torch.no_grad()
def test_features_of_a_tower_that_merges_patches(name: str, batch: dict[str, Any], build) -> None:
    """The output of GLM-4V's tower has one row per visual token, the scores of its blocks one row per patch."""
    family = EVERY_FAMILY[name]
    model, inputs = build(family), family.make_inputs(**batch)
    with record_inputs(model.model.visual.merger, note=lambda args, kwargs: args[0].flatten(0, -2)) as merged:
        model(**inputs)
    expected = torch.cat(merged)
    for needs in (NEEDS, ("encoder_features",)):
        records = register_reader(needs, lambda tokens, needs=needs: {need: getattr(tokens, need) for need in needs})
        with tokenprune.patched(model, "reader", keep=0.5):
            model(**inputs)
        ((segments, values),) = records
        features_per_segment = values["encoder_features"]
        rows = [features_per_segment[index, :count] for index, count in enumerate(segments.counts)]
        torch.testing.assert_close(torch.cat(rows), expected)
