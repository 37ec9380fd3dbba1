# SPDX-License-Identifier: Apache-2.0
"""A prompt that ends with a visual token: that token stays, so that there is an output to go on from."""

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
    """Keeps the visual tokens of one end of an image; merges the others into the first that it keeps, if told to."""

    name: ClassVar[str] = "one_end"
    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 2
    last: bool = False
    merge: bool = False

    def select(self, tokens: VisualTokens) -> Selection:
        place = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask)
        selection = Selection.top((place if self.last else -place).float(), tokens)
        if not self.merge:
            return selection
        first = selection.keep.to(torch.uint8).argmax(1, keepdim=True)
        assign = torch.where(selection.keep, place, first).masked_fill(~tokens.mask, -1)
        return Selection(selection.keep, assign, counts=tokens.keep)


@dataclass(frozen=True)
class Entry(OneEnd):
    """The same at the decoder's entry."""

    site: ClassVar[Site] = Site.PRE_LLM


@dataclass(frozen=True)
class Nothing(Pruner):
    """Withdraws every image."""

    name: ClassVar[str] = "nothing"
    site: ClassVar[Site] = Site.IN_LLM
    min_tokens: ClassVar[int] = 0
    layer: int = 2

    def select(self, tokens: VisualTokens) -> Selection:
        return Selection(torch.zeros_like(tokens.mask), counts=[0] * len(tokens.counts))


def ending_in_images(rows: tuple[bool, ...], family: str = "llava", images: int = 1) -> Inputs:
    """A batch of images, padded on the right; the rows that are told to end with one."""
    inputs = FAMILIES[family].make_inputs(images=[images] * len(rows), padding="right")
    for row, ends in enumerate(rows):
        if ends:
            last = int((inputs["input_ids"][row] == IMAGE).nonzero().max())
            inputs["attention_mask"][row, last + 1 :] = 0
            inputs["input_ids"][row, last + 1 :] = 0
            if "mm_token_type_ids" in inputs:
                inputs["mm_token_type_ids"][row, last + 1 :] = 0
    return inputs


def kept_of(model: Any, method: Any, inputs: Any, keep: Any) -> tuple[Any, list]:
    output, stats = run_pruned(model, inputs, method, keep)
    assert stats.notes == []
    return output.logits, stats.cuts


@pytest.mark.parametrize("method", [OneEnd(), Entry(), OneEnd(merge=True), Entry(merge=True), "dart", "random", "pool"])
@each("rows", [(True,), (False, True), (True, True, False)])
@each("keep", [tokenprune.Budget(tokens=1), 0.5])
@torch.no_grad()
def test_the_last_token_stays(rows: tuple[bool, ...], method: Any, keep: Any, build) -> None:
    """In place of another: counts are what they were, and outputs those of the model with the rest masked."""
    family = FAMILIES["llava"]
    model, inputs = build(family), ending_in_images(rows, images=2)
    ends = (inputs["attention_mask"].sum(1) - 1).tolist()
    logits, cuts = kept_of(model, method, inputs, keep)
    for row, end in enumerate(ends):
        assert end in cuts[-1].kept[row] and logits[row, end].any()
        for piece in pieces(family, inputs)[row]:
            wanted = 1 if keep == tokenprune.Budget(tokens=1) else round(keep * len(piece))
            assert len(set(piece) & set(cuts[-1].kept[row])) == wanted
    alive = survivors(cuts[-1], inputs["input_ids"].shape[1])
    with reduced(family, model, cuts, alive.shape[1]):
        close(logits[alive], model(**inputs).logits[alive])


@torch.no_grad()
def test_it_takes_the_place_of_its_neighbour(build) -> None:
    """Or of the token that would absorb it, whose cluster stays together."""
    family = FAMILIES["llava"]
    model, inputs = build(family), ending_in_images((True, False))
    (ends,), (other,) = pieces(family, inputs)
    (cut,) = kept_of(model, OneEnd(), inputs, 10)[1]
    assert sorted(set(cut.kept[0]) & set(ends)) == [*ends[:9], ends[-1]]
    assert sorted(set(cut.kept[1]) & set(other)) == other[:10]
    (cut,) = kept_of(model, OneEnd(merge=True), inputs, 10)[1]
    assert sorted(set(cut.kept[0]) & set(ends)) == [*ends[1:10], ends[-1]]
    assert sorted(cut.sources[0][ends[-1]]) == [ends[0], *ends[10:]]
    assert sorted(set(cut.kept[1]) & set(other)) == other[:10]


@torch.no_grad()
def test_a_choice_that_keeps_it_is_left_alone(build) -> None:
    model, inputs = build(FAMILIES["llava"]), ending_in_images((True,))
    ((piece,),) = pieces(FAMILIES["llava"], inputs)
    for merge in (False, True):
        (cut,) = kept_of(model, OneEnd(last=True, merge=merge), inputs, 10)[1]
        assert sorted(set(cut.kept[0]) & set(piece)) == piece[-10:]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("method", [OneEnd(), Entry(merge=True), "vscan"], ids=["inside", "merging", "vscan"])
@torch.no_grad()
def test_generate_goes_on_from_it(name: str, method: Any, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), ending_in_images((True,), name)
    real = int(inputs["attention_mask"].sum())
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if key in inputs:
            inputs[key] = inputs[key][:, :real]
    got, _, stats = check_generation(family, model, inputs, method, 0.5)
    assert got[:, 0].any() and all(real - 1 in cut.kept[0] for cut in stats.cuts)


@torch.no_grad()
def test_the_end_of_a_turn_that_a_cache_goes_before(build) -> None:
    model, inputs = build(FAMILIES["llava"]), ending_in_images((True,))
    real = int(inputs["attention_mask"].sum())
    early = torch.arange(20, 32)[None]
    with tokenprune.patched(model, OneEnd(), keep=0.5, record=True):
        past = model(early, use_cache=True).past_key_values
        mask = torch.ones(1, 12 + real, dtype=torch.long)
        out = model(
            input_ids=inputs["input_ids"][:, :real], pixel_values=inputs["pixel_values"], attention_mask=mask,
            past_key_values=past,
        )  # fmt: skip
        assert 12 + real - 1 in tokenprune.stats(model).cuts[-1].kept[0]
    assert out.logits[0, -1].any()


@torch.no_grad()
def test_a_withdrawn_image_at_the_end_is_said(build) -> None:
    """Nothing is left that could stay: the output is zero, and the statistics say so, once."""
    model, inputs = build(FAMILIES["llava"]), ending_in_images((True, False))
    end = int(inputs["attention_mask"][0].sum()) - 1
    with tokenprune.patched(model, Nothing(), keep=0.5):
        logits = model(**inputs).logits
        notes = tokenprune.stats(model).notes
        assert tokenprune.stats(model).notes == notes and len(notes) == 1 and "(row 0)" in notes[0]
    assert not logits[0, end].any()
