# SPDX-License-Identifier: Apache-2.0
"""dynres: the share of each image, shared budgets, and processors that apply the shares."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

import tokenprune
from each import each
from processors import COUNTED, LIMITS, asked, demo_model, llava, photo, special_tokenizer, state
from tokenprune import Budget, BudgetError, OptionError, count_visual_tokens, patch_processor, unpatch_processor
from tokenprune.errors import PlaceholderMismatchError
from tokenprune.methods.pixels.dynres import _split_cells, measure_detail
from tokenprune.selection.images import InputImage

KEEPS = [0.0625, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0]


def draw_plain(height: int = 200, width: int = 300) -> Image.Image:
    return Image.new("RGB", (width, height), (90, 120, 60))


def draw_gradient(height: int = 200, width: int = 300) -> Image.Image:
    values = np.linspace(0, 255, width)[None, :, None].repeat(height, 0).repeat(3, 2)
    return Image.fromarray(values.astype(np.uint8))


def draw_noise(height: int = 200, width: int = 300) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def draw_page(
    height: int = 200, width: int = 300, letters: int = 12, paper: str = "white", ink: str = "black"
) -> Image.Image:
    image = Image.new("RGB", (width, height), paper)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=letters)
    for line in range(height // (2 * letters)):
        text = "The quick brown fox jumps over 13 lazy dogs. " * 5
        draw.text((5, 5 + 2 * line * letters), text[line:], fill=ink, font=font)
    return image


def compute_shares(*images: Image.Image, keep: float = 0.25, per: str = "image", **options: Any) -> list[float]:
    method = tokenprune.method("dynres", **options)
    return method.compute_shares([InputImage(image) for image in images], keep, per)


def test_busy_images_get_more() -> None:
    smooth, middle, busy = draw_gradient(), photo(200, 300), draw_noise()
    for keep in (0.1, 0.25, 0.6):
        shares = compute_shares(draw_plain(), smooth, middle, busy, keep=keep)
        assert shares[0] <= shares[1] < shares[2] < shares[3]
        assert shares[0] == pytest.approx(max(1 / 16, 2 * keep - 1)), "a constant image is at the lower end"
    assert compute_shares(draw_plain(), min_scale=0.4) == [pytest.approx(0.16)]


def test_monotone_in_keep_and_within_bounds() -> None:
    for image in (
        draw_plain(),
        draw_gradient(),
        photo(200, 300),
        photo(90, 60, 1),
        draw_noise(),
        draw_page(),
        draw_page(letters=30),
    ):
        for options in ({}, {"min_scale": 0.05}, {"text_guard": False}):
            shares = [compute_shares(image, keep=keep, **options)[0] for keep in KEEPS]
            assert shares == sorted(shares)
            assert min(shares) >= min(KEEPS) if not options.get("min_scale") else min(shares) > 0
            assert shares[-1] == 1.0 >= max(shares)


@each("letters", [10, 16, 24])
@each("colours", [("white", "black"), ("navy", "yellow"), ("#eeeeee", "#333333")])
def test_text_keeps_the_full_size(letters: int, colours: tuple[str, str]) -> None:
    image = draw_page(500, 700, letters, *colours)
    assert compute_shares(image, keep=0.1) == [1.0]
    assert compute_shares(image, keep=0.1, text_guard=False)[0] < 0.2
    assert compute_shares(image.convert("L"), keep=0.1) == [1.0]
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), "dynres", keep=0.1)
    assert torch.equal(processor(image)["pixel_values"], Qwen2VLImageProcessor(**LIMITS)(image)["pixel_values"])


def test_other_images_are_not_detected_as_text() -> None:
    for image in (
        draw_plain(),
        draw_gradient(),
        photo(200, 300),
        draw_noise(),
        photo(20, 30),
        draw_plain(1, 1),
        draw_plain(2, 300),
    ):
        assert not measure_detail(InputImage(image).grey)[1]


def test_photographs_get_keep_on_average() -> None:
    data = pytest.importorskip("skimage.data")
    names = "astronaut brick camera cat coffee coins grass gravel moon rocket".split()
    images = [Image.fromarray(getattr(data, name)()).convert("RGB") for name in names]
    for keep in (0.15, 0.25, 0.5, 0.75):
        shares = compute_shares(*images, keep=keep)
        assert sum(shares) / len(shares) == pytest.approx(keep, rel=0.15)
        assert max(shares) < 1, "a photograph is detected as text"
    assert len(set(shares)) > 7


def test_the_mean_share_over_all_details_is_keep() -> None:
    method = tokenprune.method("dynres")
    for keep in KEEPS:
        shares = [method._compute_share(detail / 10, False, keep) for detail in range(11)]
        assert sum(shares) / 11 == pytest.approx(keep)
        assert shares == sorted(shares)


# -- shared budgets


def test_a_shared_budget_holds() -> None:
    images = [draw_plain(), draw_gradient(400, 400), photo(200, 300), photo(600, 300, 2), draw_noise(), draw_page()]
    tokens = [InputImage(image).tokens for image in images]
    for keep in (0.2, 0.4, 0.7):
        shares = compute_shares(*images, keep=keep, per="prompt")
        assert sum(share * count for share, count in zip(shares, tokens, strict=True)) == pytest.approx(
            keep * sum(tokens)
        )
        assert shares[-1] == 1.0
    # Text exceeds this budget, so the other images get the smallest share.
    assert compute_shares(draw_plain(), photo(200, 300), draw_page(), keep=0.1, per="prompt") == pytest.approx(
        [1 / 16, 1 / 16, 1.0]
    )


def test_a_shared_budget_applies_to_each_prompt() -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    rows = [[photo(160, 160), draw_noise(160, 160)], [draw_plain(160, 160), photo(160, 160, 3)]]
    patch_processor(processor, "dynres", keep=Budget(keep=0.3, per="prompt"))
    counts = processor(rows)["image_grid_thw"].prod(1).tolist()
    for row_index, row in enumerate(rows):
        row_counts = processor([row])["image_grid_thw"].prod(1).tolist()
        assert counts[2 * row_index : 2 * row_index + 2] == row_counts
        assert sum(row_counts) / 4 == pytest.approx(0.3 * 2 * 400, abs=20)


# -- with processors


@pytest.mark.parametrize("name", ["Qwen2VLImageProcessor", "LlavaNextImageProcessor", "LlavaOnevisionImageProcessor"])
def test_a_batch_equals_its_singles(name: str) -> None:
    processor = Qwen2VLImageProcessor(**LIMITS) if name.startswith("Qwen") else COUNTED[name].make()
    images = [draw_plain(), photo(180, 120), draw_noise(70, 160), draw_page(), photo(1, 40), photo(9, 9)]
    patch_processor(processor, "dynres", keep=0.3)
    image_processor = getattr(processor, "image_processor", processor)
    together = image_processor(images)
    repeated = image_processor(images)
    parts = [image_processor([image]) for image in images]
    if name.startswith("Qwen"):
        assert torch.equal(together["pixel_values"], torch.cat([part["pixel_values"] for part in parts]))
        assert torch.equal(repeated["pixel_values"], together["pixel_values"])
        grids = together["image_grid_thw"].prod(1).tolist()
        assert len(set(grids)) >= len(images) - 1
    else:
        assert [tuple(size) for size in together["image_sizes"]] == [tuple(part["image_sizes"][0]) for part in parts]


def test_qwen_counts_follow_the_shares() -> None:
    processor = Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 100 * 64, "longest_edge": 500 * 64})
    images = [draw_plain(), photo(180, 120), draw_noise(70, 160), draw_page(), photo(20, 30), draw_page(30, 40, 8)]
    unpatched_counts = [count_visual_tokens(processor, image.height, image.width) for image in images]
    expected_shares = compute_shares(*images, keep=0.3)
    assert 1.0 in expected_shares
    patch_processor(processor, "dynres", keep=0.3)
    counts = (processor(images)["image_grid_thw"].prod(1) // 4).tolist()
    for count, unpatched_count, share in zip(counts, unpatched_counts, expected_shares, strict=True):
        assert count == pytest.approx(share * unpatched_count, abs=max(1, share * unpatched_count) ** 0.5)
        assert count == unpatched_count or share < 1, "an image of full size is as large as without the patch"
    unpatch_processor(processor)
    assert (processor(images)["image_grid_thw"].prod(1) // 4).tolist() == unpatched_counts


@torch.no_grad()
def test_llava_uses_one_size_per_call() -> None:
    model, processor = demo_model(), llava()

    def count_patches(*images: Image.Image) -> int:
        inputs = asked(processor, *images)
        assert torch.isfinite(model(**inputs).logits).all()
        return inputs["pixel_values"].shape[-1] // 14

    with tokenprune.patched(model, "dynres", keep=0.25, processor=processor):
        low, middle, high = count_patches(draw_plain()), count_patches(photo(200, 300)), count_patches(draw_noise())
        assert 4 == low < middle < high < 16
        assert low < count_patches(draw_plain(), draw_noise()) < high
        assert count_patches(draw_page()) == count_patches(draw_plain(), draw_page()) == 16
    assert count_patches(draw_plain()) == 16


def test_a_question_about_text_gets_the_full_size() -> None:
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**LIMITS), special_tokenizer(video_token="<v>"), Qwen2VLVideoProcessor()
    )
    before, image = state(processor), processor.image_token
    rows = [[photo(80, 80)], [photo(80, 80, 1), photo(80, 80, 2)], [photo(80, 80, 3)]]
    texts = [f"read {image} what color?", f"{image}{image} what does the sign read?", f"{image} is it in context?"]

    def read_grids(images: Any, texts: list[str]) -> list[list[int]]:
        return processor(images=images, text=texts, return_tensors="pt", padding=True)["image_grid_thw"].tolist()

    patch_processor(processor, "dynres", keep=0.25)
    pruned = read_grids(rows, texts)
    unpatch_processor(processor)
    unpatched = read_grids(rows, texts)
    patch_processor(processor, "dynres", keep=0.25, question_guard=True)
    assert read_grids(rows, texts) == [pruned[0], unpatched[1], unpatched[2], pruned[3]]
    assert read_grids([row_image for row in rows for row_image in row], texts) == read_grids(rows, texts)
    assert read_grids(rows[1], texts[1:2]) == unpatched[1:3] and read_grids(rows[2], texts[2:]) == pruned[3:]
    with pytest.raises(PlaceholderMismatchError):
        read_grids(rows[1][:1], texts[1:2])
    # A question is forgotten after its call.
    assert read_grids(rows, texts) != pruned
    assert (
        processor.image_processor([row_image for row in rows for row_image in row])["image_grid_thw"].tolist() == pruned
    )
    unpatch_processor(processor)
    assert state(processor) == before
    method = tokenprune.method("dynres", question_guard=True)
    assert method.query_aware and not method.prefix_cache_safe
    photos = [InputImage(photo(80, 80, seed), question=question) for seed, question in enumerate(["", "read", ""])]
    shares = method.compute_shares(photos, 0.5, "prompt")
    assert shares[1] == 1.0 and sum(shares) == pytest.approx(1.5)
    with pytest.raises(OptionError, match="full processor"):
        patch_processor(Qwen2VLImageProcessor(**LIMITS), "dynres", question_guard=True)


@torch.no_grad()
def test_the_question_guard_with_a_model() -> None:
    model, processor = demo_model(), llava()
    before = state(processor)
    with tokenprune.patched(model, "dynres", keep=0.25, question_guard=True, processor=processor):
        for question, is_full_size in (("what number?", True), ("what color?", False)):
            inputs = processor(images=photo(200, 300), text=f"<image> {question}", return_tensors="pt")
            assert (inputs["pixel_values"].shape[-1] == 224) == is_full_size
            model(**inputs)
    assert state(processor) == before


def test_wrong_options() -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    with pytest.raises(BudgetError, match="smaller min_scale"):
        patch_processor(processor, "dynres", keep=0.05)
    patch_processor(processor, "dynres", keep=0.05, min_scale=0.1)
    for option, value in itertools.product(
        ("min_scale", "text_guard", "question_guard"), (0, -1, 1.5, "0.5", None, float("nan"))
    ):
        with pytest.raises(OptionError, match=option):
            tokenprune.method("dynres", **{option: value})
    with pytest.raises(OptionError, match="min_scale"):
        tokenprune.method("dynres", min_scale=True)


# -- the statistics


def test_statistics() -> None:
    assert measure_detail(torch.full((64, 64), 0.3)) == (0.0, False)
    g = torch.Generator().manual_seed(0)
    grey = torch.rand(64, 96, generator=g)
    detail, _ = measure_detail(0.5 + 0.05 * (grey - 0.5))
    assert 0 < detail < measure_detail(0.5 + 0.1 * (grey - 0.5))[0] < measure_detail(grey)[0] == 1.0
    # Twice the contrast is four times the variance, at any brightness. Mirrored images have equal detail.
    a, b = (measure_detail(0.2 + 0.05 * grey)[0], measure_detail(0.5 + 0.05 * grey)[0])
    assert a == pytest.approx(b, abs=1e-4) == measure_detail((0.2 + 0.05 * grey).flip(1))[0]
    assert measure_detail(torch.zeros(1, 1)) == (0.0, False)
    # Cells are squares. Incomplete cells at the border are ignored.
    assert _split_cells(torch.arange(30).view(5, 6), 2)[:4].tolist() == [
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
        [12, 13, 18, 19],
    ]
    assert len(_split_cells(torch.zeros(5, 7), 2)) == 6
