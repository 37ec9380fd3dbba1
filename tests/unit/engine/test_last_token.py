# SPDX-License-Identifier: Apache-2.0
"""A visual token that ends the prompt is always kept, because generation continues from its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import tokenprune
from basics import pieces
from each import each
from oracle import close, reduced, survivors
from pruned import check_generation, run_pruned
from tokenprune import Pruner, Selection, Site, VisualTokens
from zoo import FAMILIES, IMAGE, Inputs


@dataclass(frozen=True)
class OneEnd(Pruner):
    """Keeps the visual tokens at one end of an image; optionally merges the others into the first kept token."""

    name: ClassVar[str] = "one_end"
    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 2
    last: bool = False
    merge: bool = False

    def select(self, tokens: VisualTokens) -> Selection:
        index = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
        selection = Selection.top((index if self.last else -index).float(), tokens)
        if not self.merge:
            return selection
        first = selection.keep.to(torch.uint8).argmax(1, keepdim=True)
        assign = torch.where(selection.keep, index, first).masked_fill(~tokens.mask, -1)
        return Selection(selection.keep, assign, counts=tokens.keep)


@dataclass(frozen=True)
class Entry(OneEnd):
    """OneEnd at the decoder's entry."""

    site: ClassVar[Site] = Site.PRE_LLM


@dataclass(frozen=True)
class DropAll(Pruner):
    """Drops all tokens of every image."""

    name: ClassVar[str] = "drop_all"
    site: ClassVar[Site] = Site.IN_LLM
    min_tokens: ClassVar[int] = 0
    layer: int = 2

    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(torch.zeros_like(tokens.mask), counts=[0] * len(tokens.counts))


def make_image_endings(rows: tuple[bool, ...], family: str = "llava", images: int = 1) -> Inputs:
    """Return a right-padded batch of images, with an image at the end of the marked rows."""
    inputs = FAMILIES[family].make_inputs(images=[images] * len(rows), padding="right")
    for row, ends in enumerate(rows):
        if ends:
            last = int((inputs["input_ids"][row] == IMAGE).nonzero().max())
            inputs["attention_mask"][row, last + 1 :] = 0
            inputs["input_ids"][row, last + 1 :] = 0
            if "mm_token_type_ids" in inputs:
                inputs["mm_token_type_ids"][row, last + 1 :] = 0
    return inputs


def run_cuts(model: Any, method: Any, inputs: Any, keep: Any) -> tuple[Any, list]:
    output, stats = run_pruned(model, inputs, method, keep)
    assert stats.notes == []
    return output.logits, stats.cuts


@pytest.mark.parametrize("method", [OneEnd(), Entry(), OneEnd(merge=True), Entry(merge=True), "dart", "random", "pool"])
@each("rows", [(True,), (False, True), (True, True, False)])
@each("keep", [tokenprune.Budget(tokens=1), 0.5])
@torch.no_grad()
def test_the_last_token_stays(rows: tuple[bool, ...], method: Any, keep: Any, build) -> None:
    """It replaces another kept token: counts are unchanged, and outputs equal the masked model."""
    family = FAMILIES["llava"]
    model, inputs = build(family), make_image_endings(rows, images=2)
    ends = (inputs["attention_mask"].sum(1) - 1).tolist()
    logits, cuts = run_cuts(model, method, inputs, keep)
    for row, end in enumerate(ends):
        assert end in cuts[-1].kept[row] and logits[row, end].any()
        for piece in pieces(family, inputs)[row]:
            num_kept = 1 if keep == tokenprune.Budget(tokens=1) else round(keep * len(piece))
            assert len(set(piece) & set(cuts[-1].kept[row])) == num_kept
    is_kept = survivors(cuts[-1], inputs["input_ids"].shape[1])
    with reduced(family, model, cuts, is_kept.shape[1]):
        close(logits[is_kept], model(**inputs).logits[is_kept])


@torch.no_grad()
def test_last_token_replaces_the_nearest_kept_token(build) -> None:
    """It replaces the nearest kept token, or the token that would absorb its cluster."""
    family = FAMILIES["llava"]
    model, inputs = build(family), make_image_endings((True, False))
    (last_image,), (inner_image,) = pieces(family, inputs)
    (cut,) = run_cuts(model, OneEnd(), inputs, 10)[1]
    assert sorted(set(cut.kept[0]) & set(last_image)) == [*last_image[:9], last_image[-1]]
    assert sorted(set(cut.kept[1]) & set(inner_image)) == inner_image[:10]
    (cut,) = run_cuts(model, OneEnd(merge=True), inputs, 10)[1]
    assert sorted(set(cut.kept[0]) & set(last_image)) == [*last_image[1:10], last_image[-1]]
    assert sorted(cut.sources[0][last_image[-1]]) == [last_image[0], *last_image[10:]]
    assert sorted(set(cut.kept[1]) & set(inner_image)) == inner_image[:10]


@torch.no_grad()
def test_selection_with_the_last_token_is_unchanged(build) -> None:
    model, inputs = build(FAMILIES["llava"]), make_image_endings((True,))
    ((piece,),) = pieces(FAMILIES["llava"], inputs)
    for merge in (False, True):
        (cut,) = run_cuts(model, OneEnd(last=True, merge=merge), inputs, 10)[1]
        assert sorted(set(cut.kept[0]) & set(piece)) == piece[-10:]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("method", [OneEnd(), Entry(merge=True), "vscan"], ids=["inside", "merging", "vscan"])
@torch.no_grad()
def test_generate_continues_from_the_last_token(name: str, method: Any, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), make_image_endings((True,), name)
    length = int(inputs["attention_mask"].sum())
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if key in inputs:
            inputs[key] = inputs[key][:, :length]
    got, _, stats = check_generation(family, model, inputs, method, 0.5)
    assert got[:, 0].any() and all(length - 1 in cut.kept[0] for cut in stats.cuts)


@torch.no_grad()
def test_last_token_of_a_later_turn(build) -> None:
    model, inputs = build(FAMILIES["llava"]), make_image_endings((True,))
    length = int(inputs["attention_mask"].sum())
    past_ids = torch.arange(20, 32)[None]
    with tokenprune.patched(model, OneEnd(), keep=0.5, record=True):
        past = model(past_ids, use_cache=True).past_key_values
        mask = torch.ones(1, 12 + length, dtype=torch.long)
        out = model(
            input_ids=inputs["input_ids"][:, :length], pixel_values=inputs["pixel_values"], attention_mask=mask,
            past_key_values=past,
        )  # fmt: skip
        assert 12 + length - 1 in tokenprune.stats(model).cuts[-1].kept[0]
    assert out.logits[0, -1].any()


@torch.no_grad()
def test_dropped_image_at_the_end_is_noted(build) -> None:
    """The output of the dropped last token is zero, with a single note about it."""
    model, inputs = build(FAMILIES["llava"]), make_image_endings((True, False))
    end = int(inputs["attention_mask"][0].sum()) - 1
    with tokenprune.patched(model, DropAll(), keep=0.5):
        logits = model(**inputs).logits
        notes = tokenprune.stats(model).notes
        assert tokenprune.stats(model).notes == notes and len(notes) == 1 and "(row 0)" in notes[0]
    assert not logits[0, end].any()
