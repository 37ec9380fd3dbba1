# SPDX-License-Identifier: Apache-2.0
"""Every model type of transformers' image-text-to-text mapping: one method of each kind on a tiny model, or refused.

This includes the families of zoo.py, which run every method in the rest of the suite.
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

# One method each that scores tokens, merges tokens, cuts inside the decoder, and drops tokens while decoding.
METHODS: dict[str, dict[str, int]] = {"divprune": {}, "pool": {}, "dart": {}, "dyrate": {"layer": 2}}
READ_THE_TOWER = [
    name
    for name in MODEL_METHODS
    if select_observables(tokenprune.method_info(name).observables, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)
]
STEPS = 2


@dataclass(frozen=True)
class TakesAll(Pruner):
    """Keep all tokens."""

    name, site, chooses_count = "takes_all", Site.PRE_LLM, True

    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(tokens.mask)


VIDEOS = {"images": (0, 0), "video": (True, 5)}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, record_property) -> Family:
    family = FAMILIES[request.param]
    record_property("model type", family.kind)  # conftest.py counts the model types at the end
    return family


@pytest.fixture
def methods(family: Family) -> list[str]:
    """Return the methods at sites that the table of families lists for the family."""
    sites = list_tested_sites(families.SUPPORTED[family.kind])
    return [name for name in METHODS if tokenprune.method_info(name).site.name in sites]


def list_batches(family: Family) -> list[dict[str, Any]]:
    """Return ragged, left-padded batches, with a video if the family takes videos."""
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
            repeated, same, _ = generate_logits(model, inputs, STEPS)
            assert torch.equal(repeated, generated) and torch.equal(same, tokens), method
    # The unpatched model is unchanged; conftest.py compares hooks and attributes.
    assert torch.equal(model(**inputs).logits, logits)


@torch.no_grad()
def test_selecting_all_tokens_is_bit_equal(family: Family, model) -> None:
    """A method that determines its count keeps all tokens only after the cut is planned.

    The batch has a single row, because any cut also drops padding.
    """
    inputs = family.make_inputs(only=0)
    logits = model(**inputs).logits
    with tokenprune.patched(model, TakesAll(), keep=0.5):
        assert torch.equal(model(**inputs).logits, logits) and tokenprune.stats(model).keep_ratio == 1


@each("method", METHODS)
def test_equals_masking(family: Family, model, method: str, methods: list[str]) -> None:
    """Forward and generate equal the unpatched model with dropped tokens masked, and the mask changes the logits."""
    if method not in methods:
        pytest.skip(f"{family.kind} does not support the site of {method} (docs/reference/families.md)")
    reference = only_kept if family.name in STATEFUL else reduced
    for batch in list_batches(family):
        inputs = family.make_inputs(**batch)
        with torch.no_grad(), tokenprune.patched(model, method, keep=0.3, record=True, **METHODS[method]):
            got = model(**inputs).logits
            forward_cuts = tokenprune.stats(model).cuts
            written, tokens, _ = generate_logits(model, inputs, STEPS)
            cuts = tokenprune.stats(model).cuts
        is_kept = check_survivors(forward_cuts, inputs, family, model)
        with torch.no_grad(), reference(family, model, forward_cuts, is_kept.shape[1]):
            want = model(**inputs).logits
        close(got[is_kept], want[is_kept])
        # In generate, padded rows have other positions, so the method may select other tokens.
        check_survivors(cuts, inputs, family, model)
        with reference(family, model, cuts, is_kept.shape[1]):
            masked, _, _ = generate_logits(model, inputs, STEPS, tokens=tokens)
        close(written, masked)
        with torch.no_grad():
            unmasked = model(**inputs).logits
        assert (want[is_kept] - unmasked[is_kept]).abs().max() > 1e-3, "dropped tokens do not change the logits"


def check_survivors(cuts: list[Any], inputs: Any, family: Family, model: Any) -> torch.Tensor:
    """Check that all text and about the requested share of each image are kept; return the kept tokens."""
    is_kept = survivors(cuts[-1], inputs["input_ids"].shape[1])
    visual, is_valid = family.visual_mask(model, inputs), inputs["attention_mask"].bool()
    assert torch.equal(is_kept & ~visual, is_valid & ~visual)
    for row, images in enumerate(pieces(family, inputs)):
        for image in images:
            assert 0.2 * len(image) <= int(is_kept[row, image].sum()) <= 0.4 * len(image)
    return is_kept


def test_unknown_towers_are_refused(family: Family, model) -> None:
    refused = [] if "IN_ENCODER" in list_tested_sites(families.SUPPORTED[family.kind]) else ["tome", "dymu"]
    refused += [] if families.SUPPORTED[family.kind].patches else READ_THE_TOWER
    refused += [] if families.SUPPORTED[family.kind].tower_rows == "all images" else ["pixelprune"]
    for method in refused:
        with pytest.raises(TokenPruneError, match=family.kind):
            tokenprune.patch(model, method, keep=0.3)
        assert not tokenprune.is_patched(model)


@torch.no_grad()
def test_towers_drop_patches_as_the_table_lists(family: Family, model) -> None:
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
    before = snapshot(model)
    reason = re.escape(families.REFUSED[name])
    for method in METHODS:
        with pytest.raises(UnsupportedModelError, match=f"'{name}' is not supported: {reason}"):
            tokenprune.patch(model, method, keep=0.3)
    assert snapshot(model) == before


def test_every_model_type_is_built_or_refused() -> None:
    mapping = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    built = {family.kind for family in FAMILIES.values()}
    retriever_types = {retriever.config.model_type for retriever in RETRIEVERS.values()}
    assert built | retriever_types == set(families.SUPPORTED), "the table of families and the tested families differ"
    assert {family.kind for family in REFUSED.values()} <= set(families.REFUSED)
    assert not built & set(families.REFUSED)
    if Version(transformers.__version__) < Version("5.24"):  # later versions may add types
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
def test_integer_keep_is_per_image(family: Family, model) -> None:
    """`keep=5` keeps five tokens of each image and video, or of each tile or frame for some families."""
    splits_images = "counts as an image" in families.SUPPORTED[family.kind].note
    for batch in list_batches(family):
        inputs = family.make_inputs(**batch)
        with tokenprune.patched(model, "uniform", keep=5, record=True):
            model.generate(**inputs, max_new_tokens=1)
            is_kept = survivors(tokenprune.stats(model).cuts[-1], inputs["input_ids"].shape[1])
        kept = [
            int(is_kept[row, image].sum())
            for row, image_indices in enumerate(pieces(family, inputs))
            for image in image_indices
        ]
        assert all(count == 5 or (splits_images and count % 5 == 0) for count in kept), kept
