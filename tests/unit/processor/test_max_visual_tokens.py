# SPDX-License-Identifier: Apache-2.0
"""`downsample` with a token count, and `max_visual_tokens=`. Images within the limit are unchanged."""

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


@pytest.mark.parametrize("max_tokens", [64, 1, 5000])
@torch.no_grad()
def test_max_visual_tokens_equals_downsample_with_a_count(max_tokens: int) -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, "downsample", keep=tokenprune.Budget(tokens=max_tokens), processor=processor):
        inputs = asked(processor, photo(300, 200))
        expected, tokens = model(**inputs).logits, tokenprune.stats(model).visual_tokens_in
    unpatched = asked(processor, photo(300, 200))
    assert tokenprune.patch(model, max_visual_tokens=max_tokens, processor=processor) is model
    inputs_of_limit = asked(processor, photo(300, 200))
    assert all(torch.equal(inputs_of_limit[name], inputs[name]) for name in inputs)
    assert torch.equal(model(**inputs_of_limit).logits, expected)
    assert tokenprune.stats(model).visual_tokens_in == tokens
    assert int((inputs_of_limit["input_ids"] == model.config.image_token_id).sum()) == (
        256 if max_tokens > 256 else max_tokens
    )
    tokenprune.unpatch(model)
    restored = asked(processor, photo(300, 200))
    assert all(torch.equal(restored[name], unpatched[name]) for name in unpatched)


@torch.no_grad()
def test_other_methods_prune_the_smaller_image() -> None:
    model, processor = demo_model(), llava()
    tokenprune.patch(model, "divprune", keep=0.25, max_visual_tokens=64, processor=processor, record=True)
    inputs = asked(processor, photo(300, 200))
    pruned, stats = model(**inputs).logits, tokenprune.stats(model)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 64
    assert stats.visual_tokens_out == 16
    kept = stats.cuts[-1].kept[0]
    tokenprune.unpatch(model)
    # The oracle is the unpruned model on the smaller image, with the dropped tokens masked.
    with tokenprune.patched(model, max_visual_tokens=64, processor=processor):
        mask = torch.zeros_like(inputs["input_ids"])
        mask[0, kept] = 1
        positions = torch.arange(mask.shape[1])[None]
        oracle = model(**inputs | {"attention_mask": mask}, position_ids=positions).logits
    assert len(kept) == int(mask.sum()) == mask.shape[1] - 48
    torch.testing.assert_close(pruned[0, -1], oracle[0, -1], atol=1e-4, rtol=0)


def test_keep_without_a_method_adds_the_default_method() -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, keep=0.5, max_visual_tokens=64, processor=processor):
        lines = repr(model)
    assert "keep=64" in lines and "keep=0.5" in lines and "divprune()" in lines


@each(
    ("arguments", "error", "message"),
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
def test_bad_arguments_are_refused_without_a_change(arguments: dict, error: type, message: str) -> None:
    model, processor = demo_model(), llava()
    before = asked(processor, photo(300, 200))
    with pytest.raises(error, match=message):
        tokenprune.patch(model, **{"processor": processor} | arguments)
    assert not tokenprune.is_patched(model)
    after = asked(processor, photo(300, 200))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("other_keys", [{}, CONFIG, {"method": ["divprune", "fastv"], "keep": [0.5, 0.25]}])
def test_configs_contain_max_visual_tokens(other_keys: dict) -> None:
    model, processor = demo_model(), llava()
    setting = tokenprune.Setting.from_json({"max_visual_tokens": 64} | other_keys)
    assert tokenprune.Setting.from_json(setting.to_json()) == setting and setting.max_visual_tokens == 64
    with tokenprune.patched(model, config=setting.to_json(), processor=processor):
        described, inputs = repr(model), asked(processor, photo(300, 200))
    names = other_keys.get("method")
    methods = [tokenprune.method(name) for name in names] if isinstance(names, list) else names
    with tokenprune.patched(model, methods, keep=other_keys.get("keep"), max_visual_tokens=64, processor=processor):
        assert repr(model) == described
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 64


def test_merged_settings_keep_max_visual_tokens() -> None:
    read_setting = tokenprune.Setting.from_json
    server, profile = read_setting(CONFIG | {"max_visual_tokens": 64}), read_setting({"keep": 0.25})
    merged = profile.merge_onto(server)
    assert merged.to_json() == {"method": "divprune", "keep": 0.25, "max_visual_tokens": 64}
    other = read_setting({"max_visual_tokens": 16}).merge_onto(server)
    assert other.to_json() == CONFIG | {"max_visual_tokens": 16}
    assert read_setting({"max_visual_tokens": 16}) != read_setting({"max_visual_tokens": 17})
    assert (merged.joint_keep, other.joint_keep, read_setting({"max_visual_tokens": 16}).joint_keep) == (16, 8, 16)
    assert merged.names == ("divprune",) and merged.all_names == ("downsample", "divprune")


def test_max_visual_tokens_without_a_model() -> None:
    limited, downsampled = Qwen2VLImageProcessor(**LIMITS), Qwen2VLImageProcessor(**LIMITS)
    tokenprune.patch_processor(limited, max_visual_tokens=24)
    tokenprune.patch_processor(downsampled, "downsample", keep=24)
    pixel_values = [processor(photo(190, 190))["pixel_values"] for processor in (limited, downsampled)]
    assert torch.equal(*pixel_values)
    plain: Any = Qwen2VLImageProcessor(**LIMITS)
    for arguments in ({"method": "dynres"}, {"keep": 0.5}):
        with pytest.raises(OptionError, match="leave out keep= and other methods"):
            tokenprune.patch_processor(plain, max_visual_tokens=24, **arguments)
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
def test_the_command_line_adds_downsample(methods: str, keep: str, names: list[str], keeps: list[Any]) -> None:
    (setting,) = read_settings(methods, keep, 64)
    methods_used, budgets = setting.steps()
    assert [method.name for method in methods_used] == names and [budget.keep for budget in budgets] == keeps


def test_the_command_line_takes_one_token_and_refuses_a_second_limit() -> None:
    (setting,) = read_settings("dart:pivot_text=0", "0.25", 1)
    assert setting.steps()[1][0] == tokenprune.Budget(tokens=1) and "pivot_text=0" in setting.to_text()
    with pytest.raises(OptionError, match="Leave out one"):
        read_settings("downsample", "0.25", 64)
    assert [parsed.keep for parsed in read_settings("divprune,dart", "0.5,0.25")] == [0.5, 0.25, 0.5, 0.25]


SIZES = [(190, 190), (64, 150), (150, 33), (30, 20), (400, 330)]


@each("max_tokens", [2, 7, 24, 100, 577])
@each("size", SIZES)
def test_qwen_images_make_at_most_so_many(size: tuple[int, int], max_tokens: int) -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    unpatched = processor(photo(*size))
    unpatched_count = int(unpatched["image_grid_thw"].prod()) // 4
    patch_processor(processor, "downsample", keep=max_tokens)
    patched = processor(photo(*size))
    tokens = int(patched["image_grid_thw"].prod()) // 4
    assert tokens <= max_tokens
    if unpatched_count <= max_tokens:
        assert torch.equal(patched["pixel_values"], unpatched["pixel_values"])
    else:
        rows = int(patched["image_grid_thw"][0, 1:].min()) // 2
        assert tokens > max_tokens - 2 * rows - 2, "a row and a column more would still fit"


RESIZED = [name for name in COUNTED if find_rule(COUNTED[name].make()).limit is None]  # type: ignore[union-attr]


@each("name", [*RESIZED, "Lfm2VlImageProcessor"])
def test_other_processors_stay_within_the_limit(name: str) -> None:
    """Each processor without its own limit keeps the largest token count of a smaller image within the budget."""
    case = COUNTED[name]
    processor = case.make()
    for size in SIZES[:4]:
        image = torch.from_numpy(np.array(photo(*size))).permute(2, 0, 1)
        unpatched_count = count_visual_tokens(processor, *size)
        min_count = count_visual_tokens(processor, 1, 1)
        smaller = {(max(1, round(size[0] * k / 64)), max(1, round(size[1] * k / 64))) for k in range(1, 65)}
        counts = {count_visual_tokens(processor, *smaller_size) for smaller_size in smaller}
        for max_tokens in (min_count, (min_count + unpatched_count) // 2, unpatched_count, unpatched_count + 1):
            budget = max(2, max_tokens)
            patch_processor(processor, keep=budget)
            tokens = case.real(processor, image)
            unpatch_processor(processor)
            assert tokens <= budget and (tokens == unpatched_count or unpatched_count > max_tokens)
            if name in RESIZED:
                assert tokens >= 0.85 * max((count for count in counts if count <= budget), default=1), (size, budget)


def test_a_limit_below_the_smallest_count_is_refused() -> None:
    processor = COUNTED["LlavaNextImageProcessor"].make()
    min_count = count_visual_tokens(processor, 1, 1)
    patch_processor(processor, keep=2)
    with pytest.raises(
        BudgetError, match=f"keep=2 is too small for an image of 64 x 150 pixels. It has at least {min_count}"
    ):
        processor(photo(64, 150))
    unpatch_processor(processor)


@pytest.mark.parametrize(("max_tokens", "side"), [(64, 8), (80, 8), (255, 15), (256, 16), (5000, 16)])
@torch.no_grad()
def test_a_fixed_size_shrinks_to_a_square_that_fits(max_tokens: int, side: int) -> None:
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, "downsample", keep=max_tokens, processor=processor):
        inputs = asked(processor, photo(300, 200))
        assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == side**2
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == side**2
    foreign = asked(llava(), photo(300, 200))
    with tokenprune.patched(model, "downsample", keep=max_tokens, processor=processor):
        if side == 16:
            model(**foreign)
        else:
            with pytest.raises(UnsupportedSetupError, match="were not resized"):
                model(**foreign)


def test_dynres_refuses_a_count(build: Any) -> None:
    with pytest.raises(BudgetError, match="dynres does not support"):
        patch_processor(Qwen2VLImageProcessor(**LIMITS), "dynres", keep=64)
