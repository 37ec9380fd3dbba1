# SPDX-License-Identifier: Apache-2.0
"""Pixel methods with real processors: token counts, statistics, and a complete restore."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from basics import METHODS, snapshot
from each import each
from processors import COUNTED, LIMITS, asked, demo_model, llava, photo, state, written
from pruned import run_pruned
from tokenprune import UnsupportedSetupError, count_visual_tokens, patch_processor, unpatch_processor
from tokenprune.integrations.shared.pixel_counts import PixelCounts
from zoo import FAMILIES

INFOS = [tokenprune.method_info(name) for name in METHODS]
PIXEL_METHODS = [info.name for info in INFOS if issubclass(info.cls, tokenprune.selection.ResizeMethod)]
KEEPS = [0.75, 0.5, 0.25, 1 / 9, 0.04]


@pytest.fixture
def demo() -> Any:
    return demo_model()


# -- the shipped LLaVA model: the target size shrinks, and the tower interpolates


@each("keep, patches", [(0.95, 16), (0.5, 11), (0.25, 8), (0.1, 5), (0.02, 2), (0.001, 1)])
@torch.no_grad()
def test_llava_shrinks_to_whole_patches(demo: Any, keep: float, patches: int) -> None:
    processor = llava()
    with tokenprune.patched(demo, "downsample", keep=keep, processor=processor):
        inputs = asked(processor, photo(300, 200), photo(50, 90))
        assert inputs["pixel_values"].shape == (2, 3, 14 * patches, 14 * patches)
        assert int((inputs["input_ids"] == demo.config.image_token_id).sum()) == 2 * patches**2
        logits = demo(**inputs).logits
        stats = tokenprune.stats(demo)
        written_tokens = demo.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert stats.visual_tokens_in == stats.visual_tokens_out == 2 * patches**2
    assert stats.visual_tokens_full == 2 * 16**2
    assert stats.pixel_keep_ratio == stats.as_dict()["pixel_keep_ratio"] == patches**2 / 16**2
    assert "of 512 without the method on pixels" in repr(stats)
    assert torch.isfinite(logits).all()
    assert written_tokens.shape[1] > inputs["input_ids"].shape[1]


@torch.no_grad()
def test_llava_sees_the_small_image(demo: Any) -> None:
    """The output equals a manual call with a smaller size and interpolated positions."""
    processor, image = llava(), photo(300, 200)
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        inputs = asked(processor, image)
        patched = demo(**inputs).logits
    small = llava()
    small.image_processor = CLIPImageProcessor(**{**small.image_processor.to_dict(), **SMALL})
    manual = asked(small, image)
    assert torch.equal(manual["pixel_values"], inputs["pixel_values"])
    features = demo.model.vision_tower(manual["pixel_values"], interpolate_pos_encoding=True, output_hidden_states=True)
    hidden = features.hidden_states[demo.config.vision_feature_layer]
    embeds = demo.get_input_embeddings()(manual["input_ids"])
    keep = hidden[:, 1:] if demo.config.vision_feature_select_strategy == "default" else hidden
    visual = demo.model.multi_modal_projector(keep)
    mask = (manual["input_ids"] == demo.config.image_token_id).unsqueeze(-1)
    expected = demo(inputs_embeds=embeds.masked_scatter(mask, visual), attention_mask=manual["attention_mask"]).logits
    assert torch.allclose(patched, expected, atol=1e-4)


SMALL = {"size": {"shortest_edge": 112}, "crop_size": {"height": 112, "width": 112}}


@torch.no_grad()
def test_unpatch_restores_processor_and_model(demo: Any) -> None:
    processor, image = llava(), photo(300, 200)
    before, inputs = state(processor), asked(processor, image)
    logits = demo(**inputs).logits
    model_before = snapshot(demo)  # transformers installs hooks on first use
    tokenprune.patch(demo, "downsample", keep=0.25, processor=processor)
    assert state(processor)[0] != before[0]
    assert state(processor)[1:] == before[1:], "a patched processor prints and saves as it did"
    assert isinstance(processor.image_processor, CLIPImageProcessor)
    tokenprune.unpatch(demo)
    assert state(processor) == before
    assert snapshot(demo) == model_before
    after = asked(processor, image)
    assert all(torch.equal(after[name], inputs[name]) for name in inputs)
    assert torch.equal(demo(**after).logits, logits)


@torch.no_grad()
def test_pixels_of_another_processor_are_refused(demo: Any) -> None:
    processor = llava()
    foreign = asked(llava(), photo(200, 200))
    patched = tokenprune.patched(demo, "downsample", keep=0.25, processor=processor)
    with patched, pytest.raises(UnsupportedSetupError, match="were not resized"):
        demo(**foreign)
    demo(**foreign)


@torch.no_grad()
def test_composed_with_a_method_in_the_decoder(demo: Any) -> None:
    processor = llava()
    with tokenprune.patched(demo, ["downsample", "divprune"], keep=[0.25, 0.5], processor=processor):
        inputs = asked(processor, photo(200, 200))
        demo(**inputs)
        stats = tokenprune.stats(demo)
    assert (stats.visual_tokens_in, stats.visual_tokens_out) == (64, 32)


class FixedShares(tokenprune.selection.ResizeMethod):
    """The first image of a call keeps a quarter of its tokens, the others keep all."""

    name = "fixed_shares"
    depends_on_content = True

    def compute_shares(self, images: Any, keep: float, per: str) -> list[float]:
        return [0.25] + [1.0] * (len(images) - 1)


class SmallShares(FixedShares):
    def compute_shares(self, images: Any, keep: float, per: str) -> list[float]:
        return [0.1, 0.4]


def test_images_of_one_size_get_the_mean_share(demo: Any) -> None:
    processor, images = llava(), (photo(200, 200), photo(200, 200))
    with tokenprune.patched(demo, SmallShares(), keep=0.25, processor=processor):
        assert asked(processor, *images)["pixel_values"].shape[-1] == 14 * 8  # a quarter of 16 x 16 patches
    with tokenprune.patched(demo, FixedShares(), keep=0.25, processor=processor):
        assert asked(processor, *images)["pixel_values"].shape[-1] == 14 * 16


# -- processors that follow the image's size


def test_a_small_image_beside_a_shrunk_image_is_enlarged_as_before() -> None:
    processor = Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 101 * 64, "longest_edge": 10**6})
    small = photo(20, 30)
    unpatched = processor(small)["image_grid_thw"][0]
    patch_processor(processor, FixedShares(), keep=0.25)
    assert torch.equal(processor([photo(200, 200), small])["image_grid_thw"][1], unpatched)


SIZES = [(60, 90), (150, 40), (200, 200), (31, 170), (400, 330)]


@each("keep", KEEPS)
@each("size", SIZES)
@each(
    "settings",
    [
        {"size": {"shortest_edge": 64, "longest_edge": 10**6}},
        {"size": {"shortest_edge": 400 * 64, "longest_edge": 10**6}},  # all images are enlarged
        {"size": {"shortest_edge": 64, "longest_edge": 100 * 64}},  # all images are reduced
    ],
)
def test_qwen_keeps_the_share(settings: dict, size: tuple[int, int], keep: float) -> None:
    processor = Qwen2VLImageProcessor(patch_size=4, **settings)
    unpatched = processor(photo(*size))["image_grid_thw"][0] // 2
    patch_processor(processor, "downsample", keep=keep)
    patched = processor(photo(*size))
    small = patched["image_grid_thw"][0] // 2
    assert len(patched["pixel_values"]) == 4 * small[1] * small[2]
    expected = keep * float(unpatched[1] * unpatched[2])
    assert abs(float(small[1] * small[2]) - expected) <= max(1, float(min(small[1], small[2])) / 2)
    short = 1 if size[0] < size[1] else 2
    assert abs(float(small[short]) - float(unpatched[short]) * keep**0.5) < 1


def test_qwen_image_is_resized_once() -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    image = photo(160, 240)
    manual = processor(image.resize((120, 80), Image.Resampling.BICUBIC))
    patch_processor(processor, keep=0.25)
    patched = processor(image)
    assert torch.equal(patched["image_grid_thw"], manual["image_grid_thw"])
    assert torch.equal(patched["pixel_values"], manual["pixel_values"])


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_qwen_images_do_not_depend_on_their_companions(method: str) -> None:
    """Covers images around the processor's lower limit. Text pages keep full size under dynres."""
    processor = Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 101 * 64, "longest_edge": 10**6})
    lines = (np.random.default_rng(0).random((200, 200)) < 0.3).astype(np.uint8) * 255
    pages = [
        Image.fromarray(lines[:height, :width]).convert("RGB") for height, width in ((83, 83), (40, 60), (200, 99))
    ]
    images = [photo(200, 200), photo(20, 30), *pages, photo(83, 83)]
    patch_processor(processor, method, keep=0.4)
    together = processor(images)
    separate = [processor(image) for image in images]
    assert torch.equal(together["image_grid_thw"], torch.cat([output["image_grid_thw"] for output in separate]))
    assert torch.equal(together["pixel_values"], torch.cat([output["pixel_values"] for output in separate]))


@each("keep", [0.5, 0.25, 0.1])
@each(
    "name", ["LlavaNextImageProcessor", "LlavaOnevisionImageProcessor", "Lfm2VlImageProcessor", "PixtralImageProcessor"]
)
def test_tile_counts_are_as_close_as_possible(name: str, keep: float) -> None:
    """No smaller image of the same shape has a count closer to the share."""
    processor = COUNTED[name].make()
    for size in [(190, 190), (64, 150), (150, 33), (30, 20)]:
        unpatched = count_visual_tokens(processor, *size)
        patch_processor(processor, keep=keep)
        num_tokens = written(processor, photo(*size))
        unpatch_processor(processor)
        assert written(processor, photo(*size)) == unpatched
        other_counts = [
            count_visual_tokens(processor, max(1, round(size[0] * step / 40)), max(1, round(size[1] * step / 40)))
            for step in range(1, 41)
        ]
        assert (
            abs(num_tokens - keep * unpatched)
            <= min(abs(other_count - keep * unpatched) for other_count in other_counts) + 0.05 * unpatched
        )
        assert num_tokens <= unpatched


@torch.no_grad()
def test_stats_report_the_count_without_the_method(build: Any) -> None:
    """Counts cover one or several processor calls, beam search, and prompts without images."""
    family = FAMILIES["qwen2_vl"]
    model, processor = build(family), Qwen2VLImageProcessor(**LIMITS)

    def count_full_tokens(*sizes: tuple[int, int], images: Any = None, calls: int = 1, **generate: Any) -> int | None:
        """Return `visual_tokens_full` for images of the given sizes."""
        num_per_call = len(sizes) // calls
        outputs = [
            processor([photo(*size) for size in sizes[start : start + num_per_call]], return_tensors="pt")
            for start in range(0, len(sizes), num_per_call)
        ]
        grids = torch.cat([output["image_grid_thw"] for output in outputs])
        inputs = family.make_inputs(
            images=images or [1] * len(sizes), sizes=[tuple(grid[1:]) for grid in grids.tolist()]
        )
        inputs.update({key: torch.cat([output[key] for output in outputs]) for key in outputs[0]})
        model.generate(**inputs, max_new_tokens=2, **generate)
        return tokenprune.stats(model).visual_tokens_full

    unpatched = {size: processor(photo(*size), return_tensors="pt")["image_grid_thw"].prod().item() // 4
            for size in ((48, 64), (64, 64), (32, 48))}  # fmt: skip
    with tokenprune.patched(model, "downsample", keep=0.25, processor=processor):
        assert count_full_tokens((48, 64)) == unpatched[48, 64] == 48
        assert count_full_tokens((48, 64), (64, 64)) == unpatched[48, 64] + unpatched[64, 64]
        assert count_full_tokens((48, 64), (64, 64), calls=2) == unpatched[48, 64] + unpatched[64, 64]
        assert count_full_tokens((48, 64), (64, 64), (32, 48), images=[2, 0, 1]) == sum(unpatched.values())
        assert count_full_tokens((48, 64), (64, 64), num_beams=3) == 3 * (unpatched[48, 64] + unpatched[64, 64])
        # unknown for images of another processor
        other = Qwen2VLImageProcessor(**LIMITS)(photo(16, 96), return_tensors="pt")
        inputs = family.make_inputs(rows=1, sizes=[tuple(other["image_grid_thw"][0, 1:].tolist())])
        inputs.update(other)
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_full is tokenprune.stats(model).pixel_keep_ratio is None
        assert "without" not in repr(tokenprune.stats(model))
    assert run_pruned(model, inputs, "divprune", 0.25)[1].visual_tokens_full is None


def test_unknown_counts_are_none() -> None:
    counts = PixelCounts()
    assert counts.find_unpruned([12]) is None
    counts.record(12, 48)
    counts_found = [counts.find_unpruned(tokens) for tokens in ([12], [12, 12], [0, 12], [24])]
    assert counts_found == [48, 96, 48, None]
    counts.record(12, 48)
    assert counts.find_unpruned([12]) == 48
    counts.record(12, 50)  # ambiguous
    assert counts.find_unpruned([12]) is None
    for _ in range(63):
        counts.record(13, 52)
    assert (counts.find_unpruned([12]), counts.find_unpruned([13])) == (50, 52)
    counts.record(13, 52)
    assert counts.find_unpruned([12]) is None


@torch.no_grad()
@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_tiny_models_run_on_smaller_images(keep: float, build: Any) -> None:
    """A tiny Qwen2-VL gets fewer patches and as many placeholders."""
    family = FAMILIES["qwen2_vl"]
    model = build(family)
    processor = Qwen2VLImageProcessor(**LIMITS)
    image = photo(48, 64)
    with tokenprune.patched(model, "downsample", keep=keep, processor=processor):
        pixels = processor(image, return_tensors="pt")
        grid = pixels["image_grid_thw"][0].tolist()
        inputs = family.make_inputs(rows=1, sizes=[tuple(grid[1:])])
        inputs.update(pixels)
        logits = model(**inputs).logits
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_in == grid[1] * grid[2] // 4 == pytest.approx(keep * 48, abs=2)
    assert stats.visual_tokens_full == 48
    assert torch.isfinite(logits).all()


# -- all kinds of images


def test_all_kinds_of_images_are_accepted(tmp_path: Any) -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    image = photo(64, 96)
    array = np.asarray(image)
    image.save(tmp_path / "photo.png")
    kinds = [
        image,
        array,
        array.transpose(2, 0, 1),
        torch.from_numpy(array.copy()),
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        image.convert("P"),
        image.convert("RGBA"),
    ]
    by_path = patch_processor(Qwen2VLImageProcessorPil(**LIMITS), keep=0.25)
    assert by_path(str(tmp_path / "photo.png"))["image_grid_thw"].tolist() == [[1, 8, 12]]
    patch_processor(processor, keep=0.25)
    for kind in kinds:
        assert processor(kind)["image_grid_thw"].tolist() == [[1, 8, 12]], type(kind)
    stack = torch.from_numpy(np.stack([array, array])).permute(0, 3, 1, 2)
    for images in ([image, array], [[image], [array]], stack, (image, image)):
        assert processor(images)["image_grid_thw"].tolist() == [[1, 8, 12]] * 2
    # The pixel values are close to an image resized by PIL, for each kind.
    expected = processor(image)["pixel_values"]
    for kind in kinds[1:5]:
        assert (processor(kind)["pixel_values"] - expected).abs().max() < 0.3, type(kind)
    floats = torch.from_numpy(array.copy()).permute(2, 0, 1) / 255
    pixel_values = processor(floats, do_rescale=False)["pixel_values"]
    assert (pixel_values - expected).abs().max() < 0.3


def test_palettes_and_channel_order_are_respected() -> None:
    image = photo(64, 96)
    array, palette = np.array(image), image.convert("P")
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), keep=0.25)
    # Palette indices must be converted to RGB, not interpolated or copied from the nearest pixel.
    expected = processor(palette.convert("RGB"))["pixel_values"]
    assert torch.equal(processor(palette)["pixel_values"], expected)
    # The resized array keeps the channel dimension of the original or of the call.
    explicit = processor(array, input_data_format="channels_last")["pixel_values"]
    assert torch.equal(explicit, processor(array)["pixel_values"])


@pytest.mark.parametrize("images", [[], [[]]], ids=str)
def test_empty_image_lists_are_passed_to_the_processor(images: list) -> None:
    def call(processor: Any) -> Any:
        try:
            return list(processor(images))
        except Exception as error:
            return type(error), str(error)

    processor = Qwen2VLImageProcessor(**LIMITS)
    before = call(processor)
    assert call(patch_processor(processor, keep=0.25)) == before


def test_a_text_without_images_is_unchanged(demo: Any) -> None:
    processor = llava()
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        inputs = processor(text=["what?"], return_tensors="pt")
        demo(**inputs)
        assert tokenprune.stats(demo).visual_tokens_in == 0


# -- keep = 1


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_keep_one_is_the_identity(method: str, demo: Any) -> None:
    for processor in (llava(), Qwen2VLImageProcessor(patch_size=4), COUNTED["LlavaNextImageProcessor"].make()):
        images = dict(images=[photo(90, 40)])
        if hasattr(processor, "tokenizer"):
            images["text"] = ["<image>"]
        before = processor(**images, return_tensors="pt")
        if processor.__class__.__name__ == "LlavaProcessor":
            tokenprune.patch(demo, method, keep=1.0, processor=processor)
        else:
            patch_processor(processor, method, keep=1.0)
        after = processor(**images, return_tensors="pt")
        assert all(torch.equal(before[name], after[name]) for name in before)
        if tokenprune.is_patched(demo):
            tokenprune.unpatch(demo)
        else:
            unpatch_processor(processor)


@torch.no_grad()
def test_stats_of_four_methods_at_four_sites() -> None:
    """dynres shrinks the image, tome merges in the tower, divprune and fastv drop tokens before and in the decoder."""
    model, processor = demo_model(), llava()
    image = photo(256, 256)
    plan = ["dynres", "tome", "divprune", "fastv"]

    def run(keep) -> tokenprune.Stats:
        with torch.no_grad(), tokenprune.patched(model, plan, keep=keep, processor=processor):
            inputs = processor(images=[image], text=["<image> What is this?"], return_tensors="pt")
            model(**inputs)
            return tokenprune.stats(model)

    stats = run([0.6, 0.5, 0.75, 0.5])
    assert [(removal.method, removal.site, removal.layer) for removal in stats.removals] == [
        ("tome", "IN_ENCODER", 0), ("divprune", "PRE_LLM", 0), ("fastv", "IN_LLM", 2),
    ]  # fmt: skip
    num_entered = stats.visual_tokens_in
    assert num_entered < 256  # dynres
    shares = [removal.after / removal.before for removal in stats.removals]
    assert shares == pytest.approx([0.5, 0.75, 0.5], abs=0.02)
    assert [removal.before for removal in stats.removals] == [
        num_entered,
        *(removal.after for removal in stats.removals[:-1]),
    ]
    assert stats.visual_tokens_out == stats.removals[-1].after
    assert stats.as_dict()["removals"][0]["method"] == "tome"
    shared_keep = run(0.7)
    assert shared_keep.visual_tokens_out == pytest.approx(shared_keep.visual_tokens_in * 0.7**3, abs=2)
