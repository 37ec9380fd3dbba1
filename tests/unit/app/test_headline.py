# SPDX-License-Identifier: Apache-2.0
"""The app's headline, link and examples, without a browser."""

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


def build_result(layers: list[int] = [64] * 4, **values: Any) -> SettingResult:
    stats = Stats(visual_tokens_per_layer=layers)
    return SettingResult(Setting.from_text("divprune", 0.25), 256, layers[-1], b"", stats, **values)


def build_comparison(result: SettingResult, before: str | None = None, right: str | None = None) -> Comparison:
    return Comparison(PagePrompt([], "what?", ("divprune",), right), b"", 256, (result,), False, before=before)


def build_ttft(p20: float, p50: float, p80: float, load: float | None = 0.1) -> dict[str, Any]:
    times = {"ttft_ms": {"p50": 100 * p50}, "ttft_ms_unpatched": {"p50": 100.0}}
    return {"ttft_ratio": {"p20": p20, "p50": p50, "p80": p80}, "load": load, **times}


def test_headlines_of_the_three_stages() -> None:
    result = build_result()
    assert headline.headline(build_comparison(result), result, 2) == "4x fewer visual tokens"
    result = replace(result, answer="Red.")
    assert headline.headline(build_comparison(result, "red"), result, 2) == "4x fewer visual tokens, same answer"
    result = replace(result, ttft=build_ttft(0.70, 0.71, 0.72))
    assert headline.headline(build_comparison(result, "blue"), result, 2) == (
        "4x fewer visual tokens, answer changed, 1.4x faster to the first token"
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([256] * 4, "all visual tokens kept"),
        ([0] * 4, "no visual tokens kept"),
        ([20] * 4, "13x fewer visual tokens"),
        ([256, 256, 64, 64], "1.6x fewer visual tokens on average over the layers"),
    ],
)
def test_describe_tokens(layers: list[int], message: str) -> None:
    assert headline.describe_tokens(build_result(layers)) == message


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (build_ttft(0.5, 0.5, 0.5), "2x faster"),
        (build_ttft(1.2, 1.25, 1.3), "1.2x slower"),
        (build_ttft(0.8, 0.9, 1.1), "no clear difference"),  # both faster and slower runs
        (build_ttft(0.96, 0.97, 0.98), "no clear difference"),  # below the smallest reported difference
        (build_ttft(0.5, 0.5, 0.5, load=100.0), "times not judged (busy machine)"),
        (build_ttft(1.2, 1.25, 1.3, load=100.0), "times not judged (busy machine)"),
        (build_ttft(0.5, 0.5, 0.5, load=None), "2x faster"),
    ],
)
def test_describe_speed(measured: dict[str, Any], message: str) -> None:
    assert headline.describe_speed(measured, 2).startswith(message)


@pytest.mark.parametrize(
    ("before", "after", "right", "message"),
    [
        ("red", "RED.", "red", "same answer"),
        ("red", "blue", None, "answer changed"),
        ("red", "blue", "red", "answer changed from right to wrong"),
        ("red", "blue", "Blue", "answer changed from wrong to right"),
        ("red", "blue", "green", "answer changed, both wrong"),
        ("the star is red.", "it is red", "red", "both answers right"),  # sentences of demo_smol
    ],
)
def test_describe_answer(before: str, after: str, right: str | None, message: str) -> None:
    assert headline.describe_answer(before, after, right) == message


def test_rendered_pages_mark_answers_and_warn_about_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_CORES", 2)
    monkeypatch.setattr(render, "get_machine_load", lambda: 0.1)
    result = build_result(answer="<b>red</b>", ttft=build_ttft(1.2, 1.25, 1.3))
    with_answer = build_comparison(result, "blue", right="blue")
    assert "✓ right" in render.panels(with_answer) and "✗ wrong" in render.panels(with_answer)
    assert "<b>red</b>" not in render.panels(with_answer) + render.details(with_answer)
    assert headline.WHY_SLOWER in render.head(with_answer, 0.25) and "busy" not in render.head(with_answer, 0.25)
    without_answer = build_comparison(result, "blue")
    assert "right" not in render.panels(without_answer) and "wrong" not in render.panels(without_answer)
    busy = build_comparison(replace(result, ttft=build_ttft(0.5, 0.5, 0.5, load=100.0)), "blue")
    assert "The machine was busy (load 100.0" in render.head(busy, 0.25)
    assert "faster" not in render.head(busy, 0.25)
    monkeypatch.setattr(render, "get_machine_load", lambda: 100.0)
    # before any measurement
    assert "The machine is busy (load 100.0" in render.head(build_comparison(build_result()), 0.25)


def test_links_round_trip() -> None:
    query = link.query(2, "is there <a> & b?", ("dart:pivot_text=0",), 0.3)
    assert "&second=&" in query and "<" not in query
    parsed = link.read(dict(parse_qsl(query[1:], keep_blank_values=True)) | {"__theme": "dark"}, 6)
    assert parsed == link.Shared(2, "is there <a> & b?", "dart:pivot_text=0", "", 0.3)
    without_example = link.query(None, "what is my name?", ("dart", "tome"), 0.3)
    assert "name" not in without_example and without_example == "?first=dart&second=tome&keep=0.3"
    assert link.read({}, 6) == link.Shared()


@pytest.mark.parametrize(
    ("params", "message"),
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
def test_bad_addresses_are_refused(params: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        link.read(params, 6)


@pytest.mark.parametrize("model", ["demo_vlm", "demo_qwen"])
def test_examples_are_recognized_by_content(model: str, tmp_path: Path) -> None:
    examples = Examples.load(model, tmp_path)
    assert len(examples.list_supported(False)) == 6 and [
        example.video for example in examples.list_supported(True)
    ] == [False] * 6 + [True]
    for index, example in enumerate(examples.listed, 1):
        copied = tmp_path / f"dropped-{index}{example.file.suffix}"
        copied.write_bytes(example.file.read_bytes())
        assert examples.find_answer(copied, example.question) and examples.find_number(copied) == index
        assert examples.find_answer(copied, "is it late?") is None
    other = tmp_path / "other.png"
    other.write_bytes(b"another")
    assert examples.find_number(other) is None and examples.find_answer(other, examples.listed[0].question) is None
