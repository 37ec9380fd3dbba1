# SPDX-License-Identifier: Apache-2.0
"""Rows that hold several samples, as training without padding lays them: refused or noted, never cut as one sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

import tokenprune
from each import each
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.hf.sequence.packing import restarts
from zoo import FAMILIES, Family

ONE_AXIS = ("llava", "internvl", "smolvlm", "gemma3")
SEVERAL_AXES = ("qwen2_5_vl", "qwen3_vl")


def packed(family: Family, **returned: bool) -> dict[str, Any]:
    """Two samples with an image each in one row, as transformers' collator lays them; it drops pixels and types."""
    samples = [family.make_inputs(only=row) for row in range(2)]
    inputs = DataCollatorWithFlattening(**returned)([{"input_ids": one["input_ids"][0]} for one in samples])
    sizes, g = (family.sizes * 2)[:2], torch.Generator().manual_seed(7)
    pixels = family.collate([[family.image(size, g, 1) for size in sizes]])
    if family.types == "token_type_ids":
        inputs["token_type_ids"] = torch.cat([one["token_type_ids"] for one in samples], 1)
    return {name: value for name, value in inputs.items() if name != "labels"} | pixels


def numbered(inputs: dict[str, Any]) -> torch.Tensor:
    """1 at the first sample, 2 at the second."""
    return (inputs["position_ids"] == 0).long().cumsum(-1)


def of_pairs(inputs: dict[str, Any]) -> torch.Tensor:
    sample = numbered(inputs)
    return ((sample[:, None] == sample[:, :, None]) & torch.ones(sample.shape[1:] * 2).tril().bool())[:, None]


# By what the error says: what the collator is asked for, and what is handed over beside.
REFUSED = {
    "position_ids": ({}, lambda inputs: {}),
    "cu_seq_lens_q and cu_seq_lens_k": (dict(return_flash_attn_kwargs=True), lambda inputs: {}),
    "seq_idx": (dict(return_seq_idx=True), lambda inputs: {}),
    "attention_mask with numbers": ({}, lambda inputs: {"attention_mask": numbered(inputs)}),
    "attention_mask of pairs": ({}, lambda inputs: {"attention_mask": of_pairs(inputs)}),
}


def given(family: Family, by: str) -> dict[str, Any]:
    returned, change = REFUSED[by]
    inputs = packed(family, **returned)
    inputs |= change(inputs)
    if family.name in SEVERAL_AXES:  # borders stand in a text axis before the three
        inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
    return inputs


@pytest.mark.pairwise
@pytest.mark.parametrize("by", REFUSED)
@pytest.mark.parametrize("method", ["divprune", "fastv", "tome"])
@pytest.mark.parametrize("name", [*ONE_AXIS, *SEVERAL_AXES])
@torch.no_grad()
def test_a_cut_of_packed_rows_is_refused_by_name(name: str, method: str, by: str, build) -> None:
    """The argument is named; where nothing is cut, the call is left as it is, to the bit."""
    family = FAMILIES[name]
    if (name, by) == ("gemma3", "attention_mask of pairs"):
        pytest.skip("Gemma 3 makes its masks of token types")
    model, inputs = build(family), given(family, by)
    want = model(**inputs).logits
    with tokenprune.patched(model, method, keep=0.5):
        with pytest.raises(UnsupportedSetupError, match=by) as refused:
            model(**inputs)
        assert "a row of its own" in str(refused.value) and "padding_free=False" in str(refused.value)
    for keep in (1.0, 5000):
        if method != "tome" or keep == 1.0:
            with tokenprune.patched(model, method, keep=keep):
                assert torch.equal(model(**inputs).logits, want)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@torch.no_grad()
def test_packed_text_is_left_alone(name: str, build) -> None:
    family = FAMILIES[name]
    model = build(family)
    inputs = packed(family, return_flash_attn_kwargs=True)
    text = {name: value for name, value in inputs.items() if not name.startswith(("pixel", "image"))}
    text["input_ids"] = text["input_ids"].clamp(min=20)
    want = model(**text).logits
    with tokenprune.patched(model, "divprune", keep=0.3):
        assert torch.equal(model(**text).logits, want) and not tokenprune.stats(model).notes


@pytest.mark.parametrize("name", ["llava", "smolvlm", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("how", ["2-D positions", "three axes", "a mask of ones"])
@torch.no_grad()
def test_positions_that_tell_no_borders_are_noted(name: str, how: str, build, caplog) -> None:
    """transformers mixes the samples there, too: it reads borders off a text axis of M-RoPE, and beside no mask."""
    family = FAMILIES[name]
    if name not in SEVERAL_AXES and how != "a mask of ones":
        pytest.skip("positions of this model have one axis")
    model, inputs = build(family), packed(family)
    if how == "three axes":
        inputs["position_ids"] = inputs["position_ids"].expand(3, 1, -1)
    if how == "a mask of ones":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with tokenprune.patched(model, "divprune", keep=0.3):
        for _ in range(2):
            model(**inputs)
            (note,) = tokenprune.stats(model).notes
            assert "counts as one sample" in note and ("text axis", "attention mask")[how[0] == "a"] in note
    assert [record.getMessage() for record in caplog.records] == [note]  # once


def places(mask: torch.Tensor, fill: int) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, fill)


@each("name", ["llava", "smolvlm", "gemma3", "qwen2_5_vl"])
@each("padding", ["left", "right"])
@each("fill", [0, 1])
@torch.no_grad()
def test_padding_is_no_border(name: str, padding: str, fill: int, build, caplog) -> None:
    """Positions of padding may be any, in a batch of rows of different lengths."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1), padding=padding)
    positions = places(inputs["attention_mask"], fill)
    if name in SEVERAL_AXES:
        positions = positions.expand(4, *positions.shape)
    with tokenprune.patched(model, "divprune", keep=0.3):
        model(**inputs, position_ids=positions)
        assert not tokenprune.stats(model).notes
    assert not caplog.records


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_generate_makes_no_borders(name: str, cache: str | None, caplog) -> None:
    """Nor the masks of pairs that it makes ahead for a static cache."""
    family = FAMILIES[name]
    model = family.build()
    with tokenprune.patched(model, "divprune", keep=0.3):
        for inputs in (family.make_inputs(images=(2, 1)), family.make_inputs(only=0)):
            model.generate(**inputs, max_new_tokens=2, cache_implementation=cache)
            assert not tokenprune.stats(model).notes
    assert not [one for one in caplog.records if one.name == "tokenprune"]


@torch.no_grad()
def test_a_video_is_no_border(build) -> None:
    """Behind a video the time axis falls back, and the others do not."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(rows=1, images=(0,), video=20)
    positions, _ = model.model.get_rope_index(**{name: inputs[name] for name in inputs if "pixel" not in name})
    assert (positions[0].diff() < 0).any()
    with tokenprune.patched(model, "divprune", keep=0.3):
        model(**inputs, position_ids=positions)
        assert not tokenprune.stats(model).notes


@each(
    ("row", "wanted"),
    [
        ([0, 1, 2, 0, 1, 2, 3], True),
        ([5, 6, 5, 6], True),  # from another start
        ([0, 1, 2, 0, 0, 1], True),  # a sample of one token between
        ([0, 1, 2, 3, 4, 5], False),
        ([0, 3, 9, 27], False),  # times
        ([0, 1, 1, 1, 2, 3], False),  # an image at one position
        ([1, 1, 1, 0, 1, 2], False),  # padding ahead,
        ([0, 1, 2, 1, 1], False),  # and behind
        ([0], False),
    ],
)
def test_where_positions_begin_anew(row: list[int], wanted: bool) -> None:
    positions = torch.tensor(row)
    assert restarts(positions[None]) is wanted
    assert restarts(positions.expand(4, 1, -1)) is wanted
    assert restarts(torch.stack([torch.arange(len(row)), positions])) is wanted  # any row of a batch
    # One axis alone falls.
    assert not restarts(torch.stack([torch.arange(len(row)), positions])[:, None])
    assert not restarts(positions[None], torch.zeros(1, len(row), dtype=torch.bool))
