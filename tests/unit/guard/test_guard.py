# SPDX-License-Identifier: Apache-2.0
"""The guard in a patched model: warnings, raised budgets and statistics."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tokenprune
from basics import snapshot
from each import each
from guard_drawings import page, scene
from tokenprune import Budget, Guard, OptionError, Pruner, UnsupportedSetupError
from tokenprune.integrations.hf.guard import pixels as guard_pixels
from tokenprune.integrations.hf.guard.floors import load_floors
from tokenprune.integrations.hf.guard.images import split_blocks
from tokenprune.integrations.hf.guard.part import GuardPart
from tokenprune.integrations.hf.guard.settings import KINDS, TEXT_LIMIT
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.kernels.transfer import AsyncValues
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.heldout import load_heldout
from zoo import FAMILIES


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model()


@pytest.fixture(autouse=True)
def unpatched(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "subject" in request.fixturenames:
        assert not tokenprune.is_patched(request.getfixturevalue("subject").model)


QUESTIONS = ("what color is the circle?", "how many circles?", "where is the ring?", "what does the sign say?")

RISKS = ((), ("counting",), ("grounding",), ("text",))


def make_inputs(
    subject: Model, images: list[Any] | None = None, questions: tuple[str, ...] = QUESTIONS
) -> dict[str, Any]:
    image = load_heldout(limit=1)[0].image
    return subject.inputs(images or [image] * len(questions), questions)


@torch.no_grad()
def run_last_logits(subject: Model, inputs: dict[str, Any], **options: Any) -> tuple[torch.Tensor, Any]:
    # A forward without position_ids would count padding.
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with tokenprune.patched(subject.model, **options):
        return subject.model(**inputs, position_ids=positions).logits[:, -1], tokenprune.stats(subject.model)


AUTO = [("dart", 0.11), ("pool", 0.11), ("vscan", 0.11), ("vscan", 30), ("divprune", 20),
        ("fastv", Budget(average_tokens=100)), ("uniform", Budget(keep=0.2, per="prompt"))]  # fmt: skip


@each(("method", "keep"), AUTO)
def test_auto_is_a_patch_with_the_raised_budget(subject: Model, method: str, keep: Any) -> None:
    auto = dict(method=method, keep=keep, guard="auto", processor=subject.processor)
    inputs, per = make_inputs(subject), getattr(keep, "per", "image")
    batch, stats = run_last_logits(subject, inputs, **auto)
    assert [row.prompt for row in stats.guard] == list(RISKS)
    for row, kinds in enumerate(RISKS):
        single = make_inputs(subject, questions=QUESTIONS[row : row + 1])
        got, guarded = run_last_logits(subject, single, **auto)
        manual_keep, plain = keep, run_last_logits(subject, single, method=method, keep=keep, guard="off")[1]
        if kinds:
            floor = Budget(keep=float(load_floors().get_floor(method, kinds[0])), per=per)
            raised = run_last_logits(subject, single, method=method, keep=floor, guard="off")[1]
            if raised.visual_tokens_average > plain.visual_tokens_average:
                manual_keep = floor
        want, manual_stats = run_last_logits(subject, single, method=method, keep=manual_keep, guard="off")
        assert torch.equal(got, want)
        assert guarded.visual_tokens_per_layer == manual_stats.visual_tokens_per_layer
        raised = manual_keep is not keep
        assert guarded.guard[0].raised == stats.guard[row].raised == bool(guarded.guard[0].risks) == raised
        assert guarded.guard[0].kept == stats.guard[row].kept == manual_stats.visual_tokens_out
        torch.testing.assert_close(batch[row], want[0], atol=2e-4, rtol=1e-4)
    assert sum(row.kept for row in stats.guard) == stats.visual_tokens_out
    assert any(row.raised for row in stats.guard) and not stats.guard[0].raised


def test_only_images_of_text_are_raised(subject: Model) -> None:
    photo, text = load_heldout(limit=1)[0].image, page(224)
    options = dict(method="random", keep=0.1, guard=Guard("auto", floors={"text": 0.5}), processor=subject.processor)
    inputs = make_inputs(subject, [[photo, text], [photo, photo]], QUESTIONS[:1] * 2)

    def check(stats: Any, copies: int = 1) -> None:
        flags = [row.raised for row in stats.guard]
        assert flags == [True] * copies + [False] * copies
        assert stats.visual_tokens_out == copies * (26 + 128 + 26 + 26)
        assert stats.guard[0].image > TEXT_LIMIT > stats.guard[-1].image
        assert [row.risks for row in stats.guard] == [("text",)] * copies + [()] * copies
        assert stats.guard[0].kept == 26 + 128 and stats.guard[0].tokens == 512

    check(run_last_logits(subject, inputs, **options)[1])
    with tokenprune.patched(subject.model, **options):
        subject.model.generate(**inputs, max_new_tokens=2, do_sample=False)
        check(tokenprune.stats(subject.model))
        subject.model.generate(**inputs, max_new_tokens=2, do_sample=False, num_beams=2)
        check(tokenprune.stats(subject.model), 2)


@pytest.mark.parametrize("method", ["random", "fastv", "pyramiddrop"])
def test_a_floor_in_tokens_is_that_keep(subject: Model, method: str) -> None:
    """For a text image, an integer floor acts like the same integer `keep`, up to all tokens."""
    inputs = make_inputs(subject, [[page(224)]], QUESTIONS[:1])
    for floor, keep in ((200, 200), (1024, 1.0), (1, 1.0)):
        guard = Guard("auto", floors={"text": floor})
        got, stats = run_last_logits(subject, inputs, method=method, keep=0.5, guard=guard)
        want, manual_stats = run_last_logits(subject, inputs, method=method, keep=keep, guard="off")
        assert torch.equal(got, want) and stats.visual_tokens_per_layer == manual_stats.visual_tokens_per_layer
        assert stats.guard[0].raised and stats.guard[0].risks == ("text",)
    # A budget above the floor is unchanged.
    _, stats = run_last_logits(subject, inputs, method="random", keep=0.5, guard=Guard("auto", floors={"text": 128}))
    assert stats.visual_tokens_out == 128 and not stats.guard[0].raised and stats.guard[0].risks == ()
    photo = make_inputs(subject, [[scene("hills", 224)]], QUESTIONS[:1])
    _, stats = run_last_logits(subject, photo, method="random", keep=0.5, guard=Guard("auto", floors={"text": 200}))
    assert stats.visual_tokens_out == 128


@pytest.mark.parametrize(("method", "processor"), [("random", False), ("downsample", True)])
def test_a_floor_in_tokens_is_warned_of(
    subject: Model, method: str, processor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = dict(method=method, keep=0.5, processor=subject.processor if processor else None)
    for floor, times in ((100, 0), (200, 1)):
        caplog.clear()
        with tokenprune.patched(subject.model, guard=Guard("warn", floors=dict.fromkeys(KINDS, floor)), **options):
            inputs = make_inputs(subject, [[page(224)]], QUESTIONS[:1])
            subject.model(**inputs)
            tokenprune.stats(subject.model)
        assert caplog.text.count("Use: keep=200;") == caplog.text.count("looks like text") == times


def test_without_a_tokenizer_only_images_are_checked(subject: Model) -> None:
    inputs = make_inputs(subject, [page(224), scene("hills", 224)], ("how many circles?",) * 2)
    _, stats = run_last_logits(subject, inputs, method="random", keep=0.2, guard="auto")
    assert [row.prompt for row in stats.guard] == [None, None]
    assert [row.raised for row in stats.guard] == [True, False]
    _, stats = run_last_logits(
        subject, inputs, method="random", keep=0.2, guard="auto", processor=subject.processor.tokenizer
    )
    assert [row.prompt for row in stats.guard] == [("counting",)] * 2


def test_composed_methods_leave_each_other_enough(subject: Model) -> None:
    """Each cut keeps the share of the original image that its method needs."""
    options = dict(method=["random", "fastv"], keep=0.2, processor=subject.processor)
    inputs = make_inputs(subject, questions=QUESTIONS[3:])  # text: random needs all tokens, fastv half
    _, stats = run_last_logits(subject, inputs, guard="auto", **options)
    assert stats.visual_tokens_per_layer == [256, 256, 128, 128, 128, 128]
    _, stats = run_last_logits(subject, inputs, guard="off", method=options["method"], keep=0.2)
    assert stats.visual_tokens_per_layer == [51, 51, 10, 10, 10, 10]
    assert stats.guard is None


@pytest.mark.parametrize("method", ["random", "dart", "tome", "dyrate", "flowcut"])
def test_warn_changes_nothing(subject: Model, method: Any) -> None:
    """flowcut acts in the tower through an option, unlike the default of its class."""
    inputs, name = make_inputs(subject), method
    if name == "flowcut":
        method = tokenprune.method(name, inside=True)
    off, plain = run_last_logits(subject, inputs, method=method, keep=0.2, guard="off")
    warn, stats = run_last_logits(subject, inputs, method=method, keep=0.2, processor=subject.processor)
    assert torch.equal(off, warn)
    assert stats.visual_tokens_per_layer == plain.visual_tokens_per_layer
    assert plain.guard is None and "guard" not in repr(plain)
    at_risk = [row.risks for row in stats.guard]
    low = [tuple(kind for kind in kinds if load_floors().get_floor(name, kind) > 0.2) for kinds in RISKS]
    assert at_risk == low and any(low)
    assert f"guard: {sum(map(bool, low))} of 4 rows at risk, 0 raised" in repr(stats)
    assert stats.as_dict()["guard"][1]["risks"] == ("counting",)


def test_each_reason_is_logged_once(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs(subject, [page(224), *[load_heldout(limit=1)[0].image] * 3])
    for _ in range(2):  # a new patch repeats the warnings
        caplog.clear()
        with tokenprune.patched(subject.model, "random", keep=0.2, processor=subject.processor):
            for _ in range(2):
                subject.model.generate(**inputs, max_new_tokens=2)
        assert [record.levelno for record in caplog.records if record.name == "tokenprune"] == [logging.WARNING] * 4
        text = caplog.text
        for part in ("looks like text", "asks to read", "asks where", "asks to count"):
            assert text.count(part) == 1
        assert "random keeps 20%" in text and "at keep=0.25 it lost 69 points" in text
        assert "questions with demo_smol (94 to 25 % right)" in text and "questions with demo_vlm (92 to 43 %" in text
        assert 'guard="auto"' in text and 'guard="off"' in text and "keep=0.5;" in text
    caplog.clear()
    with tokenprune.patched(subject.model, processor=subject.processor):  # the default setting
        subject.model.generate(**make_inputs(subject, questions=QUESTIONS[2:]), max_new_tokens=2)
        assert [row.risks for row in tokenprune.stats(subject.model).guard] == [("grounding",), ("text",)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all("Use: keep=0.5; guard=" in text and "at this keep pool" in text for text in warnings)


def test_no_unneeded_warnings(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs(subject)
    run_last_logits(
        subject, make_inputs(subject, questions=QUESTIONS[:1]), method="random", keep=0.2, processor=subject.processor
    )
    run_last_logits(subject, inputs, method="random", keep=0.2, guard="off")
    run_last_logits(subject, inputs, method="random", keep=0.2, guard="auto", processor=subject.processor)
    run_last_logits(
        subject, make_inputs(subject, questions=QUESTIONS[2:]), method="pool", keep=0.25, processor=subject.processor
    )
    assert not [record for record in caplog.records if record.name == "tokenprune"]


class DelayedValues(AsyncValues):
    """A verdict that arrives when `arrived` is set."""

    arrived = False

    def is_ready(self) -> bool:
        return DelayedValues.arrived


def test_delayed_verdict(subject: Model, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """The first call after its arrival logs the warning, and reading statistics waits for it."""
    monkeypatch.setattr(guard_pixels, "AsyncValues", DelayedValues)
    inputs = make_inputs(subject, [page(224)], QUESTIONS[:1])
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="warn"), torch.no_grad():
        monkeypatch.setattr(DelayedValues, "arrived", False)
        output = subject.model(**inputs, use_cache=True)
        step = dict(input_ids=inputs["input_ids"][:, -1:], past_key_values=output.past_key_values)
        subject.model(**step)
        assert "looks like text" not in caplog.text
        monkeypatch.setattr(DelayedValues, "arrived", True)
        subject.model(**step)
        assert caplog.text.count("looks like text") == 1
        monkeypatch.setattr(DelayedValues, "arrived", False)
        subject.model(**inputs)
        assert tokenprune.stats(subject.model).guard[0].risks == ("text",)


def list_guards(model: Any) -> list[GuardPart]:
    return [part for part in get_attachment(model).engine.parts if isinstance(part, GuardPart)]


def test_guard_is_attached_only_if_needed(subject: Model) -> None:
    model = subject.model
    before = snapshot(model)
    for options, num_guards in (
        (dict(method="random", keep=1.0), 0), (dict(method="fastv", keep=0.6), 1), (dict(method="pevlm"), 0),
        (dict(method="fastv", keep=0.3), 1), (dict(method="fastv", keep=200), 1), (dict(method="random", keep=0.9), 1),
        (dict(method="fastv", keep=0.3, guard="off"), 0), (dict(method="fastv", keep=0.3, guard=Guard("off")), 0),
        (dict(method="random", keep=0.4, guard=Guard(floors=dict.fromkeys(KINDS, 0.3))), 0),
        (dict(method="fastv", keep=0.3, guard=None), 0), (dict(method="ipcv", layer=1, keep=0.1), 0),
    ):  # fmt: skip
        try:
            with tokenprune.patched(model, **dict(guard="warn") | options):
                assert len(list_guards(model)) == num_guards, options
                assert get_attachment(model).engine._reads_text is False
        except UnsupportedSetupError:
            assert options["method"] == "pevlm"  # pevlm refuses models without videos
        assert snapshot(model) == before
    tokenprune.patch(model, "random", keep=0.2, guard="warn")
    assert len(list_guards(model)) == 1
    tokenprune.patch(model, "random", keep=0.2, replace=True)
    assert not list_guards(model)
    tokenprune.unpatch(model)
    assert snapshot(model) == before


@each(
    ("options", "error", "message"),
    [
        (dict(guard="loud"), OptionError, "guard='loud'.*'warn', 'auto', 'off'"),
        (dict(guard=True), OptionError, "guard=True"),
        (dict(processor=object()), OptionError, "has no tokenizer"),
        (dict(method="tome", guard="auto"), UnsupportedSetupError, 'IN_ENCODER. Use guard="warn"'),
        (dict(method=tokenprune.method("flowcut", inside=True), guard="auto"), UnsupportedSetupError, "at IN_ENCODER"),
        (dict(method="downsample", guard="auto", processor="demo"), UnsupportedSetupError, "PRE_ENCODER"),
        (dict(method="dyrate", guard="auto"), UnsupportedSetupError, "DECODE"),
        (dict(method=["tome", "dart"], guard="auto"), UnsupportedSetupError, "tome acts at IN_ENCODER"),
    ],
)
def test_refusals_leave_no_trace(subject: Model, options: dict, error: type, message: str) -> None:
    if options.get("processor") == "demo":
        options = options | {"processor": subject.processor}
    before = snapshot(subject.model)
    with pytest.raises(error, match=message):
        tokenprune.patch(subject.model, **dict(method="dart", keep=0.2) | options)
    assert snapshot(subject.model) == before and not tokenprune.is_patched(subject.model)


@torch.no_grad()
def test_processor_enables_the_guard_with_one_log_line(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    model, processor = subject.model, subject.processor
    cases = (
        (dict(), None), (dict(processor=processor, guard="off"), None), (dict(processor=processor, keep=1.0), None),
        (dict(processor=processor), 'guard="warn" checks prompts and images, and logs one warning for each reason '
         "if random (text below 1, grounding below 0.5, counting below 1) may keep too few tokens"),
        (dict(guard="warn"), 'guard="warn" checks images (prompts need processor=), and logs one warning for each '
         "reason if random (text below 1, grounding below 0.5, counting below 1) may keep too few tokens"),
        (dict(processor=processor, method="pool"), 'guard="warn" checks prompts and images, and logs one warning for '
         "each reason if pool (text below 0.25, grounding below 0.25, counting below 1) may keep too few tokens"),
        (dict(processor=processor, method="pool", keep=0.25), 'guard="warn" checks prompts and images, and logs one '
         "warning for each reason if pool (counting below 1) may keep too few tokens"),
        (dict(processor=processor, guard="auto", method=["divprune", "fastv"]), 'guard="auto" checks prompts and '
         "images, and keeps more tokens if divprune (text below 0.5, grounding below 0.5, counting below 1) + fastv "
         "(text below 0.5, grounding below 1, counting below 1) may keep too few tokens"),
    )  # fmt: skip
    for options, expected in cases:
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, logger="tokenprune"),
            tokenprune.patched(model, **dict(method="random", keep=0.2) | options),
        ):
            messages = [record.message for record in caplog.records if record.message.startswith("guard=")]
            shown = [line.strip() for line in repr(model).splitlines() if "guard=" in line]
            model(**make_inputs(subject))
            assert (tokenprune.stats(model).guard is not None) == (expected is not None)
        assert messages == ([] if expected is None else [expected]) and shown == [
            f"tokenprune: {line}" for line in messages
        ]


@pytest.mark.parametrize("processor", ["demo", "image processor", None])
@torch.no_grad()
def test_unused_processor_is_accepted(subject: Model, processor: str | None) -> None:
    """With guard="off" a processor is accepted, and neither read nor changed."""
    shipped_processor = subject.processor
    passed = {"demo": shipped_processor, "image processor": shipped_processor.image_processor, None: None}[processor]
    inputs, class_before = make_inputs(subject), type(shipped_processor.image_processor)
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="off"):
        want = subject.model(**inputs).logits
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="off", processor=passed):
        assert torch.equal(subject.model(**inputs).logits, want)
        assert tokenprune.stats(subject.model).guard is None
        assert type(shipped_processor.image_processor) is class_before


def test_methods_on_pixels_are_judged_by_their_keep(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    with tokenprune.patched(subject.model, "downsample", keep=0.5, processor=subject.processor):
        inputs = make_inputs(subject)
        subject.model.generate(**inputs, max_new_tokens=1)
        assert [row.risks for row in tokenprune.stats(subject.model).guard] == list(RISKS)
    assert "downsample keeps 50%" in caplog.text and 'guard="auto"' not in caplog.text


def test_unmeasured_method(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    class CustomPruner(Pruner):
        name = "theirs"

        def score(self, tokens: Any) -> torch.Tensor:
            return tokens.hidden.norm(dim=-1)

    _, stats = run_last_logits(
        subject, make_inputs(subject), method=CustomPruner(), keep=0.2, processor=subject.processor
    )
    assert [row.risks for row in stats.guard] == list(RISKS)
    assert "it was not measured on such questions" in caplog.text


def test_later_turns_are_not_checked(subject: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, reads = make_inputs(subject, questions=QUESTIONS[1:2]), []
    original = GuardPart._read
    monkeypatch.setattr(GuardPart, "_read", lambda part, call: reads.append(call) or original(part, call))
    auto = dict(method="random", keep=0.2, guard="auto", processor=subject.processor)
    with tokenprune.patched(subject.model, **auto), torch.no_grad():
        cache = subject.model(**inputs, use_cache=True).past_key_values
        assert tokenprune.stats(subject.model).guard[0].raised
        subject.model(input_ids=inputs["input_ids"][:, -3:], past_key_values=cache)
    assert len(reads) == 1


def test_copies(subject: Model) -> None:
    inputs = make_inputs(subject)
    with tokenprune.patched(subject.model, "random", keep=0.2, guard="auto", processor=subject.processor):
        want = subject.generate(inputs)
        fresh = tokenprune.patch(load_model().model, "random", keep=0.2, guard="auto", processor=subject.processor)
        for other in (copy.deepcopy(subject.model), pickle.loads(pickle.dumps(fresh))):
            with torch.no_grad():
                other(**inputs)
            assert [row.raised for row in tokenprune.stats(other).guard] == [bool(kinds) for kinds in RISKS]
            assert list_guards(other)[0] is not list_guards(subject.model)[0]
        assert subject.generate(inputs) == want
    values = AsyncValues(torch.tensor([0.25, 0.5]))
    for restored in (copy.deepcopy(values), pickle.loads(pickle.dumps(values))):
        assert restored.is_ready() and restored.read() == [0.25, 0.5] and restored.count == 2


# Layouts of images: tiles, packed tiles, tiles by row, patches. These images are smaller than a block.
SHAPES = ["llava", "llava_next", "llava_onevision", "internvl", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3"]


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_verdicts_find_their_images(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    monkeypatch.setattr(guard_pixels, "SIDE", 4)
    monkeypatch.setattr(guard_pixels, "_MIN_SIDE", 4)
    monkeypatch.setattr(guard_pixels, "split_blocks", lambda planes: split_blocks(planes, 4))
    # Each image gets its index in the tower's batch as its value.
    monkeypatch.setattr(guard_pixels, "compute_text_shares", lambda blocks, owner, count: torch.arange(float(count)))
    for row, images in ((None, (2, 1)), (0, (2,)), (1, (1,))):
        inputs = family.make_inputs(images=(2, 1)) if row is None else family.make_inputs(images=(2, 1), only=row)
        with tokenprune.patched(model, "random", keep=0.3, guard="warn"):
            model(**inputs)
            values = [check.image for check in tokenprune.stats(model).guard]
            model.generate(**inputs, max_new_tokens=1)
            assert [check.image for check in tokenprune.stats(model).guard] == values
        assert None not in values and values == sorted(values) and len(values) == len(images), values
        if len(values) == 2:
            assert values[0] < values[1]
