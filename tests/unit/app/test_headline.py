# SPDX-License-Identifier: Apache-2.0
"""The app's headline claims what was measured, and its link and examples hold what they say; no browser here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from tokenprune.errors import OptionError
from tokenprune.settings import Setting
from tokenprune.statistics import Stats
from tokenprune_bench.app import headline, link, render
from tokenprune_bench.app.comparison import Comparison, PagePrompt, SettingResult
from tokenprune_bench.app.examples import Examples
from tokenprune_bench.app.snippets import LONGEST


def asked(layers: list[int] = [64] * 4, **more: Any) -> SettingResult:
    stats = Stats(visual_tokens_per_layer=layers)
    return SettingResult(Setting.from_text("divprune", 0.25), 256, layers[-1], b"", stats, **more)


def compared(one: SettingResult, before: str | None = None, right: str | None = None) -> Comparison:
    return Comparison(PagePrompt([], "what?", ("divprune",), right), b"", 256, (one,), False, before=before)


def ttft(p20: float, p50: float, p80: float, load: float | None = 0.1) -> dict[str, Any]:
    times = {"ttft_ms": {"p50": 100 * p50}, "ttft_ms_unpatched": {"p50": 100.0}}
    return {"ttft_ratio": {"p20": p20, "p50": p50, "p80": p80}, "load": load, **times}


def test_a_headline_grows_with_what_is_known() -> None:
    one = asked()
    assert headline.headline(compared(one), one, 2) == "4x fewer visual tokens"
    one = replace(one, answer="Red.")
    assert headline.headline(compared(one, "red"), one, 2) == "4x fewer visual tokens, same answer"
    one = replace(one, ttft=ttft(0.70, 0.71, 0.72))
    assert headline.headline(compared(one, "blue"), one, 2) == (
        "4x fewer visual tokens, answer changed, 1.4x faster to the first token"
    )


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([256] * 4, "all visual tokens kept"),
        ([0] * 4, "no visual tokens kept"),
        ([20] * 4, "13x fewer visual tokens"),
        ([256, 256, 64, 64], "1.6x fewer visual tokens on average over the layers"),
    ],
)
def test_tokens_are_those_that_the_layers_saw(layers: list[int], said: str) -> None:
    assert headline.describe_tokens(asked(layers)) == said


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (ttft(0.5, 0.5, 0.5), "2x faster"),
        (ttft(1.2, 1.25, 1.3), "1.2x slower"),
        (ttft(0.8, 0.9, 1.1), "no clear difference"),  # runs of both kinds
        (ttft(0.96, 0.97, 0.98), "no clear difference"),  # too little to say so
        (ttft(0.5, 0.5, 0.5, load=100.0), "times not judged (busy machine)"),
        (ttft(1.2, 1.25, 1.3, load=100.0), "times not judged (busy machine)"),
        (ttft(0.5, 0.5, 0.5, load=None), "2x faster"),
    ],
)
def test_times_claim_no_more_than_was_measured(measured: dict[str, Any], said: str) -> None:
    assert headline.describe_speed(measured, 2).startswith(said)


@pytest.mark.parametrize(
    ("before", "after", "right", "said"),
    [
        ("red", "RED.", "red", "same answer"),
        ("red", "blue", None, "answer changed"),
        ("red", "blue", "red", "answer changed from right to wrong"),
        ("red", "blue", "Blue", "answer changed from wrong to right"),
        ("red", "blue", "green", "answer changed, both wrong"),
        ("the star is red.", "it is red", "red", "both answers right"),  # sentences of demo_smol
    ],
)
def test_what_became_of_an_answer(before: str, after: str, right: str | None, said: str) -> None:
    assert headline.describe_answer(before, after, right) == said


def test_the_page_marks_answers_warns_of_load_and_says_when_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_CORES", 2)
    monkeypatch.setattr(render, "get_machine_load", lambda: 0.1)
    one = asked(answer="<b>red</b>", ttft=ttft(1.2, 1.25, 1.3))
    found = compared(one, "blue", right="blue")
    assert "✓ right" in render.panels(found) and "✗ wrong" in render.panels(found)
    assert "<b>red</b>" not in render.panels(found) + render.details(found)
    assert headline.WHY_SLOWER in render.head(found, 0.25) and "busy" not in render.head(found, 0.25)
    unknown = compared(one, "blue")
    assert "right" not in render.panels(unknown) and "wrong" not in render.panels(unknown)
    busy = compared(replace(one, ttft=ttft(0.5, 0.5, 0.5, load=100.0)), "blue")
    assert "The machine was busy (load 100.0" in render.head(busy, 0.25)
    assert "faster" not in render.head(busy, 0.25)
    monkeypatch.setattr(render, "get_machine_load", lambda: 100.0)
    assert "The machine is busy (load 100.0" in render.head(compared(asked()), 0.25)  # before anything is timed


def test_a_link_says_again_what_was_asked() -> None:
    written = link.query(2, "is there <a> & b?", ("dart:pivot_text=0",), 0.3)
    assert "&second=&" in written and "<" not in written
    said = link.read(dict(parse_qsl(written[1:], keep_blank_values=True)) | {"__theme": "dark"}, 6)
    assert said == link.Shared(2, "is there <a> & b?", "dart:pivot_text=0", "", 0.3)
    own = link.query(None, "what is my name?", ("dart", "tome"), 0.3)
    assert "name" not in own and own == "?first=dart&second=tome&keep=0.3"
    assert link.read({}, 6) == link.Shared()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"file": "/etc/passwd"}, "unknown key 'file'"),
        ({"keep": "nan"}, "not a number"),
        ({"keep": "inf"}, "not a number"),
        ({"keep": "a lot"}, "not a number"),
        ({"keep": "0"}, "Use 0.05 to 1"),
        ({"keep": "1e9"}, "Use 0.05 to 1"),
        ({"example": "7"}, "1 to 6"),
        ({"example": "0"}, "1 to 6"),
        ({"example": "1.5"}, "1 to 6"),
        ({"example": "../1"}, "not a number"),
        ({"question": "x" * (LONGEST + 1)}, "too long"),
        ({"first": "x" * (LONGEST + 1)}, "too long"),
    ],
)
def test_an_address_is_not_trusted(params: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        link.read(params, 6)


@pytest.mark.parametrize("model", ["demo_vlm", "demo_qwen"])
def test_examples_know_their_answers_by_content(model: str, tmp_path: Path) -> None:
    examples = Examples.load(model, tmp_path)
    assert len(examples.list_supported(False)) == 6 and [one.video for one in examples.list_supported(True)] == [
        False
    ] * 6 + [True]
    for number, one in enumerate(examples.listed, 1):
        again = tmp_path / f"dropped-{number}{one.file.suffix}"
        again.write_bytes(one.file.read_bytes())
        assert examples.find_answer(again, one.question) and examples.find_number(again) == number
        assert examples.find_answer(again, "is it late?") is None
    other = tmp_path / "other.png"
    other.write_bytes(b"another")
    assert examples.find_number(other) is None and examples.find_answer(other, examples.listed[0].question) is None
