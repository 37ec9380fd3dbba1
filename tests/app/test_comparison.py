# SPDX-License-Identifier: Apache-2.0
"""What the app asks, tells and gives to copy; no browser and no gradio here."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading

import pytest
from PIL import Image

import tokenprune
from tests.api.test_cli import refused
from tokenprune.errors import OptionError, TokenPruneError, UnknownMethodError
from tokenprune.profiling.model import Model, load
from tokenprune.setting import Setting
from tokenprune.show import side_by_side
from tokenprune_bench.app import snippets
from tokenprune_bench.app.comparison import checked, compare
from tokenprune_bench.app.loading import Loading, own_folder
from tokenprune_bench.app.snippets import LONGEST
from tokenprune_demo.drawn_sets import drawn_set
from tokenprune_demo.heldout import load_heldout


@pytest.fixture(scope="module")
def subject() -> Model:
    return load("demo_qwen", device="cpu")


def test_two_settings_side_by_side(subject: Model) -> None:
    asked = load_heldout(folder=subject.heldout, limit=1)[0]
    steps: list[tuple[int, int, str]] = []
    one, two = compare(
        subject, [asked.image], asked.question, ["divprune", "tome+fastv"], 0.5, lambda *step: steps.append(step)
    )
    assert [one.setting.spec, two.setting.spec] == ["divprune", "tome+fastv"]
    assert not tokenprune.is_patched(subject.model)
    assert one.before == two.before and one.kept == one.tokens // 2 and two.kept == two.tokens // 4
    direct = side_by_side.show(subject, [asked.image], asked.question, [Setting.from_spec("tome+fastv", 0.5)])
    assert direct.pair(0).tobytes() == two.drawing.tobytes() and direct.seen[0].answer == two.seen.answer
    assert two.drawing.size == (2 * direct.panels[0].image.width + 6, direct.panels[0].image.height)
    assert one.faster > 0 and [step[:2] for step in steps] == [(number, 5) for number in range(5)]
    assert steps[2][2] == "tome+fastv: answers" and steps[3][2] == "divprune: times"


def test_a_video_is_a_video(subject: Model) -> None:
    question = drawn_set("small-videos", 1).questions[-1]
    (one,) = compare(subject, question.frames, question.question, ["vidcom2"], 0.5)
    assert len(one.seen.frames) == 4  # pairs of frames
    assert one.kept == one.tokens // 2 and one.drawing.width > one.drawing.height  # a strip above the other


@pytest.mark.parametrize(
    ("images", "question", "methods", "keep", "error", "said"),
    [
        (0, "what?", ["dart"], 0.5, OptionError, "no image"),
        (1, "  ", ["dart"], 0.5, OptionError, "no question"),
        (1, "x" * (LONGEST + 1), ["dart"], 0.5, OptionError, "too long"),
        (1, "what?", [], 0.5, OptionError, "no method"),
        (1, "what?", ["dat"], 0.5, UnknownMethodError, "dart"),
        (1, "what?", ["dart", "divprune+pool"], 0.5, OptionError, "same place"),
        (1, "what?", ["dart"], 0.0, TokenPruneError, "keep"),
        (1, "what?", ["dart"], 1.5, TokenPruneError, "keep"),
        (1, "what?", ["dart:keep=0.1"], 0.5, OptionError, "no option"),
        (1, "what?", ["divprune:" + "x" * LONGEST], 0.5, OptionError, "too long"),
    ],
)
def test_what_cannot_be_asked(
    subject: Model, images: int, question: str, methods: list[str], keep: float, error: type, said: str
) -> None:
    with pytest.raises(error, match=said):
        compare(subject, [Image.new("RGB", (128, 128))] * images, question, methods, keep)
    assert not tokenprune.is_patched(subject.model)


@pytest.mark.parametrize("text", ["dymu:thresholds=/etc/passwd", "tome+fitprune:recipe=/x"])
def test_a_page_names_no_files(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenprune.files.File.read", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(OptionError, match="opens no files"):
        checked(text, 0.5)


def test_what_is_copied_does_what_was_shown() -> None:
    stack = checked("downsample+divprune", 0.5)
    assert snippets.python(checked("dart", 0.25)) == 'tokenprune.patch(model, "dart", keep=0.25)'
    assert snippets.python(stack).endswith(", processor=processor)")
    flag = shlex.split(snippets.vllm(checked("divprune", 0.25)))
    assert flag[:4] == ["vllm", "serve", "MODEL", "--mm-processor-kwargs"]
    assert json.loads(flag[4]) == {"tokenprune": {"method": "divprune", "keep": 0.25}}
    assert snippets.vllm(checked("dart", 0.25)).startswith("# dart cannot be served")
    assert snippets.bench(Setting.from_spec("divprune+fastv:layer=3", 0.25), "demo_qwen") == (
        "tokenprune bench --model demo_qwen --methods divprune+fastv:layer=3 --keep 0.25"
    )


def test_who_waits_for_a_model_gets_it_or_hears_why() -> None:
    loading, heard = Loading("some"), []
    waiting = threading.Thread(target=lambda: heard.append(loading.get()))
    waiting.start()
    assert not loading.over
    loading.give("model")
    waiting.join()
    loading.fail()  # at the end of the command; the model stays
    assert heard == [loading.get()] == ["model"] and loading.over
    lost = Loading("lost")
    lost.fail()
    with pytest.raises(TokenPruneError, match="lost could not be loaded"):
        lost.get()


def test_the_files_of_a_page_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", "elsewhere")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), own_folder() as folder:
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
