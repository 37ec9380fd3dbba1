# SPDX-License-Identifier: Apache-2.0
"""How text is told from other images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image

import tokenprune
from each import each
from guard_drawings import measured, page, planes, scene
from tokenprune.integrations.hf.guard import pixels as guard_pixels
from tokenprune.integrations.hf.guard.images import SIDE, compute_text_shares, split_blocks
from tokenprune.integrations.hf.guard.settings import TEXT_LIMIT
from tokenprune.models.families import Family

SCENES = ("noise", "stripes", "hills", "blocks", "plain")


def thresholds(side: int = 336) -> Image.Image:
    """Blocks on both sides of every limit of the measure: dots on paper, more or fewer, strong or faint, in lines."""
    rng, number = np.random.default_rng(1), side // SIDE
    values = np.zeros((side, side))
    for top, left in itertools.product(range(0, number * SIDE, SIDE), repeat=2):
        dots = rng.random((SIDE, SIDE)) < rng.uniform(0.02, 0.7)
        if rng.random() < 0.3:  # long strokes in one direction are crossed in the other alone
            dots[:] = dots[:, :1]
        values[top : top + SIDE, left : left + SIDE] = 128 + rng.uniform(-128, 127) * dots
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")


@each("side", [224, 336, 448])
@each("colours", [("white", "black"), ("#101030", "#e0e0d0"), ("#f0e8d0", "#504030")])
def test_documents_against_scenes(side: int, colours: tuple[str, str]) -> None:
    for letters in (8, 11, 16):
        assert measured(planes(page(side, letters, *colours))) > 1.5 * TEXT_LIMIT
    for kind in SCENES:
        assert measured(planes(scene(kind, side))) < TEXT_LIMIT / 2, kind


def test_photographs() -> None:
    """Of those that come with scikit-image, `page` shows text; docs/guides/guard.md has many more."""
    data = pytest.importorskip("skimage.data", reason="scikit-image is not installed, so there are no photographs")

    def share(name: str) -> float:
        image = Image.fromarray(getattr(data, name)()).convert("RGB")
        return measured(planes(image))

    assert share("page") > TEXT_LIMIT
    assert max(share(name) for name in ("astronaut", "coffee", "chelsea", "grass", "coins")) < TEXT_LIMIT


def test_a_image_with_one_sign_is_no_document() -> None:
    image = scene("hills")
    image.paste(page(60, 16), (40, 40))
    assert 0 < measured(planes(image)) < TEXT_LIMIT


def test_normalisation_does_not_matter() -> None:
    for image in (page(), scene("noise"), scene("hills"), thresholds()):
        pixels = planes(image)
        want = measured(pixels)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.481, 0.458, 0.408], [0.269, 0.261, 0.276]))
        assert measured((pixels - 0.5) / 0.5) == pytest.approx(want, abs=0.02)
        assert measured((pixels - mean) / std) == pytest.approx(want, abs=0.02)
        assert measured(255 * pixels) == pytest.approx(want, abs=0.02)
        assert measured(((pixels - 0.5) / 0.5).bfloat16()) == pytest.approx(want, abs=0.05)
        assert measured(1 - pixels) == pytest.approx(want, abs=0.02)  # white on black


def test_images_without_content() -> None:
    nan = torch.full((3, 56, 56), float("nan"))
    broken = planes(page(336)).clone()
    broken[:, :28, :28] = float("inf")
    assert measured(nan) == measured(torch.zeros(3, 56, 56)) == measured(torch.full((3, 84, 84), -2.1)) == 0
    assert measured(broken) > TEXT_LIMIT
    assert compute_text_shares(torch.zeros(0, 28, 28), torch.zeros(0, dtype=torch.long), 2).tolist() == [0, 0]


def naive(image: np.ndarray) -> float:
    """The measure as docs/guides/guard.md says it, block by block."""
    low, high = image.min(), image.max()
    text = busy = number = 0
    for top in range(0, image.shape[0] - SIDE + 1, SIDE):
        for left in range(0, image.shape[1] - SIDE + 1, SIDE):
            block = image[top : top + SIDE, left : left + SIDE]
            number += 1
            span = block.max() - block.min()
            if span <= 0.3 * (high - low):
                continue
            busy += 1
            light, dark = (block > block.max() - 0.2 * span).mean(), (block < block.min() + 0.2 * span).mean()
            above = block > block.min() + span / 2
            lines, columns = (above[:, 1:] != above[:, :-1]).mean(), (above[1:] != above[:-1]).mean()
            text += max(light, dark) > 0.5 and min(lines, columns) > 1.5 / 27
    return text / max(busy, number / 4)


def test_the_measure_is_the_naive_loop() -> None:
    images = [page(336), page(336, 20), scene("noise"), thresholds(336)]
    pixels = torch.stack([planes(image) for image in images])
    blocks = split_blocks(pixels)
    owner = torch.arange(4).repeat_interleave(blocks.shape[1])
    shuffled = torch.randperm(len(owner), generator=torch.Generator().manual_seed(0))
    got = compute_text_shares(blocks.flatten(0, 1)[shuffled], owner[shuffled], 4)
    for value, image in zip(got.tolist(), pixels.mean(1).numpy(), strict=True):
        assert value == pytest.approx(naive(image), abs=1e-6)


class Tower:
    """What the guard reads of a Qwen-VL adapter."""

    family = Family("qwen2_vl", patches="runs")

    class config:
        class vision_config:
            patch_size, spatial_merge_size, temporal_patch_size = 14, 2, 2


def patchified(image: torch.Tensor) -> torch.Tensor:
    """As Qwen2-VL's processor makes patches: two equal frames, the 2 x 2 patches of a token side by side."""
    height, width = image.shape[1] // 14, image.shape[2] // 14
    patches = image.expand(2, *image.shape).reshape(1, 2, 3, height // 2, 2, 14, width // 2, 2, 14)
    return patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(height * width, -1)


def test_patches_are_looked_at_like_whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [planes(page(336))[:, :, :224], planes(thresholds(224)), planes(page(448, 9))]
    sizes = torch.tensor([[1, one.shape[1] // 14, one.shape[2] // 14] for one in images])
    patches = torch.cat([patchified(one) for one in images])
    got = guard_pixels.measure_text(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes}).read()
    assert got == pytest.approx([measured(one) for one in images], abs=1e-6)
    seen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            guard_pixels, "compute_text_shares", lambda blocks, owner, count: seen.append(blocks) or torch.zeros(count)
        )
        guard_pixels.measure_text(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes})
    torch.testing.assert_close(seen[0], torch.cat([split_blocks(one[None])[0] for one in images]))
    for wrong in ({"image_grid_thw": None}, {"image_grid_thw": sizes[:2]}, {"pixel_values": patches[:, :-1]}):
        assert (
            guard_pixels.measure_text(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes} | wrong)
            is None
        )


def test_tiles_frames_and_what_is_not_looked_at() -> None:
    adapter = type("Other", (), {"family": Family("other")})
    text, noise = planes(page(336)), planes(scene("noise"))
    tiles = torch.stack([torch.stack([text, text]), torch.stack([text, noise])])
    got = guard_pixels.measure_text(adapter, "image", {"pixel_values": tiles}).read()
    assert got[0] == pytest.approx(measured(text)) and 0 < got[1] < got[0]
    video = torch.stack([text] + [noise] * 15)[None]  # every other frame is looked at
    even = guard_pixels.measure_text(adapter, "video", {"pixel_values_videos": video[:, ::2]}).read()
    assert guard_pixels.measure_text(adapter, "video", {"pixel_values_videos": video}).read() == even
    shapes = [(4, 12), (1, 9, 12), (1, 3, 16, 16), (1, 5, 56, 56), (0, 3, 56, 56)]
    for pixels in (None, torch.zeros(1, 3, 56, 56, dtype=torch.uint8), *map(torch.zeros, shapes)):
        assert guard_pixels.measure_text(adapter, "image", {"pixel_values": pixels}) is None


@pytest.fixture(autouse=True)
def unpatched(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "subject" in request.fixturenames:
        assert not tokenprune.is_patched(request.getfixturevalue("subject").model)
