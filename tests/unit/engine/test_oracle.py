# SPDX-License-Identifier: Apache-2.0
"""Dropping tokens equals masking them, for each method and family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from basics import MODEL_METHODS, VIDEO_METHODS, at_the_decoder
from oracle import close, generate_logits, reduced, survivors
from pruned import run_pruned
from zoo import FAMILIES, Family

BATCHES: dict[str, dict[str, Any]] = {
    "left": {},
    "right": {"padding": "right"},
    "no padding": {"images": (2, 1), "padding": None},
    "ragged": {"images": (2, 1)},
    "ragged right": {"images": (1, 3), "padding": "right"},
    "text beside": {"images": (0, 2)},
    "one row": {"only": 0},
    "video": {"video": True, "images": (1, 1)},
}
CASES = [
    pytest.param(family, batch, id=f"{name}-{batch}")
    for name, family in FAMILIES.items()
    for batch in BATCHES
    if batch != "video" or family.video
]


def choose_layer(method: str, layer: int | None = None) -> dict[str, int]:
    info = tokenprune.method_info(method)
    inside = info.site in (tokenprune.Site.IN_LLM, tokenprune.Site.DECODE)
    one_cut = inside and isinstance(info.options.get("layer"), int)
    return {"layer": layer} if layer and one_cut else {}


def check_survivors(cuts: list, inputs: Any, family: Family, model: Any) -> torch.Tensor:
    """Check that all text and only some visual tokens are kept; return the kept tokens, bool `[B, L]`."""
    length = inputs["input_ids"].shape[1]
    is_kept = survivors(cuts[-1], length)
    visual, is_valid = family.visual_mask(model, inputs), inputs["attention_mask"].bool()
    assert torch.equal(is_kept & ~visual, is_valid & ~visual)
    withdraws = not tokenprune.method_info(cuts[-1].method).cls.min_tokens
    assert (visual & ~is_kept).any() and (withdraws or (is_kept & visual).any())
    return is_kept


@torch.no_grad()
def compare_forward(family: Family, model: Any, method: Any, inputs: Any, keep: Any, **chosen: Any) -> None:
    output, stats = run_pruned(model, inputs, method, keep, **chosen)
    got = output.logits
    cuts = stats.cuts
    is_kept = check_survivors(cuts, inputs, family, model)
    with reduced(family, model, cuts, is_kept.shape[1]):
        want = model(**inputs).logits
    close(got[is_kept], want[is_kept])
    # Hidden states of dropped tokens are zeros before the head.
    dropped = inputs["attention_mask"].bool() & ~is_kept
    dropped_logits = model.get_output_embeddings()(torch.zeros(model.config.get_text_config().hidden_size))
    assert torch.equal(got[dropped], dropped_logits.expand_as(got[dropped]))


@pytest.mark.each_kind
@pytest.mark.pairwise
@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize(("family", "batch"), CASES)
def test_forward(method: str, family: Family, batch: str, build) -> None:
    compare_forward(family, build(family), at_the_decoder(method), family.make_inputs(**BATCHES[batch]), 0.3)


VIDEO_BATCHES: dict[str, dict[str, Any]] = {
    "left": {"images": (1, 0), "video": (5, 5)},
    "right": {"images": (0, 2), "video": (2, 2), "padding": "right"},
    "one frame": {"images": (0,), "video": 1},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("method", VIDEO_METHODS)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.video])
@pytest.mark.parametrize("batch", VIDEO_BATCHES)
def test_forward_of_videos(method: str, name: str, batch: str, build) -> None:
    family = FAMILIES[name]
    compare_forward(family, build(family), method, family.make_inputs(**VIDEO_BATCHES[batch]), 0.3)


@pytest.mark.parametrize("method", VIDEO_METHODS)
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.video])
def test_generate_of_videos(method: str, name: str, build) -> None:
    check_generate(method, FAMILIES[name], build(FAMILIES[name]), {"images": (1, 0), "video": (5, 5)})


@pytest.mark.pairwise
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("method", [m for m in MODEL_METHODS if choose_layer(m, 1)])
def test_other_layers(method: str, layer: int, family: Family, model) -> None:
    compare_forward(family, model, method, family.make_inputs(images=(1, 2)), 0.2, layer=layer)


@pytest.mark.pairwise
@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize("batch", ["ragged", "one row"])
def test_generate(method: str, family: Family, model, batch: str) -> None:
    check_generate(method, family, model, BATCHES[batch])


def check_generate(method: str, family: Family, model: Any, batch: dict[str, Any]) -> None:
    inputs = family.make_inputs(**batch)
    with tokenprune.patched(model, at_the_decoder(method), keep=0.3, record=True):
        got, tokens, _ = generate_logits(model, inputs, 4)
        cuts = tokenprune.stats(model).cuts
    check_survivors(cuts, inputs, family, model)
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(model, inputs, 4, tokens=tokens)
    # With right padding, transformers reads the first logits at the padding, which was dropped.
    is_valid = inputs["attention_mask"][:, -1].bool()
    close(got[is_valid], want[is_valid])
    close(got[:, 1:], want[:, 1:])


@pytest.mark.pairwise
@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("batch", ["right", "text beside", "no padding"])
def test_generate_other_batches(method: str, family: Family, model, batch: str) -> None:
    test_generate(method, family, model, batch)


def test_the_oracle_detects_errors(family: Family, model) -> None:
    """The comparison fails without a mask, with a cut one layer later, and with one token less."""
    inputs = family.make_inputs(images=(2, 1))
    length = inputs["input_ids"].shape[1]
    with tokenprune.patched(model, "fastv", keep=0.3, record=True):
        got, tokens, _ = generate_logits(model, inputs, 3)
        (cut,) = tokenprune.stats(model).cuts
    unmasked, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    cut.layer += 1
    with reduced(family, model, [cut], length):
        late, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    cut.layer -= 1
    cut.kept[0] = cut.kept[0][:1] + cut.kept[0][2:]
    with reduced(family, model, [cut], length):
        short, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    for other in (unmasked, late, short):
        with pytest.raises(AssertionError):
            close(got, other)
        assert (got - other).abs().max() > 1e-3
