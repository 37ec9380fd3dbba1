# SPDX-License-Identifier: Apache-2.0
"""The app's comparisons, and what it gives to copy; no browser and no gradio here."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tokenprune
from decoded_sizes import record_decodes
from processors import photo
from tests.unit.api.test_cli import refused
from tokenprune.errors import OptionError, TokenPruneError, UnknownMethodError
from tokenprune.settings import Setting
from tokenprune_bench.app import render, snippets
from tokenprune_bench.app.comparison import PagePrompt, compare_in_stages, draw_kept, parse_setting, parse_settings
from tokenprune_bench.app.loading import Loading, use_temp_folder
from tokenprune_bench.app.session import AppSession, Superseded
from tokenprune_bench.app.snippets import LONGEST
from tokenprune_bench.profiling.media import read_frames
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.show import layout, side_by_side
from tokenprune_demo.drawn_sets import draw_set
from tokenprune_demo.heldout import load_heldout


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_qwen", device="cpu")


def test_what_is_kept_is_known_first_then_answers_then_times(subject: Model) -> None:
    asked = load_heldout(folder=subject.heldout, limit=1)[0]
    prompt = PagePrompt([asked.image], asked.question, ("divprune", "tome+fastv"))
    drawn, answered, half, whole = compare_in_stages(subject, prompt, 0.5)
    assert [one.name for one in drawn.asked] == ["divprune 0.5", "tome+fastv 0.5 each, 25 % in all"]
    assert drawn.before is None and [one.answer for one in drawn.asked] == [None, None]
    assert answered.before and all(one.answer and one.ttft is None for one in answered.asked)
    assert half.asked[0].ttft and half.asked[1].ttft is None and not half.complete and whole.complete
    assert not tokenprune.is_patched(subject.model)
    one, two = whole.asked
    assert one.kept == one.tokens // 2 and two.kept == two.tokens // 4
    assert [one.drawing for one in drawn.asked] == [one.drawing for one in whole.asked]
    direct = side_by_side.show(subject, [asked.image], asked.question, [Setting.from_text("tome+fastv", 0.5)])
    assert direct.before == whole.before and direct.seen[0].answer == two.answer
    alone = draw_kept(subject, prompt, [Setting.from_text(name, 0.5) for name in prompt.methods])
    assert [one.drawing for one in alone.asked] == [one.drawing for one in drawn.asked]  # what the slider shows
    with Image.open(io.BytesIO(two.drawing)) as image, Image.open(io.BytesIO(whole.original)) as original:
        assert image.size == original.size  # the same scale


def test_ratios_of_a_table_are_of_one_time(subject: Model) -> None:
    """Each method was timed in turn with the unpatched model, which took another time each time."""

    def timed(ours: float, unpatched: float) -> dict[str, Any]:
        return {
            "load": 0.0, "ttft_ms": {"p50": ours}, "ttft_ms_unpatched": {"p50": unpatched},
            "ttft_ratio": {"p20": ours / unpatched, "p50": ours / unpatched, "p80": ours / unpatched},
        }  # fmt: skip

    asked = load_heldout(folder=subject.heldout, limit=1)[0]
    prompt = PagePrompt([asked.image], asked.question, ("divprune", "random"))
    found = draw_kept(subject, prompt, [Setting.from_text(name, 0.5) for name in prompt.methods])
    pairs = zip(found.asked, (timed(50, 100), timed(120, 200)), strict=True)
    found = replace(found, before="red", asked=tuple(replace(one, answer="red", ttft=ttft) for one, ttft in pairs))
    cells = re.findall(r"(\d+) ms(?: \(([\d.]+x \w+)\))?</td>", render.details(found))
    assert cells == [("150", ""), ("75", "2x faster"), ("90", "1.7x faster")]  # each is 150 by its ratio
    assert "first token after 90 ms" in render.panels(found)


def test_a_video_is_a_video(subject: Model) -> None:
    question = draw_set("small-videos", 1).questions[-1]
    *_, last = compare_in_stages(subject, PagePrompt(question.frames, question.question, ("vidcom2",)), 0.5)
    (one,) = last.asked
    assert last.strips and one.kept == one.tokens // 2
    with Image.open(io.BytesIO(one.drawing)) as image:
        assert image.width > 2 * image.height  # a strip of frames


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5, 8])
def test_a_run_that_is_not_wanted_ends_with_the_model_as_it_was(subject: Model, calls: int) -> None:
    session, lock = AppSession(), threading.Lock()
    check, left = session.begin(), iter(range(calls))

    def still_wanted() -> None:
        assert lock.locked()
        if next(left, None) is None:
            session.begin()
        check()

    prompt = PagePrompt([Image.new("RGB", (112, 112), "red")], "what is shown?", ("divprune",))
    with pytest.raises(Superseded):
        for _ in compare_in_stages(subject, prompt, 0.25, still_wanted, lock):
            assert not lock.locked() and not tokenprune.is_patched(subject.model)
    assert not lock.locked() and not tokenprune.is_patched(subject.model)


@pytest.mark.parametrize(
    ("images", "question", "methods", "keep", "error", "said"),
    [
        (0, "what?", ["dart"], 0.5, OptionError, "The image is missing"),
        (1, "  ", ["dart"], 0.5, OptionError, "The question is missing"),
        (1, "x" * (LONGEST + 1), ["dart"], 0.5, OptionError, "The maximum is"),
        (1, "what?", [], 0.5, OptionError, "The method is missing"),
        (1, "what?", ["dat"], 0.5, UnknownMethodError, "dart"),
        (1, "what?", ["dart", "divprune+pool"], 0.5, OptionError, "both act at"),
        (1, "what?", ["dart"], 0.0, TokenPruneError, "keep"),
        (1, "what?", ["dart"], 1.5, TokenPruneError, "keep"),
        (1, "what?", ["dart:keep=0.1"], 0.5, OptionError, "is not an option"),
        (1, "what?", ["divprune:" + "x" * LONGEST], 0.5, OptionError, "The maximum is"),
    ],
)
def test_what_cannot_be_asked(
    subject: Model, images: int, question: str, methods: list[str], keep: float, error: type, said: str
) -> None:
    with pytest.raises(error, match=said):
        next(
            compare_in_stages(
                subject, PagePrompt([Image.new("RGB", (128, 128))] * images, question, tuple(methods)), keep
            )
        )
    assert not tokenprune.is_patched(subject.model)


@pytest.mark.parametrize("text", ["dymu:thresholds=/etc/passwd", "tome+fitprune:recipe=/x"])
def test_a_page_names_no_files(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenprune.selection.files.File.read", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(OptionError, match="does not open files"):
        parse_setting(text, 0.5)


def test_what_is_copied_does_what_was_shown() -> None:
    stack = parse_setting("downsample+divprune", 0.5)
    assert snippets.python(parse_setting("dart", 0.25)) == 'tokenprune.patch(model, "dart", keep=0.25)'
    assert snippets.python(stack).endswith(", processor=processor)")
    flag = shlex.split(snippets.vllm(parse_setting("divprune", 0.25)))
    assert flag[:4] == ["vllm", "serve", "MODEL", "--mm-processor-kwargs"]
    assert json.loads(flag[4]) == {"tokenprune": {"method": "divprune", "keep": 0.25}}
    assert snippets.vllm(parse_setting("dart", 0.25)).startswith("# dart cannot be served")
    assert snippets.bench(Setting.from_text("divprune+fastv:layer=3", 0.25), "demo_qwen") == (
        "tokenprune bench --model demo_qwen --methods divprune+fastv:layer=3 --keep 0.25"
    )


def test_a_budget_before_pixels_decodes_a_photograph_small(
    subject: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = record_decodes(monkeypatch)
    path = tmp_path / "a.jpg"
    photo(2400, 3200).save(path, quality=92)
    (image,) = read_frames([path], 1, layout.find_largest)
    prompt = PagePrompt([image], "what is it?", ("divprune", "fastv"), max_visual_tokens=64)
    settings = parse_settings(prompt, 0.25)
    drawing = draw_kept(subject, prompt, settings)
    assert decoded and max(map(max, decoded)) <= 1600
    assert [result.kept for result in drawing.asked] == [16, 16] and drawing.tokens > 1000
    assert drawing.notes == ("max_visual_tokens=64: the methods get at most 64 tokens of an image",)
    whole = draw_kept(subject, replace(prompt, images=[Image.open(path).convert("RGB")]), settings)
    assert [result.kept for result in whole.asked] == [16, 16] and whole.tokens == drawing.tokens
    for one, other in zip(drawing.asked, whole.asked, strict=True):
        sizes = [Image.open(io.BytesIO(result.drawing)).size for result in (one, other)]
        assert sizes[0] == sizes[1]
    code = snippets.python(*settings), snippets.vllm(settings[0]), snippets.bench(settings[0], "demo_qwen")
    assert "'max_visual_tokens': 64" in code[0] and '"max_visual_tokens": 64' in code[1]
    assert code[2] == "tokenprune profile --model demo_qwen --methods divprune --keep 0.25 --max-visual-tokens 64"
    with pytest.raises(OptionError, match="resizes images"):
        parse_settings(replace(prompt, methods=("dynres",)), 0.25)
    with pytest.raises(OptionError, match="already means downsample"):
        parse_settings(replace(prompt, methods=("downsample",)), 0.25)


def test_who_waits_for_a_model_gets_it_or_hears_why() -> None:
    loading, heard = Loading("some"), []
    waiting = threading.Thread(target=lambda: heard.append(loading.get()))
    waiting.start()
    assert not loading.is_over
    loading.set_model("model")
    waiting.join()
    assert loading.lock.acquire(blocking=False)
    loading.lock.release()
    loading.fail()  # at the end of the command; the model stays, and nobody works with it
    assert heard == [loading.get()] == ["model"] and loading.is_over and loading.lock.locked()
    lost = Loading("lost")
    lost.fail()
    with pytest.raises(TokenPruneError, match="lost could not be loaded"):
        lost.get()


def test_the_files_of_a_page_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", "elsewhere")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), use_temp_folder() as folder:
        (folder / "dropped.png").touch()
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert not folder.exists() and os.environ["GRADIO_TEMP_DIR"] == "elsewhere"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "tokenprune_bench.app.page", raising=False)
    assert "tokenprune-bench[app]" in refused("app", "--no-open")
