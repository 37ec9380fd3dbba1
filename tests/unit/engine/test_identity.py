# SPDX-License-Identifier: Apache-2.0
"""keep=1.0 is bit-equal to the unpatched model for each method and family."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from basics import METHODS, MODEL_METHODS, check_takes
from oracle import generate_logits
from pruned import run_pruned
from tokenprune.methods.registry import method_class
from zoo import FAMILIES, Family

BATCHES = {
    "left": {},
    "right": {"padding": "right"},
    "images": {"images": (2, 1)},
    "one row": {"only": 1},
    "video": {"video": True, "images": (1, 0)},
}


# view_select drops views that the question does not name, also at 1.0: see test_view_select.py.
@pytest.fixture(
    params=[name for name in METHODS if not issubclass(method_class(name), tokenprune.selection.ImageChooser)]
)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def runs(method: str, family: str, batch: str) -> bool:
    """Return whether the test runs; otherwise it skips with a reason."""
    on_videos = tokenprune.method_info(method).site is tokenprune.Site.ATTENTION
    return bool(FAMILIES[family].video) or not (on_videos or batch == "video")


@pytest.mark.pairwise(runs=runs)
@torch.no_grad()
@pytest.mark.parametrize("batch", BATCHES)
def test_forward_is_bit_equal(method: str, family: Family, model, batch: str) -> None:
    check_takes(family, method)
    if batch == "video" and not family.video:
        pytest.skip(f"{family.name} does not support videos")
    inputs = family.make_inputs(**BATCHES[batch])
    before = model(**inputs)
    patched, stats = run_pruned(model, inputs, method, 1.0)
    assert torch.equal(patched.logits, before.logits)
    assert stats.visual_tokens_in == stats.visual_tokens_out == sum(map(sum, inputs.counts))
    assert stats.keep_ratio == stats.prefill_flops_ratio == 1
    assert stats.kv_bytes == stats.kv_bytes_full > 0
    # The class of the cache is unchanged, so the unpatched model can continue it.
    assert type(patched.past_key_values) is type(before.past_key_values)
    after = model(**inputs)
    assert torch.equal(after.logits, before.logits)


@pytest.mark.few_families
def test_generate_is_bit_equal(method: str, family: Family, model) -> None:
    check_takes(family, method)
    inputs = family.make_inputs()
    assert (inputs["attention_mask"][:, 0] == 0).any(), "the batch must be padded on the left"
    logits, tokens, _ = generate_logits(model, inputs, 4)
    with tokenprune.patched(model, method, keep=1.0):
        patched_logits, patched_tokens, _ = generate_logits(model, inputs, 4)
    assert torch.equal(patched_tokens, tokens)
    assert torch.equal(patched_logits, logits)


@torch.no_grad()
def test_more_tokens_than_there_are(family: Family, model) -> None:
    inputs = family.make_inputs()
    before = model(**inputs).logits
    for method in METHODS:
        if method not in MODEL_METHODS or tokenprune.method(method).chooses_count:
            continue  # accepts only shares, or only some families, or treats `keep` as an upper bound
        with tokenprune.patched(model, method, keep=100_000):
            assert torch.equal(model(**inputs).logits, before), method
