# SPDX-License-Identifier: Apache-2.0
"""The app's comparisons and code snippets, without a browser and without gradio."""

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


def test_stages_show_kept_tokens_then_answers_then_times(subject: Model) -> None:
    question = load_heldout(folder=subject.heldout, limit=1)[0]
    prompt = PagePrompt([question.image], question.question, ("divprune", "tome+fastv"))
    drawn, answered, half_timed, complete = compare_in_stages(subject, prompt, 0.5)
    assert [result.name for result in drawn.asked] == ["divprune 0.5", "tome+fastv 0.5 each, 25 % in all"]
    assert drawn.before is None and [result.answer for result in drawn.asked] == [None, None]
    assert answered.before and all(result.answer and result.ttft is None for result in answered.asked)
    assert (
        half_timed.asked[0].ttft and half_timed.asked[1].ttft is None and not half_timed.complete and complete.complete
    )
    assert not tokenprune.is_patched(subject.model)
    single, stack = complete.asked
    assert single.kept == single.tokens // 2 and stack.kept == stack.tokens // 4
    assert [result.drawing for result in drawn.asked] == [result.drawing for result in complete.asked]
    direct = side_by_side.show(subject, [question.image], question.question, [Setting.from_text("tome+fastv", 0.5)])
    assert direct.before == complete.before and direct.seen[0].answer == stack.answer
    redrawn = draw_kept(subject, prompt, [Setting.from_text(name, 0.5) for name in prompt.methods])
    # the slider shows these
    assert [result.drawing for result in redrawn.asked] == [result.drawing for result in drawn.asked]
    with Image.open(io.BytesIO(stack.drawing)) as image, Image.open(io.BytesIO(complete.original)) as original:
        assert image.size == original.size  # drawn at the same scale


def test_times_of_a_table_share_one_unpatched_time(subject: Model) -> None:
    """Each method is timed in turn with the unpatched model, whose time differs between the measurements."""

    def build_ttft(pruned: float, unpatched: float) -> dict[str, Any]:
        return {
            "load": 0.0, "ttft_ms": {"p50": pruned}, "ttft_ms_unpatched": {"p50": unpatched},
            "ttft_ratio": {"p20": pruned / unpatched, "p50": pruned / unpatched, "p80": pruned / unpatched},
        }  # fmt: skip

    question = load_heldout(folder=subject.heldout, limit=1)[0]
    prompt = PagePrompt([question.image], question.question, ("divprune", "random"))
    comparison = draw_kept(subject, prompt, [Setting.from_text(name, 0.5) for name in prompt.methods])
    pairs = zip(comparison.asked, (build_ttft(50, 100), build_ttft(120, 200)), strict=True)
    comparison = replace(
        comparison, before="red", asked=tuple(replace(result, answer="red", ttft=ttft) for result, ttft in pairs)
    )
    cells = re.findall(r"(\d+) ms(?: \(([\d.]+x \w+)\))?</td>", render.details(comparison))
    # the mean unpatched time, 150 ms, times the ratio of each method
    assert cells == [("150", ""), ("75", "2x faster"), ("90", "1.7x faster")]
    assert "first token after 90 ms" in render.panels(comparison)


def test_a_video_is_drawn_as_strips(subject: Model) -> None:
    question = draw_set("small-videos", 1).questions[-1]
    *_, last = compare_in_stages(subject, PagePrompt(question.frames, question.question, ("vidcom2",)), 0.5)
    (result,) = last.asked
    assert last.strips and result.kept == result.tokens // 2
    with Image.open(io.BytesIO(result.drawing)) as image:
        assert image.width > 2 * image.height  # a strip of frames


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5, 8])
def test_a_superseded_run_restores_the_model(subject: Model, calls: int) -> None:
    session, lock = AppSession(), threading.Lock()
    check, remaining_calls = session.begin(), iter(range(calls))

    def check_and_count() -> None:
        assert lock.locked()
        if next(remaining_calls, None) is None:
            session.begin()
        check()

    prompt = PagePrompt([Image.new("RGB", (112, 112), "red")], "what is shown?", ("divprune",))
    with pytest.raises(Superseded):
        for _ in compare_in_stages(subject, prompt, 0.25, check_and_count, lock):
            assert not lock.locked() and not tokenprune.is_patched(subject.model)
    assert not lock.locked() and not tokenprune.is_patched(subject.model)


@pytest.mark.parametrize(
    ("images", "question", "methods", "keep", "error", "message"),
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
def test_invalid_prompts_are_refused(
    subject: Model, images: int, question: str, methods: list[str], keep: float, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        next(
            compare_in_stages(
                subject, PagePrompt([Image.new("RGB", (128, 128))] * images, question, tuple(methods)), keep
            )
        )
    assert not tokenprune.is_patched(subject.model)


@pytest.mark.parametrize("text", ["dymu:thresholds=/etc/passwd", "tome+fitprune:recipe=/x"])
def test_options_that_name_files_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenprune.selection.files.File.read", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(OptionError, match="does not open files"):
        parse_setting(text, 0.5)


def test_snippets_reproduce_the_shown_setting() -> None:
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
    decoded_small = draw_kept(subject, prompt, settings)
    assert decoded and max(map(max, decoded)) <= 1600
    assert [result.kept for result in decoded_small.asked] == [16, 16] and decoded_small.tokens > 1000
    assert decoded_small.notes == ("max_visual_tokens=64: the methods get at most 64 tokens of an image",)
    full = draw_kept(subject, replace(prompt, images=[Image.open(path).convert("RGB")]), settings)
    assert [result.kept for result in full.asked] == [16, 16] and full.tokens == decoded_small.tokens
    for from_file, from_image in zip(decoded_small.asked, full.asked, strict=True):
        sizes = [Image.open(io.BytesIO(result.drawing)).size for result in (from_file, from_image)]
        assert sizes[0] == sizes[1]
    code = snippets.python(*settings), snippets.vllm(settings[0]), snippets.bench(settings[0], "demo_qwen")
    assert "'max_visual_tokens': 64" in code[0] and '"max_visual_tokens": 64' in code[1]
    assert code[2] == "tokenprune profile --model demo_qwen --methods divprune --keep 0.25 --max-visual-tokens 64"
    with pytest.raises(OptionError, match="resizes images"):
        parse_settings(replace(prompt, methods=("dynres",)), 0.25)
    with pytest.raises(OptionError, match="already means downsample"):
        parse_settings(replace(prompt, methods=("downsample",)), 0.25)


def test_a_waiting_thread_gets_the_model_or_an_error() -> None:
    loading, received = Loading("some"), []
    waiting = threading.Thread(target=lambda: received.append(loading.get()))
    waiting.start()
    assert not loading.is_over
    loading.set_model("model")
    waiting.join()
    assert loading.lock.acquire(blocking=False)
    loading.lock.release()
    loading.fail()  # At the end of the command, the model remains available, but the lock stays held.
    assert received == [loading.get()] == ["model"] and loading.is_over and loading.lock.locked()
    failed = Loading("lost")
    failed.fail()
    with pytest.raises(TokenPruneError, match="lost could not be loaded"):
        failed.get()


def test_the_temporary_folder_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", "elsewhere")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), use_temp_folder() as folder:
        (folder / "dropped.png").touch()
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert not folder.exists() and os.environ["GRADIO_TEMP_DIR"] == "elsewhere"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_missing_gradio_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "tokenprune_bench.app.page", raising=False)
    assert "tokenprune-bench[app]" in refused("app", "--no-open")
