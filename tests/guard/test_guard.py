# SPDX-License-Identifier: Apache-2.0
"""The guard: its table and patterns, how text is told from images, and what a patched model does with all that."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import tokenprune
from basics import snapshot
from guard_questions import FRESH, KNOWN, TRIED
from tests.docs.test_site import tool
from tokenprune import Budget, Guard, OptionError, UnsupportedSetupError
from tokenprune.base import Method
from tokenprune.bench.heldout import load_heldout
from tokenprune.bench.model import Model, load
from tokenprune.guard.floors import shipped
from tokenprune.guard.images import SIDE, AsyncValues, blocks_of, text_shares
from tokenprune.guard.prompts import Reader
from tokenprune.guard.settings import KINDS, TEXT_LIMIT
from tokenprune.integrations.hf.guard import pixels as guard_pixels
from tokenprune.integrations.hf.guard.part import GuardPart
from zoo import FAMILIES

# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_script_makes_of_the_records() -> None:
    script = tool("guard")
    made = script.table(script.read_records(script.RECORDS))
    assert script.TABLE.read_text(encoding="utf-8") == script.written(made)
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(text, made) and "**0.25**" in text


def test_floors_hold_what_they_promise() -> None:
    """By the raw counts: at the floor, and above it, no kind of question lost more than ten of a hundred."""
    script, table = tool("guard"), shipped()
    records = [one for one in script.read_records(script.RECORDS) if one["record"] == "result"]
    base = records[0]
    raised = 0
    for record in records[1:]:
        for kind, judged in script.JUDGED.items():
            floor = table.of(record["method"], kind)
            for one in judged:
                lost = base["correct"][one] / base["n"][one] - record["correct"][one] / record["n"][one]
                assert record["keep"] < floor or lost <= table.limit + 1e-9
            raised += floor < 1
    assert raised > len(records)
    assert table.of("random", "text") == table.of("downsample", "counting") == 1.0
    assert table.of("fastv", "text") == 0.11


def test_a_method_that_was_not_measured_has_the_median() -> None:
    script = tool("guard")
    measured = [name for name in tokenprune.available_methods() if shipped().loss(name, "text", 0.5)]
    for kind in KINDS:
        floors = sorted(shipped().of(name, kind) for name in measured)
        assert shipped().of("somebody_elses", kind) == floors[len(floors) // 2]
    assert shipped().loss("somebody_elses", "text", 0.5) is None
    assert set(script.JUDGED) == set(KINDS)
    loss = shipped().loss("dart", "counting", 0.3)
    assert (loss.keep, round(loss.points)) == (0.25, 40)
    assert shipped().safe("text", 0.11)[0] in ("dyrate", "fastv") and "random" not in shipped().safe("text", 0.5)


# -- prompts -----------------------------------------------------------------------------------------------------------


def rates(questions: list[tuple[str, set[str]]]) -> tuple[float, float]:
    """Precision and recall over all kinds."""
    reader = Reader()
    pairs = [(set(reader.kinds(text)), wanted) for text, wanted in questions]
    hits = sum(len(found & wanted) for found, wanted in pairs)
    return hits / sum(len(found) for found, _ in pairs), hits / sum(len(wanted) for _, wanted in pairs)


def test_kinds_of_prompts() -> None:
    """As docs/guard.md says: on the questions that the patterns were mended on, and on those written afterwards."""
    assert rates(KNOWN) == (1.0, 1.0)
    assert min(rates(TRIED)) > 0.95
    precision, recall = rates(FRESH)
    assert precision == 1.0 and 0.80 < recall < 0.85
    judged = {one: kind for kind, kinds in tool("guard").JUDGED.items() for one in kinds}
    for example in load_heldout():
        assert Reader().kinds(example.question) == ((judged[example.kind],) if example.kind in judged else ())


def test_patterns_of_the_user() -> None:
    reader = Reader({"text": [r"\bhowever\b"], "counting": ["wieviele"]})
    assert reader.kinds("WIEVIELE Hunde? However") == ("text", "counting")
    assert Reader().kinds("Wieviele Hunde? However") == ()


@pytest.mark.parametrize(
    "bad",
    [
        dict(mode="loud"), dict(mode=None), dict(patterns={"ocr": []}), dict(patterns=["x"]), dict(text_limit=0),
        dict(patterns={"text": "x"}), dict(patterns={"text": ["("]}), dict(patterns={"text": [3]}),
        dict(floors={"text": 0}), dict(floors={"text": 1.5}), dict(floors={"text": True}), dict(floors={"text": "0.5"}),
        dict(floors={"words": 0.5}), dict(text_limit=float("nan")),
    ],
)  # fmt: skip
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="guard"):
        Guard(**bad)


# -- images ----------------------------------------------------------------------------------------------------------


def page(side: int = 336, letters: int = 12, paper: str = "white", ink: str = "black") -> Image.Image:
    image = Image.new("RGB", (side, side), paper)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=letters)
    for line in range(int(side / letters / 1.5)):
        text = f"{line} The invoice of July for 13 lazy dogs, total 45.60 " * 3
        draw.text((8, 5 + 1.5 * line * letters), text, ink, font)
    return image


def scene(kind: str, side: int = 336) -> Image.Image:
    rng, y = np.random.default_rng(0), np.linspace(0, 1, side)
    if kind == "noise":
        values = rng.integers(0, 256, (side, side))
    elif kind == "stripes":
        values = 255 * (np.arange(side) // 4 % 2)[None].repeat(side, 0)
    elif kind == "hills":
        values = 128 + 120 * np.sin(9 * y)[:, None] * np.cos(7 * y)[None] + rng.normal(0, 3, (side, side))
    elif kind == "blocks":  # large plain shapes
        values = np.kron(rng.integers(0, 256, (8, 8)), np.ones((side // 8, side // 8)))
    else:
        values = np.full((side, side), 90)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")


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


def planes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1) / 255


def measured(pixels: torch.Tensor) -> float:
    blocks = blocks_of(pixels[None])[0]
    return float(text_shares(blocks, torch.zeros(len(blocks), dtype=torch.long), 1))


@pytest.mark.parametrize("side", [224, 336, 448])
@pytest.mark.parametrize("colours", [("white", "black"), ("#101030", "#e0e0d0"), ("#f0e8d0", "#504030")])
def test_documents_against_scenes(side: int, colours: tuple[str, str]) -> None:
    for letters in (8, 11, 16):
        assert measured(planes(page(side, letters, *colours))) > 1.5 * TEXT_LIMIT
    for kind in SCENES:
        assert measured(planes(scene(kind, side))) < TEXT_LIMIT / 2, kind


def test_photographs() -> None:
    """Of those that come with scikit-image, `page` shows text; docs/guard.md has many more."""
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
    assert text_shares(torch.zeros(0, 28, 28), torch.zeros(0, dtype=torch.long), 2).tolist() == [0, 0]


def naive(image: np.ndarray) -> float:
    """The measure as docs/guard.md says it, block by block."""
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
    blocks = blocks_of(pixels)
    owner = torch.arange(4).repeat_interleave(blocks.shape[1])
    shuffled = torch.randperm(len(owner), generator=torch.Generator().manual_seed(0))
    got = text_shares(blocks.flatten(0, 1)[shuffled], owner[shuffled], 4)
    for value, image in zip(got.tolist(), pixels.mean(1).numpy(), strict=True):
        assert value == pytest.approx(naive(image), abs=1e-6)


class Tower:
    """What the guard reads of a Qwen-VL adapter."""

    patch_layout = "runs"

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
    got = guard_pixels.look(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes}).read()
    assert got == pytest.approx([measured(one) for one in images], abs=1e-6)
    seen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            guard_pixels, "text_shares", lambda blocks, owner, count: seen.append(blocks) or torch.zeros(count)
        )
        guard_pixels.look(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes})
    torch.testing.assert_close(seen[0], torch.cat([blocks_of(one[None])[0] for one in images]))
    for wrong in ({"image_grid_thw": None}, {"image_grid_thw": sizes[:2]}, {"pixel_values": patches[:, :-1]}):
        assert guard_pixels.look(Tower, "image", {"pixel_values": patches, "image_grid_thw": sizes} | wrong) is None


def test_tiles_frames_and_what_is_not_looked_at() -> None:
    adapter = type("Other", (), {"patch_layout": None})
    text, noise = planes(page(336)), planes(scene("noise"))
    tiles = torch.stack([torch.stack([text, text]), torch.stack([text, noise])])
    got = guard_pixels.look(adapter, "image", {"pixel_values": tiles}).read()
    assert got[0] == pytest.approx(measured(text)) and 0 < got[1] < got[0]
    video = torch.stack([text] + [noise] * 15)[None]  # every other frame is looked at
    even = guard_pixels.look(adapter, "video", {"pixel_values_videos": video[:, ::2]}).read()
    assert guard_pixels.look(adapter, "video", {"pixel_values_videos": video}).read() == even
    shapes = [(4, 12), (1, 9, 12), (1, 3, 16, 16), (1, 5, 56, 56), (0, 3, 56, 56)]
    for pixels in (None, torch.zeros(1, 3, 56, 56, dtype=torch.uint8), *map(torch.zeros, shapes)):
        assert guard_pixels.look(adapter, "image", {"pixel_values": pixels}) is None


# -- patched models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject() -> Model:
    return load()


@pytest.fixture(autouse=True)
def unpatched(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "subject" in request.fixturenames:
        assert not tokenprune.is_patched(request.getfixturevalue("subject").model)


QUESTIONS = ("what color is the circle?", "how many circles?", "where is the ring?", "what does the sign say?")
RISKS = ((), ("counting",), ("grounding",), ("text",))


def asked(subject: Model, images: list[Any] | None = None, questions: tuple[str, ...] = QUESTIONS) -> dict[str, Any]:
    image = load_heldout(limit=1)[0].image
    return subject.inputs(images or [image] * len(questions), questions)


@torch.no_grad()
def run(subject: Model, inputs: dict[str, Any], **options: Any) -> tuple[torch.Tensor, Any]:
    # A forward would count padding as positions.
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with tokenprune.patched(subject.model, **options):
        return subject.model(**inputs, position_ids=places).logits[:, -1], tokenprune.stats(subject.model)


AUTO = [("dart", 0.11), ("pool", 0.11), ("vscan", 0.11), ("vscan", 30), ("divprune", 20),
        ("fastv", Budget(average_tokens=100)), ("uniform", Budget(keep=0.2, per="prompt"))]  # fmt: skip


@pytest.mark.parametrize(("method", "keep"), AUTO, ids=[f"{name} {keep}" for name, keep in AUTO])
def test_auto_is_a_patch_with_the_raised_budget(subject: Model, method: str, keep: Any) -> None:
    """Row by row, exactly; and in a batch, where rows then keep different numbers, to rounding."""
    auto = dict(method=method, keep=keep, guard="auto", processor=subject.processor)
    inputs, per = asked(subject), getattr(keep, "per", "image")
    batch, stats = run(subject, inputs, **auto)
    assert [row.prompt for row in stats.guard] == list(RISKS)
    for row, kinds in enumerate(RISKS):
        alone = asked(subject, questions=QUESTIONS[row : row + 1])
        got, guarded = run(subject, alone, **auto)
        by_hand, plain = keep, run(subject, alone, method=method, keep=keep, guard="off")[1]
        if kinds:
            floor = Budget(keep=float(shipped().of(method, kinds[0])), per=per)
            raised = run(subject, alone, method=method, keep=floor, guard="off")[1]
            if raised.visual_tokens_average > plain.visual_tokens_average:
                by_hand = floor
        want, hand = run(subject, alone, method=method, keep=by_hand, guard="off")
        assert torch.equal(got, want)
        assert guarded.visual_tokens_per_layer == hand.visual_tokens_per_layer
        raised = by_hand is not keep
        assert guarded.guard[0].raised == stats.guard[row].raised == bool(guarded.guard[0].risks) == raised
        assert guarded.guard[0].kept == stats.guard[row].kept == hand.visual_tokens_out
        torch.testing.assert_close(batch[row], want[0], atol=2e-4, rtol=1e-4)
    assert sum(row.kept for row in stats.guard) == stats.visual_tokens_out
    assert any(row.raised for row in stats.guard) and not stats.guard[0].raised


def test_a_image_of_text_is_raised_alone(subject: Model) -> None:
    """Of two images in a prompt, in a batch, in forward and in generate, beams included."""
    photo, text = load_heldout(limit=1)[0].image, page(224)
    options = dict(method="random", keep=0.1, guard=Guard("auto", floors={"text": 0.5}), processor=subject.processor)
    inputs = asked(subject, [[photo, text], [photo, photo]], QUESTIONS[:1] * 2)

    def check(stats: Any, copies: int = 1) -> None:
        flags = [row.raised for row in stats.guard]
        assert flags == [True] * copies + [False] * copies
        assert stats.visual_tokens_out == copies * (26 + 128 + 26 + 26)
        assert stats.guard[0].image > TEXT_LIMIT > stats.guard[-1].image
        assert [row.risks for row in stats.guard] == [("text",)] * copies + [()] * copies
        assert stats.guard[0].kept == 26 + 128 and stats.guard[0].tokens == 512

    check(run(subject, inputs, **options)[1])
    with tokenprune.patched(subject.model, **options):
        subject.model.generate(**inputs, max_new_tokens=2, do_sample=False)
        check(tokenprune.stats(subject.model))
        subject.model.generate(**inputs, max_new_tokens=2, do_sample=False, num_beams=2)
        check(tokenprune.stats(subject.model), 2)


def test_without_a_tokenizer_images_alone_are_looked_at(subject: Model) -> None:
    inputs = asked(subject, [page(224), scene("hills", 224)], ("how many circles?",) * 2)
    _, stats = run(subject, inputs, method="random", keep=0.2, guard="auto")
    assert [row.prompt for row in stats.guard] == [None, None]
    assert [row.raised for row in stats.guard] == [True, False]
    _, stats = run(subject, inputs, method="random", keep=0.2, guard="auto", processor=subject.processor.tokenizer)
    assert [row.prompt for row in stats.guard] == [("counting",)] * 2


def test_composed_methods_leave_each_other_enough(subject: Model) -> None:
    """Each cut leaves what its method needs of the whole image, not of what arrives."""
    options = dict(method=["divprune", "fastv"], keep=0.2, processor=subject.processor)
    inputs = asked(subject, questions=QUESTIONS[3:])  # text: divprune needs 0.25, fastv 0.11
    _, stats = run(subject, inputs, guard="auto", **options)
    assert stats.visual_tokens_per_layer == [64, 64, 28, 28, 28, 28]
    _, stats = run(subject, inputs, guard="off", method=options["method"], keep=0.2)
    assert stats.visual_tokens_per_layer == [51, 51, 10, 10, 10, 10]
    assert stats.guard is None


@pytest.mark.parametrize("method", ["random", "dart", "tome", "dyrate"])
def test_warn_changes_nothing(subject: Model, method: str) -> None:
    inputs = asked(subject)
    off, plain = run(subject, inputs, method=method, keep=0.2, guard="off")
    warn, stats = run(subject, inputs, method=method, keep=0.2, processor=subject.processor)
    assert torch.equal(off, warn)
    assert stats.visual_tokens_per_layer == plain.visual_tokens_per_layer
    assert plain.guard is None and "guard" not in repr(plain)
    at_risk = [row.risks for row in stats.guard]
    low = [tuple(kind for kind in kinds if shipped().of(method, kind) > 0.2) for kinds in RISKS]
    assert at_risk == low and any(low)
    assert f"guard: {sum(map(bool, low))} of 4 rows at risk, 0 raised" in repr(stats)
    assert stats.as_dict()["guard"][1]["risks"] == ("counting",)


def test_each_reason_is_said_once(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    inputs = asked(subject, [page(224), *[load_heldout(limit=1)[0].image] * 3])
    for _ in range(2):  # a new patch says it again
        caplog.clear()
        with tokenprune.patched(subject.model, "random", keep=0.2, processor=subject.processor):
            for _ in range(2):
                subject.model.generate(**inputs, max_new_tokens=2)
        said = [record for record in caplog.records if record.name == "tokenprune"]
        assert [record.levelno for record in said] == [logging.WARNING] * 4
        text = caplog.text
        for part in ("looks like text", "asks to read", "asks where", "asks to count"):
            assert text.count(part) == 1
        assert "random keeps 20%" in text and "at keep=0.25 it lost 41 points" in text and "(98 to 57 % right)" in text
        assert 'guard="auto"' in text and 'guard="off"' in text and "keep=0.5;" in text and "fastv" in text


def test_nothing_is_said_in_vain(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    inputs = asked(subject)
    run(subject, asked(subject, questions=QUESTIONS[:1]), method="random", keep=0.2, processor=subject.processor)
    run(subject, inputs, method="random", keep=0.2, guard="off")
    run(subject, inputs, method="random", keep=0.2, guard="auto", processor=subject.processor)
    run(subject, inputs, method="fastv", keep=0.5, processor=subject.processor)
    assert not [record for record in caplog.records if record.name == "tokenprune"]


class Waiting(AsyncValues):
    """A verdict that has not arrived yet."""

    arrived = False

    def ready(self) -> bool:
        return Waiting.arrived


def test_a_verdict_that_comes_later(subject: Model, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """It is said with the first call that finds it there; whoever asks for the statistics waits for it."""
    monkeypatch.setattr(guard_pixels, "AsyncValues", Waiting)
    inputs = asked(subject, [page(224)], QUESTIONS[:1])
    with tokenprune.patched(subject.model, "random", keep=0.2), torch.no_grad():
        monkeypatch.setattr(Waiting, "arrived", False)
        output = subject.model(**inputs, use_cache=True)
        step = dict(input_ids=inputs["input_ids"][:, -1:], past_key_values=output.past_key_values)
        subject.model(**step)
        assert "looks like text" not in caplog.text
        monkeypatch.setattr(Waiting, "arrived", True)
        subject.model(**step)
        assert caplog.text.count("looks like text") == 1
        monkeypatch.setattr(Waiting, "arrived", False)
        subject.model(**inputs)
        assert tokenprune.stats(subject.model).guard[0].risks == ("text",)


def parts(model: Any) -> list[GuardPart]:
    return [part for part in model._tokenprune_patch.engine.parts if isinstance(part, GuardPart)]


def test_where_there_is_nothing_to_guard_nothing_is_attached(subject: Model) -> None:
    model = subject.model
    was = snapshot(model)
    for options, number in (
        (dict(method="random", keep=1.0), 0), (dict(method="fastv", keep=0.6), 0), (dict(method="pevlm"), 0),
        (dict(method="fastv", keep=0.3), 1), (dict(method="fastv", keep=200), 1), (dict(method="random", keep=0.9), 1),
        (dict(method="fastv", keep=0.3, guard="off"), 0), (dict(method="fastv", keep=0.3, guard=Guard("off")), 0),
        (dict(method="random", keep=0.4, guard=Guard(floors=dict.fromkeys(KINDS, 0.3))), 0),
    ):  # fmt: skip
        try:
            with tokenprune.patched(model, **options):
                assert len(parts(model)) == number, options
                assert model._tokenprune_patch.engine._reads_text is False
        except UnsupportedSetupError:
            assert options["method"] == "pevlm"  # refuses models without videos
        assert snapshot(model) == was


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(guard="loud"), OptionError, "guard='loud'.*'warn', 'auto', 'off'"),
        (dict(guard=True), OptionError, "guard=True"),
        (dict(processor=object()), OptionError, "no tokenizer"),
        (dict(method="tome", guard="auto"), UnsupportedSetupError, 'IN_ENCODER: use guard="warn"'),
        (dict(method="downsample", guard="auto", processor="demo"), UnsupportedSetupError, "PRE_ENCODER"),
        (dict(method="dyrate", guard="auto"), UnsupportedSetupError, "DECODE"),
        (dict(method=["tome", "dart"], guard="auto"), UnsupportedSetupError, "tome acts at IN_ENCODER"),
    ],
)
def test_refusals_leave_no_trace(subject: Model, options: dict, error: type, message: str) -> None:
    if options.get("processor") == "demo":
        options = options | {"processor": subject.processor}
    was = snapshot(subject.model)
    with pytest.raises(error, match=message):
        tokenprune.patch(subject.model, **dict(method="dart", keep=0.2) | options)
    assert snapshot(subject.model) == was and not tokenprune.is_patched(subject.model)


@pytest.mark.parametrize("processor", ["demo", "image processor", None])
@torch.no_grad()
def test_a_processor_that_nobody_needs_is_taken(subject: Model, processor: str | None) -> None:
    """With the guard off, scripts that always pass one need no case of their own; nothing reads or changes it."""
    whole = subject.processor
    given = {"demo": whole, "image processor": whole.image_processor, None: None}[processor]
    inputs, kind = asked(subject), type(whole.image_processor)
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="off"):
        want = subject.model(**inputs).logits
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="off", processor=given):
        assert torch.equal(subject.model(**inputs).logits, want)
        assert tokenprune.stats(subject.model).guard is None
        assert type(whole.image_processor) is kind


def test_methods_on_pixels_are_judged_by_their_keep(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    with tokenprune.patched(subject.model, "downsample", keep=0.5, processor=subject.processor):
        inputs = asked(subject)
        subject.model.generate(**inputs, max_new_tokens=1)
        assert [row.risks for row in tokenprune.stats(subject.model).guard] == list(RISKS)
    assert "downsample keeps 50%" in caplog.text and 'guard="auto"' not in caplog.text


def test_a_method_of_somebody_else(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Theirs(Method):
        name = "theirs"

        def score(self, tokens: Any) -> torch.Tensor:
            return tokens.hidden.norm(dim=-1)

    _, stats = run(subject, asked(subject), method=Theirs(), keep=0.2, processor=subject.processor)
    assert [row.risks for row in stats.guard] == list(RISKS)
    assert "it was not measured on such questions" in caplog.text


def test_later_turns_are_not_looked_at(subject: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, reads = asked(subject, questions=QUESTIONS[1:2]), []
    read = GuardPart._read
    monkeypatch.setattr(GuardPart, "_read", lambda part, call: reads.append(call) or read(part, call))
    auto = dict(method="random", keep=0.2, guard="auto", processor=subject.processor)
    with tokenprune.patched(subject.model, **auto), torch.no_grad():
        cache = subject.model(**inputs, use_cache=True).past_key_values
        assert tokenprune.stats(subject.model).guard[0].raised
        subject.model(input_ids=inputs["input_ids"][:, -3:], past_key_values=cache)
    assert len(reads) == 1


def test_copies(subject: Model) -> None:
    """Of a patched model that has a verdict waiting, and of verdicts."""
    inputs = asked(subject)
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="auto", processor=subject.processor):
        want = subject.generate(inputs)
        fresh = tokenprune.patch(load().model, "random", keep=0.2, guard="auto", processor=subject.processor)
        for other in (copy.deepcopy(subject.model), pickle.loads(pickle.dumps(fresh))):
            with torch.no_grad():
                other(**inputs)
            assert [row.raised for row in tokenprune.stats(other).guard] == [bool(kinds) for kinds in RISKS]
            assert parts(other)[0] is not parts(subject.model)[0]
        assert subject.generate(inputs) == want
    late = AsyncValues(torch.tensor([0.25, 0.5]))
    for made in (copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        assert made.ready() and made.read() == [0.25, 0.5] and made.count == 2


def test_replacing_a_patch(subject: Model) -> None:
    was = snapshot(subject.model)
    tokenprune.patch(subject.model, "random", keep=0.2)
    tokenprune.patch(subject.model, "random", keep=0.2, guard="off", replace=True)
    assert not parts(subject.model)
    tokenprune.unpatch(subject.model)
    assert snapshot(subject.model) == was


# Tiles, packed tiles, tiles by row, patches: whose verdict is whose. Their images are smaller than a block.
SHAPES = ["llava", "llava_next", "llava_onevision", "internvl", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3"]


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_verdicts_find_their_images(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    monkeypatch.setattr(guard_pixels, "SIDE", 4)
    monkeypatch.setattr(guard_pixels, "_LEAST_SIDE", 4)
    monkeypatch.setattr(guard_pixels, "blocks_of", lambda planes: blocks_of(planes, 4))
    # The value of an image is its number among those that the tower gets.
    monkeypatch.setattr(guard_pixels, "text_shares", lambda blocks, owner, number: torch.arange(float(number)))
    for row, images in ((None, (2, 1)), (0, (2,)), (1, (1,))):
        inputs = family.make_inputs(images=(2, 1)) if row is None else family.make_inputs(images=(2, 1), only=row)
        with tokenprune.patched(model, "random", keep=0.3):
            model(**inputs)
            found = [one.image for one in tokenprune.stats(model).guard]
            model.generate(**inputs, max_new_tokens=1)
            assert [one.image for one in tokenprune.stats(model).guard] == found
        assert None not in found and found == sorted(found) and len(found) == len(images), found
        if len(found) == 2:
            assert found[0] < found[1]
