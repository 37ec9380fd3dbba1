# SPDX-License-Identifier: Apache-2.0
"""`load_image` decodes JPEGs at the scale that a budget needs, with equal token counts and almost equal pixels."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from transformers import CLIPImageProcessor
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
import tokenprune_demo
from each import each
from processors import COUNTED, LIMITS, demo_model, llava, photo
from tokenprune import (
    Budget,
    BudgetError,
    OptionError,
    TokenPruneError,
    UnsupportedSetupError,
    load_image,
    patch_processor,
    unpatch_processor,
)
from tokenprune.integrations.hf.pixels.marker import find_patch
from tokenprune.integrations.shared import decoding
from tokenprune.integrations.shared.decoding import Need, find_scale
from tokenprune.methods.pixels.dynres import measure_detail
from tokenprune.selection.images import InputImage

TOLERANCE = 0.03  # mean absolute difference of processed pixels, relative to a range of 1


def encode_jpeg(image: Image.Image, **options: Any) -> bytes:
    return encode(image, "JPEG", quality=92, **options)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def load_full(file: bytes) -> Image.Image:
    """Load the complete image like transformers."""
    with Image.open(io.BytesIO(file)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def flatten(value: Any) -> torch.Tensor:
    if isinstance(value, (list, tuple)):
        return torch.cat([flatten(entry) for entry in value])
    return torch.as_tensor(np.asarray(value), dtype=torch.float32).flatten()


def read_pixels(output: Any) -> torch.Tensor:
    return flatten(output["pixel_values"])


# (processor, settings without normalization, budget, size of the file, size of the decoded image)
PLAIN, SIZE = {"do_normalize": False}, {"size": LIMITS["size"]}
CASES: list[tuple[str, dict, int, tuple[int, int], tuple[int, int] | None]] = [
    ("Qwen2VLImageProcessor", SIZE | PLAIN, 64, (603, 801), (56, 72)),
    ("Qwen2VLImageProcessor", SIZE | PLAIN, 400, (603, 801), (144, 176)),
    ("Glm4vImageProcessor", PLAIN, 64, (603, 801), (76, 101)),
    ("PixtralImageProcessor", {}, 100, (603, 801), None),
    ("LlavaNextImageProcessor", {}, 200, (603, 801), None),
    ("GotOcr2ImageProcessor", {"crop_to_patches": True, "max_patches": 6} | PLAIN, 20, (600, 800), (75, 100)),
    ("SmolVLMImageProcessor", {"size": {"longest_edge": 64}} | PLAIN, 20, (600, 800), (75, 100)),
    ("Gemma4ImageProcessor", {}, 70, (600, 800), (75, 100)),
    ("Lfm2VlImageProcessor", PLAIN, 16, (600, 800), (75, 100)),
    ("DeepseekOcr2ImageProcessor", PLAIN, 437, (600, 800), (150, 200)),
    ("Siglip2ImageProcessor", PLAIN, 64, (600, 800), (75, 100)),
]


@each("case", CASES)
def test_same_tokens_and_almost_the_same_pixels(case: Any) -> None:
    name, settings, budget, size, decoded = case
    row = COUNTED[name]
    processor, file = patch_processor(row.make(**settings), max_visual_tokens=budget), encode_jpeg(photo(*size))
    image = load_image(file, processor=processor)
    assert decoded in (None, (image.height, image.width)) and image.width < size[1] and image.mode == "RGB"
    arrays = [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in (image, load_full(file))]
    counts = [row.real(processor, array) for array in arrays]
    assert counts[0] == counts[1] <= budget
    image_processor = getattr(processor, "image_processor", processor)
    actual, expected = (read_pixels(image_processor(array)) for array in arrays)
    scale = 1.0 if settings.get("do_normalize") is False or name.startswith("Gemma4") else 4.0
    assert (actual - expected).abs().mean() < TOLERANCE * scale


@pytest.mark.parametrize("turned", range(1, 9))
def test_orientation(turned: int) -> None:
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = turned
    file = encode_jpeg(photo(300, 800), exif=exif)
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), max_visual_tokens=64)
    check_near(load_image(file, processor=processor), load_image(encode(load_full(file), "PNG"), processor=processor))


def check_near(image: Image.Image, expected: Image.Image) -> None:
    assert image.size == expected.size and image.mode == expected.mode == "RGB"
    assert np.abs(np.asarray(image, np.float32) - np.asarray(expected, np.float32)).mean() < 4


def test_an_unpatched_processor_gets_the_final_size() -> None:
    file, processor = encode_jpeg(photo(600, 800)), Qwen2VLImageProcessor(**LIMITS)
    image = load_image(file, processor=processor, max_visual_tokens=64)
    assert image.size == (72, 56)  # 9 x 7 tokens of 8 pixels
    assert int(processor(image)["image_grid_thw"].prod()) // 4 == 63
    patch_processor(processor, max_visual_tokens=64)
    assert load_image(file, processor=processor).tobytes() == image.tobytes()
    assert int(processor(load_image(file, processor=processor))["image_grid_thw"].prod()) // 4 == 63
    assert load_image(file, processor=processor, max_visual_tokens=16).size == (32, 32)
    with pytest.raises(UnsupportedSetupError, match="patch_processor"):
        load_image(file, processor=Gemma4ImageProcessor(), max_visual_tokens=70)
    with pytest.raises(UnsupportedSetupError, match="Patch the model"):
        load_image(file, processor=CLIPImageProcessor(), max_visual_tokens=64)
    with pytest.raises(OptionError, match="Pass processor="):
        load_image(file, max_visual_tokens=64)
    with pytest.raises(BudgetError, match="must be a number of tokens"):
        load_image(file, processor=processor, max_visual_tokens=0)


def test_without_a_budget_the_processor_size_decides() -> None:
    file = encode_jpeg(photo(900, 1200))
    assert load_image(file, processor=llava()).size == (300, 225)  # 224 pixels
    assert load_image(file).size == load_image(file, processor=object()).size == (1200, 900)
    model, processor = demo_model(), llava()
    with tokenprune.patched(model, max_visual_tokens=64, processor=processor):
        assert load_image(file, processor=processor).size == (150, 113)  # 112 pixels
    # A share refers to the tokens of the full image, so the image must not be decoded smaller.
    qwen = patch_processor(Qwen2VLImageProcessor(**LIMITS), "downsample", keep=0.01)
    assert load_image(file, processor=qwen).size == (1200, 900)
    unpatch_processor(qwen)
    # A method with a budget for all images of a prompt needs all pixels.
    qwen = patch_processor(Qwen2VLImageProcessor(**LIMITS), "dynres", keep=Budget(keep=0.25, per="prompt"))
    assert load_image(file, processor=qwen).size == (1200, 900)
    unpatch_processor(qwen)


# -- dynres chooses by the content of a smaller decode


def draw_page(height: int, width: int) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=48)
    for line in range(height // 96):
        draw.text((20, 20 + 96 * line), "The quick brown fox jumps over 13 lazy dogs. " * 4, fill="black", font=font)
    return image


PICTURES = {"photograph": lambda: photo(1700, 2300), "page": lambda: draw_page(1700, 2300)}


@each("kind", list(PICTURES))
def test_dynres_chooses_from_a_smaller_decode(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = encode_jpeg(PICTURES[kind](), exif=build_orientation())
    processor = patch_processor(
        Qwen2VLImageProcessor(**LIMITS | {"size": {"shortest_edge": 64, "longest_edge": 10**7}}), "dynres", keep=0.25
    )
    patch = find_patch(processor)
    scales: list[int] = []
    draft = decoding.draft
    monkeypatch.setattr(decoding, "draft", lambda image, scale: (scales.append(scale), draft(image, scale)))
    expected = processor(load_full(file))
    counts = patch.counts.find_unpruned([int(expected["image_grid_thw"].prod()) // 4])
    image = load_image(file, processor=processor)
    assert scales == ([2] if kind == "photograph" else [2, 1])
    # transformers copies the images of a chat
    for loaded in (image, ImageOps.exif_transpose(image).convert("RGB")):
        small = processor(loaded)
        rows, columns = (small["image_grid_thw"][0, 1:] - expected["image_grid_thw"][0, 1:]).abs().tolist()
        assert max(rows, columns) <= 2  # one step of the grid
        assert patch.counts.find_unpruned([int(small["image_grid_thw"].prod()) // 4]) == counts
    assert (image.size == (1700, 2300)) == (kind == "page")
    if kind == "photograph":
        assert (small["pixel_values"].mean() - expected["pixel_values"].mean()).abs() < TOLERANCE
        # An image that the caller has changed counts as a new image.
        half = image.crop((0, 0, image.width // 2, image.height))
        assert int(processor(half)["image_grid_thw"].prod()) < int(small["image_grid_thw"].prod()) / 3
    # Under another budget the decoded size is not reused.
    unpatch_processor(processor)
    patch_processor(processor, "dynres", keep=0.0625)
    assert kind == "page" or int(processor(image)["image_grid_thw"].prod()) < int(small["image_grid_thw"].prod()) / 10


def test_a_decode_at_one_eighth_gives_the_same_detail() -> None:
    """The decoder's scale of 1/8 uses only the DC coefficients, which are means of 8 x 8 pixels."""
    shipped = sorted((Path(tokenprune_demo.__file__).parent / "heldout_smol/images").glob("*.jpg"))[::4]
    assert len(shipped) > 50
    for file in [*(encode_jpeg(make()) for make in PICTURES.values()), *(path.read_bytes() for path in shipped)]:
        with Image.open(io.BytesIO(file)) as image:
            decoding.draft(image, 8)
            small = image.convert("RGB")
        (detail, text), (expected, expected_text) = (
            measure_detail(InputImage(picture).grey) for picture in (small, load_full(file).reduce(8))
        )
        assert text == expected_text and abs(detail - expected) < 0.01


def build_files() -> dict[str, bytes]:
    image, rng = photo(96, 128), np.random.default_rng(0)
    deep = Image.fromarray(rng.integers(0, 65535, (96, 128)).astype(np.uint16))
    frames = [photo(96, 128, seed=seed) for seed in range(3)]
    return {
        "PNG": encode(image, "PNG"),
        "alpha": encode(image.convert("RGBA"), "PNG"),
        "16 bits": encode(deep, "PNG"),
        "palette": encode(image.convert("P"), "PNG"),
        "transparent palette": encode(image.convert("P"), "GIF", transparency=3),
        "animated": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated WebP": encode(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "bilevel": encode(image.convert("1"), "PNG"),
        "TIFF": encode(image, "TIFF"),
        "BMP": encode(image, "BMP"),
    }


@each("kind", list(build_files()))
def test_other_formats_are_unchanged(kind: str) -> None:
    file = build_files()[kind]
    image = load_image(file)
    assert image.mode == "RGB" and image.tobytes() == load_full(file).tobytes()
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), max_visual_tokens=4)
    small, full = processor(load_image(file, processor=processor)), processor(load_full(file))
    assert torch.equal(small["pixel_values"], full["pixel_values"])


@each("kind", ["CMYK", "L", "progressive", "optimized", "4:4:4"])
def test_kinds_of_jpeg(kind: str) -> None:
    image, options = photo(600, 800), {}
    if kind in ("CMYK", "L"):
        image = image.convert(kind)
    else:
        options = {"4:4:4": {"subsampling": 0}}.get(kind, {kind: True})
    file = encode_jpeg(image, **options)
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), max_visual_tokens=64)
    check_near(load_image(file, processor=processor), load_image(encode(load_full(file), "PNG"), processor=processor))


def test_paths_and_unreadable_files(tmp_path: Any) -> None:
    file = encode_jpeg(photo(600, 800))
    path = tmp_path / "photo.jpg"
    path.write_bytes(file)
    assert load_image(path).tobytes() == load_image(str(path)).tobytes() == load_image(file).tobytes()
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), max_visual_tokens=64)
    for broken in (b"", b"no image", file[:300], file[: len(file) // 2]):
        with pytest.raises(OptionError, match="cannot read these bytes as an image"):
            load_image(broken, processor=processor)
    with pytest.raises(OptionError, match=r"cannot read .*missing\.jpg"):
        load_image(tmp_path / "missing.jpg")


def test_arguments_of_another_type_are_refused() -> None:
    for source in (5, None, io.BytesIO(b""), photo(8, 8), np.zeros((4, 4, 3), np.uint8)):
        with pytest.raises(OptionError, match=f"source must be a path or bytes, not {type(source).__name__}"):
            load_image(source)
    for height, width, images in (("a", 10, 1), (10, None, 1), (10.5, 10, 1), (10, 10, "a")):
        with pytest.raises(OptionError, match="must be ints"):
            tokenprune.count_visual_tokens(Qwen2VLImageProcessor(), height, width, images=images)


def test_the_pixel_limit_of_pillow_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encode_jpeg(photo(600, 800))
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), max_visual_tokens=64)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600 * 800 // 2 - 1)
    with pytest.raises(Image.DecompressionBombError):
        load_image(file, processor=processor)


def test_damaged_headers_never_hang() -> None:
    """Each damaged file is read, or gives a TokenPruneError or Pillow's error, within the time limit."""
    rng, file = random.Random(0), encode_jpeg(photo(150, 200), exif=build_orientation())
    processor = patch_processor(Qwen2VLImageProcessor(**LIMITS), max_visual_tokens=16)
    outcomes = {"read": 0, "refused": 0}
    start = time.monotonic()
    for _ in range(400):
        damaged = bytearray(file)
        for _ in range(rng.randint(1, 6)):
            offset = rng.randrange(2, 700)
            match rng.randrange(3):
                case 0:
                    damaged[offset] = rng.randrange(256)
                case 1:
                    del damaged[offset : offset + rng.randint(1, 20)]
                case 2:
                    damaged[offset:offset] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 20)))
        try:
            load_image(bytes(damaged), processor=processor)
            outcomes["read"] += 1
        except (TokenPruneError, Image.DecompressionBombError):
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes
    assert time.monotonic() - start < 300, "a file took too long"


def build_orientation() -> Image.Exif:
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    return exif


def test_a_scale_that_changes_the_tokens_is_not_used() -> None:
    """With scale 4 the token count would differ, so scale 2 is used."""
    needs = {(801, 600): 10, (201, 150): 11, (401, 300): 10, (101, 75): 10}
    assert find_scale(801, 600, lambda *size: Need((110, 90), needs[size])) == 2
    assert find_scale(801, 600, lambda *size: Need((110, 90))) == 4
    assert find_scale(801, 600, lambda *size: Need((101, 75), needs[size])) == 8
    assert find_scale(801, 600, lambda *size: None) == 1
    assert find_scale(801, 600, lambda *size: Need((102, 75))) == 4
