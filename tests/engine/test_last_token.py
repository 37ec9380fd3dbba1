# SPDX-License-Identifier: Apache-2.0
"""A prompt that ends with a visual token: where a cut removes it, there is no output to go on from, and it is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import tokenprune
from tokenprune import Method, Selection, Site, VisualTokens
from zoo import FAMILIES, IMAGE, Inputs


@dataclass(frozen=True)
class OneEnd(Method):
    """Keeps the visual tokens of one end of an image."""

    name: ClassVar[str] = "one_end"
    site: ClassVar[Site] = Site.IN_LLM
    layer: int = 2
    last: bool = False

    def select(self, tokens: VisualTokens) -> Selection:
        place = torch.arange(tokens.mask.shape[1]).expand_as(tokens.mask).float()
        return Selection.top(place if self.last else -place, tokens)


def ending_in_images(rows: tuple[bool, ...]) -> Inputs:
    """A batch of one image a row, padded on the right; the rows that are told to end with it."""
    inputs = FAMILIES["llava"].make_inputs(images=[1] * len(rows), padding="right")
    for row, ends in enumerate(rows):
        if ends:
            last = int((inputs["input_ids"][row] == IMAGE).nonzero().max())
            inputs["attention_mask"][row, last + 1 :] = 0
            inputs["input_ids"][row, last + 1 :] = 0
    return inputs


@pytest.mark.parametrize(
    ("rows", "last", "keep", "lost"),
    [
        ((True,), False, 0.5, "row 0"),
        ((False, True), False, 0.5, "row 1"),
        ((True, True), False, 0.5, "row 0, 1"),
        ((True, True), True, 0.5, None),
        ((True,), False, 1.0, None),
        ((False, False), False, 0.5, None),
    ],
)
@torch.no_grad()
def test_an_output_of_zero_is_said(rows: tuple[bool, ...], last: bool, keep: float, lost: str | None, build) -> None:
    model, inputs = build(FAMILIES["llava"]), ending_in_images(rows)
    ends = inputs["attention_mask"].sum(1) - 1
    with tokenprune.patched(model, OneEnd(last=last), keep=keep):
        logits = model(**inputs).logits
        notes = tokenprune.stats(model).notes
        assert tokenprune.stats(model).notes == notes and len(notes) == (lost is not None), "said once"
    zero = [row for row, end in enumerate(ends.tolist()) if not logits[row, end].any()]
    assert zero == ([] if lost is None else [int(row) for row in lost.removeprefix("row ").split(", ")])
    assert lost is None or f"({lost})" in notes[0]


@torch.no_grad()
def test_generate_says_it_too(build) -> None:
    model = build(FAMILIES["llava"])
    inputs = ending_in_images((True,))
    real = int(inputs["attention_mask"].sum())
    inputs["input_ids"], inputs["attention_mask"] = (inputs[name][:, :real] for name in ("input_ids", "attention_mask"))
    with tokenprune.patched(model, OneEnd(), keep=0.5):
        model.generate(**inputs, max_new_tokens=3)
        assert ["end the prompt with text" in note for note in tokenprune.stats(model).notes] == [True]
