# SPDX-License-Identifier: Apache-2.0
"""dymu in the decoder, its shipped thresholds, and its errors."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tokenprune
from each import each
from made_up_thresholds import TAUS, by_hand, tower_shape
from merging_models import SUPPORTED, tower_of
from tests.unit.tower.test_encoder import BATCHES, expected_sources
from tokenprune import Budget, BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.kernels.merging import max_merges
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection import EncoderMethod, Tower
from tokenprune.selection.files import File
from tokenprune_bench.calibration import Thresholds
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.heldout import load_heldout
from tower_features import check_decoder, run_patched
from zoo import FAMILIES, Family


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


# -- the decoder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("method", ["dymu", ["dymu", "fastv"]])
@torch.no_grad()
def test_decoder_sees_one_token_per_group(family: Family, model, batch: str, method: Any) -> None:
    inputs = family.make_inputs(**BATCHES[batch])
    inputs["pixel_values"].flatten(0, -4)[0] = 0.3  # a simple image or tile beside detailed ones
    dymu = tokenprune.method("dymu", thresholds=by_hand(model, TAUS[family.name]))
    run = run_patched(model, inputs, [dymu, *method[1:]] if method != "dymu" else dymu, 0.5)
    stats, output = run.stats, run.outputs["image"]
    assert stats.cuts[0].sources == expected_sources(family, model, inputs, output.pooler_output)
    assert stats.visual_tokens_out < stats.visual_tokens_in
    assert stats.encoder_tokens_per_layer == get_record(output).block_tokens
    check_decoder(family, model, inputs, run)


# -- the shipped thresholds --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_demo_model_has_shipped_thresholds() -> None:
    subject = load_model(device="cpu")
    examples = load_heldout(kinds=("colour",), limit=16)
    inputs = subject.inputs([e.image for e in examples], [e.question for e in examples])
    for keep in (0.5, 0.25, 0.11):
        with tokenprune.patched(subject.model, "dymu", keep=keep):
            subject.model(**inputs)
            assert tokenprune.stats(subject.model).keep_ratio == pytest.approx(keep, rel=0.25)
    with pytest.raises(BudgetError, match=r"keep=0.3 is not calibrated.*0.5 or 0.25 or 0.11"):
        tokenprune.patch(subject.model, "dymu", keep=0.3)
    with pytest.raises(OptionError, match=r"calibrated for float32, but this tower uses bfloat16"):
        method = tokenprune.method("dymu", thresholds=next(iter(tokenprune.methods.encoder.thresholds._load_shipped())))
        tokenprune.patch(subject.model.bfloat16(), method, keep=0.5)


# -- unsupported setups ------------------------------------------------------------------------------------------------


def test_missing_thresholds_are_rejected(build) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(OptionError, match=r"no thresholds for this model.*tokenprune fit dymu --model"):
        tokenprune.patch(model, "dymu", keep=0.5)
    assert not tokenprune.is_patched(model)


def test_thresholds_of_other_model_are_rejected(build) -> None:
    model, other = build(FAMILIES["llava"]), copy.deepcopy(build(FAMILIES["llava"]))
    thresholds = by_hand(model, [0.5] * 3)
    with torch.no_grad():
        tower_of(other).encoder.layers[1].mlp.fc1.weight.mul_(1.01)
    for wrong, words in ((other, "other weights"), (build(FAMILIES["llava_onevision"]), "this tower is a Siglip")):
        with pytest.raises(OptionError, match=words):
            tokenprune.patch(wrong, "dymu", keep=0.5, thresholds=thresholds)
    for keep in (0.25, Budget(tokens=1), 0.500001, 18):
        with pytest.raises(BudgetError, match=r"is not calibrated. Use keep=0.5 "):
            tokenprune.patch(model, "dymu", keep=keep, thresholds=thresholds)
    for budget in (tokenprune.Budget.from_kv_share(0.5), tokenprune.Budget(keep=0.5, per="prompt")):
        with pytest.raises(BudgetError, match="a share or a number of patches"):
            tokenprune.patch(model, "dymu", keep=budget, thresholds=thresholds)
    assert not tokenprune.is_patched(model)


def test_invalid_options_are_rejected(tmp_path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors")
    for options, words in (
        (dict(thresholds=0.9), "must be a string or a path or a Thresholds or None"),
        (dict(thresholds=tmp_path / "absent.safetensors"), "cannot read"),
        (dict(thresholds=str(tmp_path / "text.safetensors")), "cannot read"),
        (dict(proportional=1), "True or False"),
        (dict(max_r=0), "max_r=0"),
        (dict(max_r=2.5), "max_r=2.5"),
    ):
        with pytest.raises(OptionError, match=words):
            tokenprune.method("dymu", **options)
    from safetensors.torch import save_file

    save_file({"keep=0.5": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(OptionError, match="does not contain thresholds"):
        tokenprune.method("dymu", thresholds=tmp_path / "other.safetensors")


def test_thresholds_round_trip_through_file(tmp_path) -> None:
    thresholds = Thresholds(
        {0.5: torch.rand(4), 1 / 3: torch.rand(4)}, Fingerprint("Tower", "float16", "ab"), 7, {"a": [1]}
    )
    thresholds.save(tmp_path / "a.safetensors")
    thresholds.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    loaded = Thresholds.load(tmp_path / "a.safetensors")
    assert (loaded.fingerprint, loaded.images, loaded.settings, loaded.keeps) == (
        thresholds.fingerprint,
        7,
        {"a": [1]},
        [0.5, 1 / 3],
    )
    assert all(torch.equal(loaded.for_keep(keep), thresholds.values[keep]) for keep in thresholds.keeps)


@each(
    ("values", "message"),
    [
        (3, "must be a non-empty dict"), ({}, "non-empty dict"), ({0.5: [0.9] * 3}, "not list"),
        ({0.5: torch.ones(3, 1)}, r"\[3, 1\]"),
        ({0.5: torch.tensor(0.9)}, r"float \(blocks,\), not torch.float32 \[\]"),
        ({0.5: torch.ones(3).int()}, "int32"), ({0.5: torch.ones(3).bool()}, "bool"),
        ({0.5: torch.tensor([0.9, float("nan"), 1])}, "keep=0.5 are not finite"),
        ({0.5: torch.tensor([0.9, float("inf"), 1])}, "not finite"), ({"0.5": torch.ones(3)}, "'0.5' is not a share"),
        ({2.0: torch.ones(3)}, "key 2.0 is not a share"), ({1: torch.ones(3)}, "key 1 is not a share"),
        ({0.5: torch.ones(2)}, "for 2 blocks, but the tower has 3"), ({0.5: torch.ones(4)}, "for 4 blocks"),
    ],
)  # fmt: skip
@each("exact", [False, True])
def test_invalid_thresholds_are_rejected_by_patch(values, message: str, exact: bool, build, tmp_path) -> None:
    """Both as an object and in a file."""
    model = build(FAMILIES["llava"])
    fingerprint = tower_shape(model).fingerprint
    with pytest.raises(OptionError, match=message):
        thresholds = Thresholds(values, fingerprint, 1)
        tokenprune.patch(model, "dymu", keep=0.5, thresholds=thresholds, exact=exact)
    assert not tokenprune.is_patched(model)
    if isinstance(values, dict) and all(isinstance(tensor, torch.Tensor) for tensor in values.values()):
        path = tmp_path / "thresholds.safetensors"
        Thresholds({0.5: torch.ones(3)}, fingerprint, 1).save(path)
        metadata = File.read(path).tensors()[1]
        save_file({f"keep={keep}": tensor for keep, tensor in values.items()}, path, metadata=metadata)
        if values and "0.5" not in values and 1 not in values:  # names are numbers in a file
            with pytest.raises(OptionError, match=message):
                tokenprune.patch(model, "dymu", keep=0.5, thresholds=path, exact=exact)


def test_invalid_files_are_rejected(tmp_path) -> None:
    path = tmp_path / "odd.safetensors"
    good = {"version": 1, "fingerprint": {"kind": "a", "dtype": "b", "digest": "c"}, "images": 1, "settings": {}}
    for text in ("[1]", "{", "3", "{}", json.dumps(good | {"fingerprint": 3}), json.dumps(good | {"fingerprint": {}})):
        save_file({"keep=0.5": torch.ones(3)}, path, metadata={"tokenprune_thresholds": text})
        with pytest.raises(OptionError, match="does not contain thresholds"):
            Thresholds.load(path)
    save_file({"keep=half": torch.ones(3)}, path, metadata={"tokenprune_thresholds": json.dumps(good)})
    with pytest.raises(OptionError, match="does not contain thresholds"):
        Thresholds.load(path)
    for content in (b"", b"\0" * 8, b"\xff" * 8, path.read_bytes()[:-1], b"\2\0\0\0\0\0\0\0[]"):
        path.write_bytes(content)
        with pytest.raises(OptionError, match=r"cannot read thresholds from"):
            Thresholds.load(path)


def test_attention_without_bias_is_rejected(build) -> None:
    model = copy.deepcopy(build(FAMILIES["llava"]))
    thresholds = by_hand(model, [0.5] * 3)
    model.set_attn_implementation({"vision_config": "flex_attention"})
    with pytest.raises(UnsupportedSetupError, match="padding of images"):
        tokenprune.patch(model, "dymu", keep=0.5, thresholds=thresholds, proportional=False)


def test_encoder_method_contract() -> None:
    with pytest.raises(NotImplementedError, match="plan"):
        EncoderMethod().plan(tokenprune.Budget(keep=0.5), Tower(17, 1, 3, 2))
    assert EncoderMethod().is_identity(tokenprune.Budget(keep=1.0))
    assert max_merges(17, 1) == 8
