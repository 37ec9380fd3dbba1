# SPDX-License-Identifier: Apache-2.0
"""Every model type of transformers' image-text-to-text mapping: one method of each kind on a tiny model, or refused.

The families of zoo.py, on which the rest of the suite runs every method, are part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import tokenprune
from basics import MODEL_METHODS, pieces, snapshot
from each import each
from families import FAMILIES, REFUSED, RETRIEVERS, STATEFUL
from only_kept import only_kept
from oracle import close, generate_logits, reduced, survivors
from pruned import run_pruned
from tokenprune import Pruner, Selection, Site, TokenPruneError, UnsupportedModelError, VisualTokens
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.shared.checks import find_unsupported_reason
from tokenprune.models import families
from tokenprune.models.families.tested import list_tested_sites
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from zoo import Family

# A score method, a merge method, one inside the decoder, and one that goes on while decoding.
METHODS: dict[str, dict[str, int]] = {"divprune": {}, "pool": {}, "dart": {}, "dyrate": {"layer": 2}}
READ_THE_TOWER = [
    name
    for name in MODEL_METHODS
    if select_observables(tokenprune.method_info(name).observables, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)
]
STEPS = 2


@dataclass(frozen=True)
class TakesAll(Pruner):
    """Keep all tokens, whatever it is asked for."""

    name, site, chooses_count = "takes_all", Site.PRE_LLM, True

    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(tokens.mask)


VIDEOS = {"images": (0, 0), "video": (True, 5)}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, record_property) -> Family:
    family = FAMILIES[request.param]
    record_property("model type", family.kind)  # counted at the end of the session, see conftest.py
    return family


@pytest.fixture
def methods(family: Family) -> list[str]:
    """Those that act where the table of families says that methods may."""
    sites = list_tested_sites(families.SUPPORTED[family.kind])
    return [name for name in METHODS if tokenprune.method_info(name).site.name in sites]


def batches(family: Family) -> list[dict[str, Any]]:
    """Ragged and padded on the left; where the family takes videos, one beside an image, or two."""
    if family.video is None:
        return [{"images": (2, 1)}]
    return [{"images": (2, 1)}, {"images": (0, 1), "video": True} if family.mixes else VIDEOS]


@torch.no_grad()
def test_keep_all_is_bit_equal(family: Family, model, methods: list[str]) -> None:
    inputs = family.make_inputs(images=(2, 1))
    assert (inputs["attention_mask"][:, 0] == 0).any(), "the batch must be padded on the left"
    logits = model(**inputs).logits
    generated, tokens, _ = generate_logits(model, inputs, STEPS)
    for method in methods:
        with tokenprune.patched(model, method, keep=1.0, **METHODS[method]):
            assert torch.equal(model(**inputs).logits, logits), method
            assert tokenprune.stats(model).visual_tokens_in == sum(map(sum, inputs.counts)), method
            again, same, _ = generate_logits(model, inputs, STEPS)
            assert torch.equal(again, generated) and torch.equal(same, tokens), method
    # Unpatched it is the model that it was; conftest.py compares hooks and attributes.
    assert torch.equal(model(**inputs).logits, logits)


@torch.no_grad()
def test_a_count_that_turns_out_to_be_all_is_bit_equal(family: Family, model) -> None:
    """Of a method that finds the count itself this is known after the cut is planned. Batches without padding: that
    leaves with any cut."""
    inputs = family.make_inputs(only=0)
    logits = model(**inputs).logits
    with tokenprune.patched(model, TakesAll(), keep=0.5):
        assert torch.equal(model(**inputs).logits, logits) and tokenprune.stats(model).keep_ratio == 1


@each("method", METHODS)
def test_equals_masking(family: Family, model, method: str, methods: list[str]) -> None:
    """Forward and generate compute what the unpatched model computes with the columns masked, and 1e-3 is felt."""
    if method not in methods:
        pytest.skip(f"{family.kind} takes no method at the site of {method}, and docs/reference/families.md says so")
    reference = only_kept if family.name in STATEFUL else reduced
    for batch in batches(family):
        inputs = family.make_inputs(**batch)
        with torch.no_grad(), tokenprune.patched(model, method, keep=0.3, record=True, **METHODS[method]):
            got = model(**inputs).logits
            forward_cuts = tokenprune.stats(model).cuts
            written, tokens, _ = generate_logits(model, inputs, STEPS)
            cuts = tokenprune.stats(model).cuts
        alive = check_survivors(forward_cuts, inputs, family, model)
        with torch.no_grad(), reference(family, model, forward_cuts, alive.shape[1]):
            want = model(**inputs).logits
        close(got[alive], want[alive])
        # Padded rows have other positions in generate, so that a method may choose differently.
        check_survivors(cuts, inputs, family, model)
        with reference(family, model, cuts, alive.shape[1]):
            masked, _, _ = generate_logits(model, inputs, STEPS, tokens=tokens)
        close(written, masked)
        with torch.no_grad():
            full = model(**inputs).logits
        assert (want[alive] - full[alive]).abs().max() > 1e-3, "the model does not feel what is missing"


def check_survivors(cuts: list[Any], inputs: Any, family: Family, model: Any) -> torch.Tensor:
    """All text that is not padding survives, and of each image's tokens about the share asked for."""
    alive = survivors(cuts[-1], inputs["input_ids"].shape[1])
    visual, real = family.visual_mask(model, inputs), inputs["attention_mask"].bool()
    assert torch.equal(alive & ~visual, real & ~visual)
    for row, images in enumerate(pieces(family, inputs)):
        for image in images:
            assert 0.2 * len(image) <= int(alive[row, image].sum()) <= 0.4 * len(image)
    return alive


def test_the_tower_is_refused_where_it_is_not_known(family: Family, model) -> None:
    refused = [] if "IN_ENCODER" in list_tested_sites(families.SUPPORTED[family.kind]) else ["tome", "dymu"]
    refused += [] if families.SUPPORTED[family.kind].patches else READ_THE_TOWER
    refused += [] if families.SUPPORTED[family.kind].tower_rows == "all images" else ["pixelprune"]
    for method in refused:
        with pytest.raises(TokenPruneError, match=family.kind):
            tokenprune.patch(model, method, keep=0.3)
        assert not tokenprune.is_patched(model)


@torch.no_grad()
def test_units_leave_the_tower_where_the_table_says(family: Family, model) -> None:
    drop = tokenprune.method("towerdrop", layer=1)
    if find_unsupported_reason(drop, family.kind, config=get_adapter(model).config) is not None:
        with pytest.raises(TokenPruneError, match=family.kind):
            tokenprune.patch(model, drop, keep=0.3)
        return
    inputs = family.make_inputs(images=(2, 1))
    first, *_, last = run_pruned(model, inputs, drop, 0.3, guard="off")[1].encoder_tokens_per_layer
    assert last < 0.6 * first


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model = REFUSED[name].build()
    was = snapshot(model)
    reason = re.escape(families.REFUSED[name])
    for method in METHODS:
        with pytest.raises(UnsupportedModelError, match=f"'{name}' is not supported: {reason}"):
            tokenprune.patch(model, method, keep=0.3)
    assert snapshot(model) == was


def test_every_model_type_is_built_or_refused() -> None:
    mapping = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    built = {family.kind for family in FAMILIES.values()}
    retrieving = {one.config.model_type for one in RETRIEVERS.values()}
    assert built | retrieving == set(families.SUPPORTED), "the table of families is not what is tested"
    assert {family.kind for family in REFUSED.values()} <= set(families.REFUSED)
    assert not built & set(families.REFUSED)
    if Version(transformers.__version__) < Version("5.24"):  # later ones may have more, which nobody looked at
        assert not mapping - built - set(families.REFUSED)
    for kind, support in families.SUPPORTED.items():
        assert kind in CONFIG_MAPPING or compat.is_older_than(support.since), f"{kind} missing since {support.since}"


def test_a_version_that_is_too_old_is_refused_by_name(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["llava"]
    model = build(family)
    since = families.SUPPORTED[family.kind].since
    monkeypatch.setattr(compat, "VERSION", Version("4.57.6"))
    with pytest.raises(UnsupportedModelError, match=f"'llava' needs transformers {since} or later.* 4.57.6"):
        tokenprune.patch(model, "divprune", keep=0.5)
    assert not tokenprune.is_patched(model)


@torch.no_grad()
def test_a_number_is_for_each_image(family: Family, model) -> None:
    """`keep=5` leaves five tokens of each image and video, or of each tile or frame where the table says so."""
    apart = "counts as an image" in families.SUPPORTED[family.kind].note
    for batch in batches(family):
        inputs = family.make_inputs(**batch)
        with tokenprune.patched(model, "uniform", keep=5, record=True):
            model.generate(**inputs, max_new_tokens=1)
            alive = survivors(tokenprune.stats(model).cuts[-1], inputs["input_ids"].shape[1])
        kept = [int(alive[row, image].sum()) for row, of in enumerate(pieces(family, inputs)) for image in of]
        assert all(number == 5 or (apart and number % 5 == 0) for number in kept), kept
