# SPDX-License-Identifier: Apache-2.0
"""`downsample` with a number of tokens, and `max_visual_tokens=`: no image makes more, and smaller images stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from each import each
from processors import COUNTED, LIMITS, asked, demo_model, llava, photo
from tokenprune import (
    BudgetError,
    OptionError,
    TokenPruneError,
    UnsupportedSetupError,
    count_visual_tokens,
    patch_processor,
    unpatch_processor,
)
from tokenprune.cli.common import read_settings
from tokenprune.models.token_counts import find_rule

CONFIG = {"method": "divprune", "keep": 0.5}


@pytest.mark.parametrize("most", [64, 1, 5000])
@torch.no_grad()
def test_alone_it_is_downsample_with_a_number(most: int) -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, "downsample", keep=tokenprune.Budget(tokens=most), processor=processor):
        inputs = asked(processor, photo(300, 200))
        wanted, tokens = model(**inputs).logits, tokenprune.stats(model).visual_tokens_in
    whole = asked(processor, photo(300, 200))
    assert tokenprune.patch(model, max_visual_tokens=most, processor=processor) is model
    again = asked(processor, photo(300, 200))
    assert all(torch.equal(again[name], inputs[name]) for name in inputs)
    assert torch.equal(model(**again).logits, wanted)
    assert tokenprune.stats(model).visual_tokens_in == tokens
    assert int((again["input_ids"] == model.config.image_token_id).sum()) == (256 if most > 256 else most)
    tokenprune.unpatch(model)
    back = asked(processor, photo(300, 200))
    assert all(torch.equal(back[name], whole[name]) for name in whole)


@torch.no_grad()
def test_in_front_of_a_method_the_smaller_image_is_pruned() -> None:
    model, processor = demo_model(), llava()
    tokenprune.patch(model, "divprune", keep=0.25, max_visual_tokens=64, processor=processor, record=True)
    inputs = asked(processor, photo(300, 200))
    found, stats = model(**inputs).logits, tokenprune.stats(model)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 64
    assert stats.visual_tokens_out == 16
    kept = stats.cuts[-1].kept[0]
    tokenprune.unpatch(model)
    # The masked oracle: the model as it is, on the smaller image, with the tokens that left hidden.
    with tokenprune.patched(model, max_visual_tokens=64, processor=processor):
        mask = torch.zeros_like(inputs["input_ids"])
        mask[0, kept] = 1
        positions = torch.arange(mask.shape[1])[None]
        oracle = model(**inputs | {"attention_mask": mask}, position_ids=positions).logits
    assert len(kept) == int(mask.sum()) == mask.shape[1] - 48
    torch.testing.assert_close(found[0, -1], oracle[0, -1], atol=1e-4, rtol=0)


def test_the_default_method_follows_where_only_keep_is_given() -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, keep=0.5, max_visual_tokens=64, processor=processor):
        lines = repr(model)
    assert "keep=64" in lines and "keep=0.5" in lines and "divprune()" in lines


@each(
    ("given", "error", "says"),
    [
        ({"max_visual_tokens": 0}, BudgetError, "must be a number of tokens"),
        ({"max_visual_tokens": 0.25}, BudgetError, "Pass a share as keep="),
        ({"max_visual_tokens": True}, BudgetError, "must be a number of tokens"),
        ({"max_visual_tokens": "64"}, BudgetError, "must be a number of tokens"),
        ({"max_visual_tokens": 64, "method": "downsample", "keep": 0.5}, OptionError, "Leave out one"),
        ({"max_visual_tokens": 64, "method": ["dynres", "divprune"]}, OptionError, "and so does dynres"),
        ({"max_visual_tokens": 64, "config": CONFIG}, OptionError, "Pass either config="),
        ({"config": CONFIG | {"max_visual_tokens": 0}}, BudgetError, "must be a number of tokens"),
        ({"config": CONFIG | {"max_visual_tokens": None}}, BudgetError, "must be a number of tokens"),
        ({"config": {"max_visual_tokens": 64, "keep": 0.5}}, OptionError, "names no method"),
        ({"config": {"max_visual_tokens": 64, "method": "dynres"}}, OptionError, "and so does dynres"),
        ({"max_visual_tokens": 64, "processor": None}, TokenPruneError, "processor"),
    ],
)
def test_what_it_cannot_be_is_refused_and_nothing_changes(given: dict, error: type, says: str) -> None:
    model, processor = demo_model(), llava()
    before = asked(processor, photo(300, 200))
    with pytest.raises(error, match=says):
        tokenprune.patch(model, **{"processor": processor} | given)
    assert not tokenprune.is_patched(model)
    after = asked(processor, photo(300, 200))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("rest", [{}, CONFIG, {"method": ["divprune", "fastv"], "keep": [0.5, 0.25]}])
def test_a_config_holds_it(rest: dict) -> None:
    model, processor = demo_model(), llava()
    setting = tokenprune.Setting.from_json({"max_visual_tokens": 64} | rest)
    assert tokenprune.Setting.from_json(setting.to_json()) == setting and setting.max_visual_tokens == 64
    with tokenprune.patched(model, config=setting.to_json(), processor=processor):
        described, inputs = repr(model), asked(processor, photo(300, 200))
    names = rest.get("method")
    methods = [tokenprune.method(name) for name in names] if isinstance(names, list) else names
    with tokenprune.patched(model, methods, keep=rest.get("keep"), max_visual_tokens=64, processor=processor):
        assert repr(model) == described
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 64


def test_layers_of_settings_merge_it() -> None:
    read = tokenprune.Setting.from_json
    server, profile = read(CONFIG | {"max_visual_tokens": 64}), read({"keep": 0.25})
    merged = profile.merge_onto(server)
    assert merged.to_json() == {"method": "divprune", "keep": 0.25, "max_visual_tokens": 64}
    other = read({"max_visual_tokens": 16}).merge_onto(server)
    assert other.to_json() == CONFIG | {"max_visual_tokens": 16}
    assert read({"max_visual_tokens": 16}) != read({"max_visual_tokens": 17})
    assert (merged.joint_keep, other.joint_keep, read({"max_visual_tokens": 16}).joint_keep) == (16, 8, 16)
    assert merged.names == ("divprune",) and merged.all_names == ("downsample", "divprune")


def test_a_processor_alone_takes_it() -> None:
    one, other = Qwen2VLImageProcessor(**LIMITS), Qwen2VLImageProcessor(**LIMITS)
    tokenprune.patch_processor(one, max_visual_tokens=24)
    tokenprune.patch_processor(other, "downsample", keep=24)
    made = [processor(photo(190, 190))["pixel_values"] for processor in (one, other)]
    assert torch.equal(*made)
    plain: Any = Qwen2VLImageProcessor(**LIMITS)
    for given in ({"method": "dynres"}, {"keep": 0.5}):
        with pytest.raises(OptionError, match="leave out keep= and other methods"):
            tokenprune.patch_processor(plain, max_visual_tokens=24, **given)
    with pytest.raises(BudgetError, match="must be a number of tokens"):
        tokenprune.patch_processor(plain, max_visual_tokens=0)
    with pytest.raises((OptionError, UnsupportedSetupError), match="leave"):
        tokenprune.patch_processor(plain, "dynres", max_visual_tokens=24)


@pytest.mark.parametrize(
    ("methods", "keep", "names", "keeps"),
    [
        ("", "0.25", ["downsample"], [64]),
        ("divprune", "0.25", ["downsample", "divprune"], [64, 0.25]),
        ("divprune+fastv", "0.5+0.25", ["downsample", "divprune", "fastv"], [64, 0.5, 0.25]),
        ("divprune+fastv", "0.5", ["downsample", "divprune", "fastv"], [64, 0.5, 0.5]),
    ],
)
def test_the_command_line_puts_it_in_front(methods: str, keep: str, names: list[str], keeps: list[Any]) -> None:
    (setting,) = read_settings(methods, keep, 64)
    made, budgets = setting.steps()
    assert [method.name for method in made] == names and [budget.keep for budget in budgets] == keeps


def test_the_command_line_takes_one_token_and_refuses_a_second_limit() -> None:
    (setting,) = read_settings("dart:pivot_text=0", "0.25", 1)
    assert setting.steps()[1][0] == tokenprune.Budget(tokens=1) and "pivot_text=0" in setting.to_text()
    with pytest.raises(OptionError, match="Leave out one"):
        read_settings("downsample", "0.25", 64)
    assert [one.keep for one in read_settings("divprune,dart", "0.5,0.25")] == [0.5, 0.25, 0.5, 0.25]


SIZES = [(190, 190), (64, 150), (150, 33), (30, 20), (400, 330)]


@each("most", [2, 7, 24, 100, 577])
@each("size", SIZES)
def test_qwen_images_make_at_most_so_many(size: tuple[int, int], most: int) -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    whole = processor(photo(*size))
    full = int(whole["image_grid_thw"].prod()) // 4
    patch_processor(processor, "downsample", keep=most)
    made = processor(photo(*size))
    tokens = int(made["image_grid_thw"].prod()) // 4
    assert tokens <= most
    if full <= most:
        assert torch.equal(made["pixel_values"], whole["pixel_values"])
    else:
        rows = int(made["image_grid_thw"][0, 1:].min()) // 2
        assert tokens > most - 2 * rows - 2, "a row and a column more would still fit"


RESIZED = [name for name in COUNTED if find_rule(COUNTED[name].make()).limit is None]  # type: ignore[union-attr]


@each("name", [*RESIZED, "Lfm2VlImageProcessor"])
def test_other_processors_make_at_most_so_many(name: str) -> None:
    """Every row of the table without a setting of its own: the most tokens of a smaller image within the budget."""
    case = COUNTED[name]
    processor = case.make()
    for size in SIZES[:4]:
        image = torch.from_numpy(np.array(photo(*size))).permute(2, 0, 1)
        full = count_visual_tokens(processor, *size)
        least = count_visual_tokens(processor, 1, 1)
        smaller = {(max(1, round(size[0] * k / 64)), max(1, round(size[1] * k / 64))) for k in range(1, 65)}
        counts = {count_visual_tokens(processor, *other) for other in smaller}
        for most in (least, (least + full) // 2, full, full + 1):
            budget = max(2, most)
            patch_processor(processor, keep=budget)
            tokens = case.real(processor, image)
            unpatch_processor(processor)
            assert tokens <= budget and (tokens == full or full > most)
            if name in RESIZED:
                assert tokens >= 0.85 * max((count for count in counts if count <= budget), default=1), (size, budget)


def test_what_no_size_can_give_is_refused() -> None:
    processor = COUNTED["LlavaNextImageProcessor"].make()
    least = count_visual_tokens(processor, 1, 1)
    patch_processor(processor, keep=2)
    with pytest.raises(
        BudgetError, match=f"keep=2 is too small for an image of 64 x 150 pixels. It has at least {least}"
    ):
        processor(photo(64, 150))
    unpatch_processor(processor)


@pytest.mark.parametrize(("most", "side"), [(64, 8), (80, 8), (255, 15), (256, 16), (5000, 16)])
@torch.no_grad()
def test_a_fixed_size_shrinks_to_a_square_that_fits(most: int, side: int) -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, "downsample", keep=most, processor=processor):
        inputs = asked(processor, photo(300, 200))
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == side**2
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == side**2
    foreign = asked(llava(), photo(300, 200))
    with tokenprune.patched(model, "downsample", keep=most, processor=processor):
        if side == 16:
            model(**foreign)
        else:
            with pytest.raises(UnsupportedSetupError, match="were not resized"):
                model(**foreign)


def test_what_means_nothing_is_refused(build: Any) -> None:
    with pytest.raises(BudgetError, match="dynres does not support"):
        patch_processor(Qwen2VLImageProcessor(**LIMITS), "dynres", keep=64)
