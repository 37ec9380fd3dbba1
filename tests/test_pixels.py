# SPDX-License-Identifier: Apache-2.0
"""Methods that act on pixels, with real processors: how many tokens they leave, and that nothing stays changed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

import tokenprune
from conftest import METHODS, snapshot
from processors import COUNTED, llava, tokenizer, written
from tokenprune import (
    AlreadyPatchedError,
    Budget,
    BudgetError,
    NotPatchedError,
    OptionError,
    Site,
    UnsupportedSetupError,
    count_visual_tokens,
    patch_processor,
    unpatch_processor,
)
from zoo import FAMILIES

PIXEL_METHODS = [name for name in METHODS if tokenprune.method_info(name).site is Site.PRE_ENCODER]
LIMITS = dict(patch_size=4, size={"shortest_edge": 64, "longest_edge": 10**6})
KEEPS = [0.75, 0.5, 0.25, 1 / 9, 0.04]


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Soft blobs with some grain."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 6, 6, generator=g)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)[0]
    values = smooth + 0.03 * torch.randn(3, height, width, generator=g)
    return Image.fromarray((values.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())


@pytest.fixture(scope="module")
def demo() -> Any:
    from processors import DEMO

    return AutoModelForImageTextToText.from_pretrained(DEMO).eval()


def asked(processor: Any, *pictures: Image.Image) -> dict[str, torch.Tensor]:
    """A batch with one picture and one question a row."""
    return processor(
        images=list(pictures), text=["<image>what color is it?"] * len(pictures), padding=True, return_tensors="pt"
    )


def state(processor: Any) -> Any:
    image = processor.image_processor if hasattr(processor, "image_processor") else processor
    return type(image), dict(vars(image)), image.to_json_string()


# -- the shipped LLaVA model: the target size shrinks, and the tower interpolates


@pytest.mark.parametrize("keep, patches", [(0.95, 16), (0.5, 11), (0.25, 8), (0.1, 5), (0.02, 2), (0.001, 1)])
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
    assert torch.isfinite(logits).all()
    assert written_tokens.shape[1] > inputs["input_ids"].shape[1]


@torch.no_grad()
def test_llava_sees_the_small_picture(demo: Any) -> None:
    """The same as what a user would do by hand: a smaller size, and interpolated positions."""
    processor, picture = llava(), photo(300, 200)
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        inputs = asked(processor, picture)
        patched = demo(**inputs).logits
    small = llava()
    small.image_processor = CLIPImageProcessor(**{**small.image_processor.to_dict(), **SMALL})
    by_hand = asked(small, picture)
    assert torch.equal(by_hand["pixel_values"], inputs["pixel_values"])
    features = demo.model.vision_tower(
        by_hand["pixel_values"], interpolate_pos_encoding=True, output_hidden_states=True
    )
    hidden = features.hidden_states[demo.config.vision_feature_layer]
    embeds = demo.get_input_embeddings()(by_hand["input_ids"])
    keep = hidden[:, 1:] if demo.config.vision_feature_select_strategy == "default" else hidden
    visual = demo.model.multi_modal_projector(keep)
    mask = (by_hand["input_ids"] == demo.config.image_token_id).unsqueeze(-1)
    want = demo(inputs_embeds=embeds.masked_scatter(mask, visual), attention_mask=by_hand["attention_mask"]).logits
    assert torch.allclose(patched, want, atol=1e-4)


SMALL = {"size": {"shortest_edge": 112}, "crop_size": {"height": 112, "width": 112}}


@torch.no_grad()
def test_unpatch_gives_all_back(demo: Any) -> None:
    processor, picture = llava(), photo(300, 200)
    before, model_before = state(processor), snapshot(demo)
    inputs = asked(processor, picture)
    logits = demo(**inputs).logits
    tokenprune.patch(demo, "downsample", keep=0.25, processor=processor)
    assert state(processor)[0] is not before[0]
    assert state(processor)[1:] == before[1:], "a patched processor prints and saves as it did"
    assert isinstance(processor.image_processor, CLIPImageProcessor)
    tokenprune.unpatch(demo)
    assert state(processor) == before
    assert snapshot(demo) == model_before
    after = asked(processor, picture)
    assert all(torch.equal(after[name], inputs[name]) for name in inputs)
    assert torch.equal(demo(**after).logits, logits)


@torch.no_grad()
def test_pixels_of_another_processor_are_refused(demo: Any) -> None:
    processor = llava()
    foreign = asked(llava(), photo(200, 200))
    patched = tokenprune.patched(demo, "downsample", keep=0.25, processor=processor)
    with patched, pytest.raises(UnsupportedSetupError, match="full size"):
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


# -- processors that follow the picture's size

SIZES = [(60, 90), (150, 40), (200, 200), (31, 170), (400, 330)]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 64, "longest_edge": 10**6}},
        {"size": {"shortest_edge": 400 * 64, "longest_edge": 10**6}},  # all pictures are enlarged
        {"size": {"shortest_edge": 64, "longest_edge": 100 * 64}},  # all pictures are reduced
    ],
    ids=["as they are", "enlarged", "reduced"],
)
def test_qwen_keeps_the_share(settings: dict, size: tuple[int, int], keep: float) -> None:
    processor = Qwen2VLImageProcessor(patch_size=4, **settings)
    full = processor(photo(*size))["image_grid_thw"][0] // 2
    patch_processor(processor, "downsample", keep=keep)
    made = processor(photo(*size))
    small = made["image_grid_thw"][0] // 2
    assert len(made["pixel_values"]) == 4 * small[1] * small[2]
    wanted = keep * float(full[1] * full[2])
    assert abs(float(small[1] * small[2]) - wanted) <= max(1, float(min(small[1], small[2])) / 2)
    short = 1 if size[0] < size[1] else 2
    assert abs(float(small[short]) - float(full[short]) * keep**0.5) < 1


def test_qwen_picture_is_resized_once() -> None:
    """The processor finds a picture that it need not touch."""
    processor = Qwen2VLImageProcessor(**LIMITS)
    picture = photo(160, 240)
    by_hand = processor(picture.resize((120, 80), Image.Resampling.BICUBIC))
    patch_processor(processor, keep=0.25)
    patched = processor(picture)
    assert torch.equal(patched["image_grid_thw"], by_hand["image_grid_thw"])
    assert torch.equal(patched["pixel_values"], by_hand["pixel_values"])


@pytest.mark.parametrize("keep", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("name", ["LlavaNextImageProcessor", "LlavaOnevisionImageProcessor", "Lfm2VlImageProcessor"])
def test_tiles_come_as_close_as_they_can(name: str, keep: float) -> None:
    """No picture of the same shape and smaller size is closer to the share than the one that was made."""
    processor = COUNTED[name].make()
    for size in [(190, 190), (64, 150), (150, 33), (30, 20)]:
        full = count_visual_tokens(processor, *size)
        patch_processor(processor, keep=keep)
        made = written(processor, photo(*size))
        unpatch_processor(processor)
        assert written(processor, photo(*size)) == full
        others = [
            count_visual_tokens(processor, max(1, round(size[0] * step / 40)), max(1, round(size[1] * step / 40)))
            for step in range(1, 41)
        ]
        assert abs(made - keep * full) <= min(abs(other - keep * full) for other in others) + 0.05 * full
        assert made <= full


@torch.no_grad()
@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_tiny_models_take_the_pixels(keep: float, build: Any) -> None:
    """Qwen2-VL's tiny model with the processor of its sizes: fewer patches, and placeholders to match."""
    family = FAMILIES["qwen2_vl"]
    model = build(family)
    processor = Qwen2VLImageProcessor(**LIMITS)
    picture = photo(48, 64)
    with tokenprune.patched(model, "downsample", keep=keep, processor=processor):
        made = processor(picture, return_tensors="pt")
        grid = made["image_grid_thw"][0].tolist()
        inputs = family.make_inputs(rows=1, sizes=[tuple(grid[1:])])
        inputs.update(made)
        logits = model(**inputs).logits
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_in == grid[1] * grid[2] // 4 == pytest.approx(keep * 48, abs=2)
    assert torch.isfinite(logits).all()


# -- all kinds of pictures


def test_all_kinds_of_pictures_are_taken(tmp_path: Any) -> None:
    processor = Qwen2VLImageProcessor(**LIMITS)
    picture = photo(64, 96)
    array = np.asarray(picture)
    picture.save(tmp_path / "photo.png")
    kinds = [
        picture,
        array,
        array.transpose(2, 0, 1),
        torch.from_numpy(array.copy()),
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        picture.convert("P"),
        picture.convert("RGBA"),
    ]
    by_path = patch_processor(Qwen2VLImageProcessorPil(**LIMITS), keep=0.25)
    assert by_path(str(tmp_path / "photo.png"))["image_grid_thw"].tolist() == [[1, 8, 12]]
    patch_processor(processor, keep=0.25)
    for kind in kinds:
        assert processor(kind)["image_grid_thw"].tolist() == [[1, 8, 12]], type(kind)
    stack = torch.from_numpy(np.stack([array, array])).permute(0, 3, 1, 2)
    for many in ([picture, array], [[picture], [array]], stack, (picture, picture)):
        assert processor(many)["image_grid_thw"].tolist() == [[1, 8, 12]] * 2
    # Values are near those of the same picture resized by PIL, whatever it came as.
    want = processor(picture)["pixel_values"]
    for kind in kinds[1:5]:
        assert (processor(kind)["pixel_values"] - want).abs().max() < 0.3, type(kind)
    floats = torch.from_numpy(array.copy()).permute(2, 0, 1) / 255
    made = processor(floats, do_rescale=False)["pixel_values"]
    assert (made - want).abs().max() < 0.3


def test_what_a_picture_is_made_of_stays() -> None:
    picture = photo(64, 96)
    array, palette = np.array(picture), picture.convert("P")
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), keep=0.25)
    # Palette indices must not be interpolated, nor taken from the nearest pixel.
    want = processor(palette.convert("RGB"))["pixel_values"]
    assert torch.equal(processor(palette)["pixel_values"], want)
    # The resized array has its channels where the original had them, and where the call says they are.
    told = processor(array, input_data_format="channels_last")["pixel_values"]
    assert torch.equal(told, processor(array)["pixel_values"])


@pytest.mark.parametrize("nothing", [[], [[]]], ids=str)
def test_no_pictures_are_left_to_the_processor(nothing: list) -> None:
    def outcome(processor: Any) -> Any:
        try:
            return list(processor(nothing))
        except Exception as error:
            return type(error), str(error)

    processor = Qwen2VLImageProcessor(**LIMITS)
    before = outcome(processor)
    assert outcome(patch_processor(processor, keep=0.25)) == before


def test_a_text_without_pictures_passes(demo: Any) -> None:
    processor = llava()
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        inputs = processor(text=["what?"], return_tensors="pt")
        demo(**inputs)
        assert tokenprune.stats(demo).visual_tokens_in == 0


# -- keep = 1


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_keep_one_is_the_identity(method: str, demo: Any) -> None:
    for processor in (llava(), Qwen2VLImageProcessor(patch_size=4), COUNTED["LlavaNextImageProcessor"].make()):
        pictures = dict(images=[photo(90, 40)])
        if hasattr(processor, "tokenizer"):
            pictures["text"] = ["<image>"]
        before = processor(**pictures, return_tensors="pt")
        if processor.__class__.__name__ == "LlavaProcessor":
            tokenprune.patch(demo, method, keep=1.0, processor=processor)
        else:
            patch_processor(processor, method, keep=1.0)
        after = processor(**pictures, return_tensors="pt")
        assert all(torch.equal(before[name], after[name]) for name in before)
        if tokenprune.is_patched(demo):
            tokenprune.unpatch(demo)
        else:
            unpatch_processor(processor)


# -- errors

FIXED = ["internvl", "gemma3", "idefics3", "smolvlm"]


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_errors_leave_the_model_alone(method: str, demo: Any, build: Any) -> None:
    processor = llava()
    before = state(processor)
    for family in FIXED:
        with pytest.raises(UnsupportedSetupError, match="as many tokens"):
            tokenprune.patch(build(FAMILIES[family]), method, keep=0.5, processor=processor)
    wrong: list[tuple[type[Exception], dict]] = [
        (OptionError, dict(keep=0.5)),
        (OptionError, dict(keep=0.5, processor=tokenizer())),
        (BudgetError, dict(keep=64, processor=processor)),
        (BudgetError, dict(keep=Budget(kv_share=0.5), processor=processor)),
        (OptionError, dict(keep=0.5, processor=processor, layer=2)),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            tokenprune.patch(demo, method, **arguments)
        assert not tokenprune.is_patched(demo)
    assert state(processor) == before
    with pytest.raises(OptionError, match="does not act on pixels"):
        tokenprune.patch(demo, "divprune", processor=processor)


def test_one_patch_on_a_processor(demo: Any, build: Any) -> None:
    processor = llava()
    tokenprune.patch(demo, "downsample", keep=0.5, processor=processor)
    with pytest.raises(AlreadyPatchedError, match=r"downsample \(.*0\.5"):
        tokenprune.patch(build(FAMILIES["llava"]), "downsample", keep=0.5, processor=processor)
    with pytest.raises(NotPatchedError, match="together with a model"):
        unpatch_processor(processor)
    tokenprune.patch(demo, "downsample", keep=0.25, processor=processor, replace=True)
    assert asked(processor, photo(90, 90))["pixel_values"].shape[-1] == 112
    tokenprune.unpatch(demo)
    assert asked(processor, photo(90, 90))["pixel_values"].shape[-1] == 224


def test_a_processor_that_would_undo_it_is_refused(build: Any) -> None:
    """Not one whose tokens can be counted, but it says that it makes one size of all pictures."""
    with pytest.raises(UnsupportedSetupError, match="save nothing"):
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), "downsample", keep=0.5, processor=SiglipImageProcessor())


def test_settings_of_the_call_are_heard(demo: Any) -> None:
    processor, picture = llava(), photo(300, 200)
    with tokenprune.patched(demo, "downsample", keep=0.25, processor=processor):
        for size in (112, {"shortest_edge": 112}):
            made = processor.image_processor(picture, size=size, crop_size=112, return_tensors="pt")
            assert made["pixel_values"].shape[-2:] == (56, 56)
        with pytest.raises(UnsupportedSetupError, match="do_resize"):
            processor.image_processor(picture, do_resize=False)
    qwen = patch_processor(Qwen2VLImageProcessor(**LIMITS), keep=0.25)
    most = {"shortest_edge": 64, "longest_edge": 64 * 64}
    assert qwen(photo(160, 160), size=most)["image_grid_thw"].tolist() == [[1, 8, 8]]
    assert qwen(photo(160, 160), min_pixels=64, max_pixels=64 * 64)["image_grid_thw"].tolist() == [[1, 8, 8]]


def test_placeholders_of_the_whole_processor_match() -> None:
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(**LIMITS), tokenizer(), Qwen2VLVideoProcessor())
    pictures = [photo(160, 80), photo(64, 64), photo(33, 130)]
    full = written(processor, *pictures)
    patch_processor(processor, keep=0.25)
    inputs = processor(images=pictures, text=["<image><image>", "<image>"])
    made = [t * h * w // 4 for t, h, w in torch.as_tensor(inputs["image_grid_thw"]).tolist()]
    assert written(processor, *pictures) == sum(made) == pytest.approx(full / 4, abs=6)
    token = tokenizer().convert_tokens_to_ids("<image>")
    assert [row.count(token) for row in inputs["input_ids"]] == [made[0] + made[1], made[2]]
    unpatch_processor(processor)
    assert written(processor, *pictures) == full


# -- the processor alone


def test_patch_processor_is_the_same_as_with_a_model(build: Any) -> None:
    family, picture = FAMILIES["qwen2_vl"], photo(70, 90)
    with_model, alone = (Qwen2VLImageProcessor(patch_size=4) for _ in range(2))
    before = state(alone)
    with tokenprune.patched(build(family), "downsample", keep=0.3, processor=with_model):
        want = with_model(picture)
    assert patch_processor(alone, "downsample", keep=0.3) is alone
    made = alone(picture)
    assert torch.equal(made["pixel_values"], want["pixel_values"])
    assert torch.equal(made["image_grid_thw"], want["image_grid_thw"])
    assert copy.deepcopy(alone)(picture)["image_grid_thw"].tolist() == made["image_grid_thw"].tolist()
    assert unpatch_processor(alone) is alone
    assert state(alone) == before


def test_patch_processor_replaces_only_when_asked() -> None:
    processor = patch_processor(Qwen2VLImageProcessor(), keep=0.5)
    with pytest.raises(AlreadyPatchedError, match="downsample"):
        patch_processor(processor, keep=0.25)
    patch_processor(processor, keep=0.25, replace=True)
    assert processor(photo(560, 560))["image_grid_thw"].tolist() == [[1, 20, 20]]
    unpatch_processor(processor)
    with pytest.raises(NotPatchedError, match="patch_processor"):
        unpatch_processor(processor)


def test_patch_processor_says_what_it_cannot_do() -> None:
    with pytest.raises(OptionError, match="downsample"):
        patch_processor(Qwen2VLImageProcessor(), "divprune")
    with pytest.raises(UnsupportedSetupError, match=r"tokenprune\.patch\(model"):
        patch_processor(llava())
    with pytest.raises(UnsupportedSetupError, match="as many tokens"):
        patch_processor(GotOcr2ImageProcessor(crop_to_patches=True))
    with pytest.raises(OptionError, match="whole processor"):
        patch_processor(COUNTED["LlavaNextImageProcessor"].make().image_processor)
    with pytest.raises(OptionError, match="pass the model's processor"):
        patch_processor(tokenizer())
    with pytest.raises(BudgetError, match="share"):
        patch_processor(Qwen2VLImageProcessor(), keep=64)
    with pytest.raises(OptionError, match="sharpness"):
        patch_processor(Qwen2VLImageProcessor(), sharpness=1)
