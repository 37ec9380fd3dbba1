# SPDX-License-Identifier: Apache-2.0
"""The guard without a model: the shipped table, kinds of prompts, settings, and text in images."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tokenprune
from each import each
from guard_drawings import measured, page, planes, scene
from guard_questions import FRESH, KNOWN, TRIED
from tests.unit.docs.test_docs import generator
from tokenprune import Guard, OptionError
from tokenprune.integrations.hf.guard import pixels as guard_pixels
from tokenprune.integrations.hf.guard.floors import Floors, load_floors
from tokenprune.integrations.hf.guard.images import SIDE, compute_text_shares, split_blocks
from tokenprune.integrations.hf.guard.prompts import KindReader
from tokenprune.integrations.hf.guard.settings import KINDS, TEXT_LIMIT
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.models.families import Family
from tokenprune_bench.results import read_records
from tokenprune_demo.heldout import load_heldout


def test_table_and_page_equal_the_script_output() -> None:
    script = generator("guard")
    table = script.table(script.records())
    assert script.TABLE.read_text(encoding="utf-8") == script.written(table)
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(text, table) and "**0.25**" in text


def test_floors_limit_the_loss() -> None:
    """In the raw counts, no kind of question lost more than ten points at or above its floor."""
    script, table = generator("guard"), load_floors()
    raised = 0
    for name, judged in script.JUDGED.items():
        records = [record for record in read_records(script.RESULTS / name) if record["record"] == "result"]
        base = next(record for record in records if record["method"] == "unpatched")
        for record in records:
            if record is base or table.get_loss(record["method"], "text", 0.5) is None or record["keep"] == 0.33:
                continue  # measured with one model only
            for kind, questions in judged.items():
                floor = table.get_floor(record["method"], kind)
                for question in questions:
                    lost = (
                        base["correct"][question] / base["n"][question]
                        - record["correct"][question] / record["n"][question]
                    )
                    assert record["keep"] < floor or lost <= table.limit + 1e-9
                raised += floor < 1
    assert raised > 60
    assert table.get_floor("random", "text") == table.get_floor("downsample", "counting") == 1.0


def test_a_floor_is_that_of_the_stricter_model() -> None:
    script, table = generator("guard"), load_floors()
    by_model = {record.model: Floors(script.table([record])) for record in script.records()}
    assert set(by_model) == {"demo_vlm", "demo_smol"}
    for method in ("divprune", "dart", "fastv", "pool", "vscan"):
        for kind in KINDS:
            assert table.get_floor(method, kind) >= by_model["demo_vlm"].get_floor(method, kind)
    # demo_vlm was measured without pages and charts, and lost no text questions at keep=0.25.
    assert by_model["demo_vlm"].get_floor("divprune", "text") == 0.25 < table.get_floor("divprune", "text") == 0.5
    assert table.get_loss("divprune", "text", 0.25).model == "demo_smol" != table.get_loss("random", "text", 0.5).model
    # The guard watches the default method of README.md and `tokenprune recommend` at its default keep.
    assert min(table.get_floor(DEFAULT_METHOD, kind) for kind in KINDS) > 0.25


def test_a_method_that_was_not_measured_has_the_median() -> None:
    script = generator("guard")
    measured = [name for name in tokenprune.available_methods() if load_floors().get_loss(name, "text", 0.5)]
    for kind in KINDS:
        floors = sorted(load_floors().get_floor(name, kind) for name in measured)
        assert load_floors().get_floor("somebody_elses", kind) == floors[len(floors) // 2]
    assert load_floors().get_loss("somebody_elses", "text", 0.5) is None
    assert all(set(judged) == set(KINDS) for judged in script.JUDGED.values())
    loss = load_floors().get_loss("dart", "counting", 0.3)
    assert (loss.keep, round(loss.points), loss.model) == (0.25, 41, "demo_smol")
    assert load_floors().list_safe_methods("text", 0.25) == ["pool"]
    assert "random" not in load_floors().list_safe_methods("text", 0.5)


def compute_rates(questions: list[tuple[str, set[str]]]) -> tuple[float, float]:
    """Return precision and recall over all kinds."""
    reader = KindReader()
    pairs = [(set(reader.kinds(text)), expected) for text, expected in questions]
    hits = sum(len(kinds & expected) for kinds, expected in pairs)
    return hits / sum(len(kinds) for kinds, _ in pairs), hits / sum(len(expected) for _, expected in pairs)


def test_kinds_of_prompts() -> None:
    """As stated in docs/guides/guard.md: patterns were tuned on some questions and tested on later ones."""
    assert compute_rates(KNOWN) == (1.0, 1.0)
    assert min(compute_rates(TRIED)) > 0.95
    precision, recall = compute_rates(FRESH)
    assert precision == 1.0 and 0.80 < recall < 0.85
    judged = {
        question_kind: kind
        for kind, kinds in generator("guard").JUDGED["bench.jsonl"].items()
        for question_kind in kinds
    }
    for example in load_heldout():
        assert KindReader().kinds(example.question) == ((judged[example.kind],) if example.kind in judged else ())


def test_patterns_of_the_user() -> None:
    reader = KindReader({"text": [r"\bhowever\b"], "counting": ["wieviele"]})
    assert reader.kinds("WIEVIELE Hunde? However") == ("text", "counting")
    assert KindReader().kinds("Wieviele Hunde? However") == ()


@each(
    "bad",
    [
        dict(mode="loud"), dict(mode=None), dict(patterns={"ocr": []}), dict(patterns=["x"]), dict(text_limit=0),
        dict(patterns={"text": "x"}), dict(patterns={"text": ["("]}), dict(patterns={"text": [3]}),
        dict(floors={"text": 0}), dict(floors={"text": 1.5}), dict(floors={"text": True}), dict(floors={"text": "0.5"}),
        dict(floors={"text": -3}), dict(floors={"text": 2.5}), dict(text_limit=2), dict(floors={"words": 300}),
        dict(floors={"words": 0.5}), dict(text_limit=float("nan")),
    ],
)  # fmt: skip
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="guard"):
        Guard(**bad)


SCENES = ("noise", "stripes", "hills", "blocks", "plain")


def make_threshold_image(side: int = 336) -> Image.Image:
    """Draw blocks on both sides of each threshold: dots with varying density, contrast and direction."""
    rng, num_blocks = np.random.default_rng(1), side // SIDE
    values = np.zeros((side, side))
    for top, left in itertools.product(range(0, num_blocks * SIDE, SIDE), repeat=2):
        dots = rng.random((SIDE, SIDE)) < rng.uniform(0.02, 0.7)
        if rng.random() < 0.3:  # long strokes are crossed in one direction only
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
    """Of the images of scikit-image only `page` is text; docs/guides/guard.md has more."""
    data = pytest.importorskip("skimage.data", reason="scikit-image is not installed, which has the photographs")

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
    for image in (page(), scene("noise"), scene("hills"), make_threshold_image()):
        pixels = planes(image)
        want = measured(pixels)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.481, 0.458, 0.408], [0.269, 0.261, 0.276]))
        assert measured((pixels - 0.5) / 0.5) == pytest.approx(want, abs=0.02)
        assert measured((pixels - mean) / std) == pytest.approx(want, abs=0.02)
        assert measured(255 * pixels) == pytest.approx(want, abs=0.02)
        assert measured(((pixels - 0.5) / 0.5).bfloat16()) == pytest.approx(want, abs=0.05)
        assert measured(1 - pixels) == pytest.approx(want, abs=0.02)  # white text on black


def test_images_without_content() -> None:
    nan = torch.full((3, 56, 56), float("nan"))
    broken = planes(page(336)).clone()
    broken[:, :28, :28] = float("inf")
    assert measured(nan) == measured(torch.zeros(3, 56, 56)) == measured(torch.full((3, 84, 84), -2.1)) == 0
    assert measured(broken) > TEXT_LIMIT
    assert compute_text_shares(torch.zeros(0, 28, 28), torch.zeros(0, dtype=torch.long), 2).tolist() == [0, 0]


def measure_by_loop(image: np.ndarray) -> float:
    """Compute the measure of docs/guides/guard.md block by block."""
    low, high = image.min(), image.max()
    text = busy = num_blocks = 0
    for top in range(0, image.shape[0] - SIDE + 1, SIDE):
        for left in range(0, image.shape[1] - SIDE + 1, SIDE):
            block = image[top : top + SIDE, left : left + SIDE]
            num_blocks += 1
            span = block.max() - block.min()
            if span <= 0.3 * (high - low):
                continue
            busy += 1
            light, dark = (block > block.max() - 0.2 * span).mean(), (block < block.min() + 0.2 * span).mean()
            above = block > block.min() + span / 2
            lines, columns = (above[:, 1:] != above[:, :-1]).mean(), (above[1:] != above[:-1]).mean()
            text += max(light, dark) > 0.5 and min(lines, columns) > 1.5 / 27
    return text / max(busy, num_blocks / 4)


def test_the_measure_is_the_naive_loop() -> None:
    images = [page(336), page(336, 20), scene("noise"), make_threshold_image(336)]
    pixels = torch.stack([planes(image) for image in images])
    blocks = split_blocks(pixels)
    owner = torch.arange(4).repeat_interleave(blocks.shape[1])
    shuffled = torch.randperm(len(owner), generator=torch.Generator().manual_seed(0))
    got = compute_text_shares(blocks.flatten(0, 1)[shuffled], owner[shuffled], 4)
    for value, image in zip(got.tolist(), pixels.mean(1).numpy(), strict=True):
        assert value == pytest.approx(measure_by_loop(image), abs=1e-6)


class Tower:
    """The attributes of a Qwen-VL adapter that the guard reads."""

    family = Family("qwen2_vl", patches="runs")

    class config:
        class vision_config:
            patch_size, spatial_merge_size, temporal_patch_size = 14, 2, 2


def make_patches(image: torch.Tensor) -> torch.Tensor:
    """Return patches in the order of Qwen2-VL's processor: two equal frames, 2 x 2 patches per token."""
    height, width = image.shape[1] // 14, image.shape[2] // 14
    patches = image.expand(2, *image.shape).reshape(1, 2, 3, height // 2, 2, 14, width // 2, 2, 14)
    return patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(height * width, -1)


def test_patches_measure_like_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [planes(page(336))[:, :, :224], planes(make_threshold_image(224)), planes(page(448, 9))]
    sizes = torch.tensor([[1, image.shape[1] // 14, image.shape[2] // 14] for image in images])
    patches = torch.cat([make_patches(image) for image in images])
    got = guard_pixels.measure_text(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes}).read()
    assert got == pytest.approx([measured(image) for image in images], abs=1e-6)
    recorded: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            guard_pixels,
            "compute_text_shares",
            lambda blocks, owner, count: recorded.append(blocks) or torch.zeros(count),
        )
        guard_pixels.measure_text(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes})
    torch.testing.assert_close(recorded[0], torch.cat([split_blocks(image[None])[0] for image in images]))
    for wrong in ({"image_grid_thw": None}, {"image_grid_thw": sizes[:2]}, {"pixel_values": patches[:, :-1]}):
        assert (
            guard_pixels.measure_text(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes} | wrong)
            is None
        )


def test_tiles_frames_and_unsupported_pixels() -> None:
    adapter = type("Other", (), {"family": Family("other")})
    text, noise = planes(page(336)), planes(scene("noise"))
    tiles = torch.stack([torch.stack([text, text]), torch.stack([text, noise])])
    got = guard_pixels.measure_text(adapter, "image", {"pixel_values": tiles}).read()
    assert got[0] == pytest.approx(measured(text)) and 0 < got[1] < got[0]
    video = torch.stack([text] + [noise] * 15)[None]  # only every second frame is measured
    even = guard_pixels.measure_text(adapter, "video", {"pixel_values_videos": video[:, ::2]}).read()
    assert guard_pixels.measure_text(adapter, "video", {"pixel_values_videos": video}).read() == even
    shapes = [(4, 12), (1, 9, 12), (1, 3, 16, 16), (1, 5, 56, 56), (0, 3, 56, 56)]
    for pixels in (None, torch.zeros(1, 3, 56, 56, dtype=torch.uint8), *map(torch.zeros, shapes)):
        assert guard_pixels.measure_text(adapter, "image", {"pixel_values": pixels}) is None
