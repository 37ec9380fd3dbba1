# SPDX-License-Identifier: Apache-2.0
"""Budgets by age: `Budget.by_age(..., ((0, 1.0), (2, 0.5)), step=4)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenprune
from each import each
from oracle import close
from pruned import check_forward
from tokenprune import Budget, BudgetError
from tokenprune.budgets.by_age import apply_ages, compute_ages
from zoo import FAMILIES, Family

AGE = ((0, 1.0), (1, 0.5), (3, 2))
# tiles or images side by side, M-RoPE, a newline after each row
NAMES = ("llava", "qwen2_5_vl", "llava_onevision", "internvl")


def count_kept_naively(count: int, index: int, images: int, keep: float, step: int) -> int:
    """Return the number of tokens that image `index` of `images` keeps, as in the docstring of `Budget`."""
    num_images_in_steps = images
    while num_images_in_steps % step:
        num_images_in_steps -= 1
    age = max(0, num_images_in_steps - (index + 1))
    newest_count = max(1, round(count * keep))
    if age >= 3:
        return min(2, max(1, round(newest_count * 0.5)))
    return max(1, round(newest_count * 0.5)) if age >= 1 else newest_count


def list_kept(model: Any, inputs: Any) -> list[list[int]]:
    with torch.no_grad():
        model(**inputs)
    cuts = tokenprune.stats(model).cuts
    return cuts[0].kept if cuts else [list(range(inputs["input_ids"].shape[1]))] * len(inputs["input_ids"])


def count_per_image(family: Family, model: Any, inputs: Any, row: int, indices: list[int]) -> list[int]:
    """Return the number of given token indices in each image of a row."""
    visual = family.visual_mask(model, inputs)[row].nonzero().flatten().tolist()
    counts, start = [], 0
    for count in family.visual_counts(model, inputs)[row]:
        counts.append(len(set(indices) & set(visual[start : start + count])))
        start += count
    return counts


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_older_images_of_each_row_keep_fewer_tokens(name: str, step: int, build: Any) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(5, 1, 4))
    with tokenprune.patched(model, "divprune", keep=Budget.by_age(0.8, AGE, step=step), record=True):
        rows = list_kept(model, inputs)
        out = tokenprune.stats(model).visual_tokens_out
    expected = [
        [count_kept_naively(count, index, len(counts), 0.8, step) for index, count in enumerate(counts)]
        for counts in family.visual_counts(model, inputs)
    ]
    assert [count_per_image(family, model, inputs, row, indices) for row, indices in enumerate(rows)] == expected
    assert out == sum(map(sum, expected))
    assert any(len(set(row_counts)) > 1 for row_counts in expected)


@pytest.mark.parametrize("name", NAMES)
def test_dropping_by_age_equals_the_masked_model(name: str, build: Any) -> None:
    family = FAMILIES[name]
    check_forward(family, build(family), family.make_inputs(images=(4, 2)), "divprune", Budget.by_age(1.0, AGE))


@torch.no_grad()
def test_earlier_images_are_unchanged_within_a_step(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(rows=1, images=5, padding=None)
    ids = inputs["input_ids"][0]
    counts = family.visual_counts(model, inputs)[0]
    visual = family.visual_mask(model, inputs)[0].nonzero().flatten().tolist()
    ends = [visual[sum(counts[: num_images + 1]) - 1] + 1 for num_images in range(5)]
    grids, pixels = inputs["image_grid_thw"], inputs["pixel_values"]

    def truncate(num_images: int) -> dict[str, Any]:
        patches = int(grids[:num_images].prod(1).sum())
        cut = {
            "input_ids": ids[None, : ends[num_images - 1]],
            "attention_mask": torch.ones(1, ends[num_images - 1]).long(),
        }
        types = {name: inputs[name][:, : ends[num_images - 1]] for name in inputs if name.endswith("type_ids")}
        return cut | types | {"image_grid_thw": grids[:num_images], "pixel_values": pixels[:patches]}

    with tokenprune.patched(model, "divprune", keep=Budget.by_age(1.0, AGE, step=2), record=True):
        kept = {num_images: list_kept(model, truncate(num_images))[0] for num_images in (2, 3, 4)}
        logits = {num_images: model(**truncate(num_images)).logits[0, : ends[1]] for num_images in (2, 3)}
    before = {
        num_images: [token_index for token_index in indices if token_index < ends[1]]
        for num_images, indices in kept.items()
    }
    assert before[2] == before[3] != before[4]
    close(logits[2][before[2]], logits[3][before[3]])


@torch.no_grad()
def test_single_image_or_tier_equals_no_age(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    expected = model(**inputs).logits
    with tokenprune.patched(model, "divprune", keep=Budget.by_age(1.0, AGE)):
        assert torch.equal(model(**inputs).logits, expected)
    single_tier = Budget.by_age(0.5, ((0, 1.0),), step=4)
    assert single_tier == replace(single_tier, per="image") == Budget(keep=0.5)


def test_ages_count_from_the_last_full_step() -> None:
    assert compute_ages(5) == [4, 3, 2, 1, 0] and compute_ages(0) == []
    assert compute_ages(3, 4) == [0, 0, 0] and compute_ages(6, 4) == [3, 2, 1, 0, 0, 0]


def test_counts_do_not_increase_with_age() -> None:
    assert apply_ages([10] * 6, ((0, 1.0), (1, 0.5), (3, 8)), 1) == [5, 5, 5, 5, 5, 10]
    assert apply_ages([1, 1, 4], ((0, 1.0), (1, 0.1)), 1) == [1, 1, 4]


@each(
    ("fields", "message"),
    [
        ({"age": ((1, 0.5),)}, r"starts with \(1, 0.5\)"),
        ({"age": ((0, 0.5),)}, r"starts with \(0, 0.5\)"),
        ({"age": ((0, 1.0), (2, 0.5), (2, 0.25))}, r"ages must increase, but \(2, 0.25\)"),
        ({"age": ((0, 1.0), (1, 0.25), (2, 0.5))}, r"\(2, 0.5\) keeps more than \(1, 0.25\)"),
        ({"age": ((0, 1.0), (2, 64), (8, 128))}, r"\(8, 128\) keeps more than \(2, 64\)"),
        ({"age": ((0, 1.0), (1, 0))}, r"\(1, 0\) must end with a share in \(0, 1\]"),
        ({"age": ((0, 1.0), (1, 1.5))}, r"\(1, 1.5\) must end with"),
        ({"age": ((0, 1.0), (True, 0.5))}, "must start with a number of images"),
        ({"age": 3}, "must be pairs"),
        ({"age": ((0, 1.0, 2),)}, "must be pairs"),
        ({"age": AGE, "step": 0}, "step=0 must be a number of images"),
        ({"step": 2}, "requires age="),
        ({"age": AGE, "per": "prompt"}, 'requires keep= or tokens=, and per="image"'),
        ({"age": AGE, "keep": None, "average_share": 0.5}, "requires keep= or tokens="),
    ],
)
def test_invalid_tiers_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget.from_json(
            {"keep": 0.5} | {name: value for name, value in fields.items() if name != "per"}, fields.get("per", "image")
        )


@pytest.mark.parametrize(
    ("method", "message"),
    [("cdpruner", "reads the question"), ("fastv", "before the language model"), ("vscan", "before the language model"),
     ("tome", "before the language model"), ("downsample", "before the language model")],
)  # fmt: skip
def test_method_that_is_not_prefix_cache_safe_is_rejected(method: str, message: str, build: Any) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(BudgetError, match=message):
        tokenprune.patch(model, method, keep=Budget.by_age(0.5, AGE))
    with pytest.raises(tokenprune.NotPatchedError):
        tokenprune.unpatch(model)
