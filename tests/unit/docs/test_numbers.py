# SPDX-License-Identifier: Apache-2.0
"""Numbers on pages hold: no placeholders, no times of a loaded machine, and speed beside accuracy at one setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from each import each
from tests.unit.docs.test_docs import GUIDES, ROOT, generator

PLACEHOLDER = re.compile(
    r"not (?:\w+ )?(?:measured|compiled|predicted) yet|\bTODO\b|\bTBD\b|\bFIXME\b|coming soon", re.IGNORECASE
)
SPEED = re.compile(
    r"times as fast|\bx\d[\d.]* as fast|\b\d[\d.]*x\b|\d ms\b|requests a second|faster by \d", re.IGNORECASE
)
ACCURACY = re.compile(
    r"\d % (?:of [\d,]+ [\w ]*)?right|% of [\d,]+ questions|answers [\d.]+ %|points lost", re.IGNORECASE
)
WHICH = "vision tower included"
readme = generator()
front_page, performance, rows = readme.front_page, readme.performance, readme.rows


def texts() -> Iterator[tuple[str, str]]:
    """Yield the generated parts of all pages, by name."""
    for page, parts in readme.PAGES.items():
        for name, make in parts.items():
            yield f"{page} {name}", make()


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, each row of a table and each item of a list for itself."""
    lines = (re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*])", line) for line in text.splitlines())
    return [one for line in lines for one in line]


@each("page", GUIDES)
def test_no_page_holds_a_placeholder(page: Path) -> None:
    found = PLACEHOLDER.search(page.read_text())
    assert found is None, f"{found[0]!r}: measure it, or take the block away"


def test_generated_parts_hold_no_placeholder() -> None:
    for name, text in texts():
        assert not PLACEHOLDER.search(text), name


def test_speed_stands_beside_accuracy_at_one_setting_of_one_model() -> None:
    text = front_page.speed_and_accuracy()
    both = [one for one in sentences(text) if SPEED.search(one) and ACCURACY.search(one)]
    assert len(both) == 1 and WHICH in both[0] and "`demo_smol`" in both[0]


def test_no_generated_sentence_gives_speed_and_accuracy_of_two_settings() -> None:
    """One that gives both says that the tower is included, which only the sentence above can."""
    for name, text in texts():
        for one in sentences(text):
            assert not (SPEED.search(one) and ACCURACY.search(one)) or WHICH in one, f"{name}: {one}"
    assert SPEED.search("prefill x2.2 as fast") and ACCURACY.search("answers 76.1 % of 180 questions right")


def test_pages_leave_out_times_of_loaded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    names = {"efficiency": performance.efficiency, "scaling": performance.scaling}
    for name, make in names.items():
        header, records = rows.read(ROOT / f"benchmarks/results/cpu/{name}.jsonl")
        records = [one for one in records if one["method"] != "unpatched"][:3]
        for load in (1.0, 9.0):
            lines = [{**one, "load": load, "cpus": 2} for one in records]
            for one in lines:
                one.pop("loaded", None)
            rows.write(tmp_path / f"cpu/{name}.jsonl", [header, *lines])
            assert (f"| `{records[0]['method']}` |" in make()) == (load == 1.0), (name, load)
        assert make() == ""  # no empty table
        lines[0]["load"] = 1.0
        rows.write(tmp_path / f"cpu/{name}.jsonl", [header, *lines])
        assert f"| `{records[0]['method']}` |" in make() and "load at most 1" in make()


def test_times_to_the_first_token_are_of_cpu_time_where_rows_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, path = readme.tower_page, ROOT / "benchmarks/results/cpu/first_token.jsonl"
    header, records = rows.read(path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "FIRST_TOKEN", {tmp_path / "times.jsonl": "A model"})
    cut = next(one for one in records if one["way"] == "tome, in every block")
    for load in (1.0, 9.0):
        rows.write(tmp_path / "times.jsonl", [header, *({**one, "load": load, "cpus": 2} for one in records)])
        wall, cpu = f"{cut['times']:.2f} ({cut['least']:.2f}–{cut['most']:.2f})", f"| {cut['cpu']:.2f} |"
        assert (wall in page.first_token(), cpu in page.first_token()) == (load == 1.0, load == 9.0)
        assert ("s unpatched" in page.first_token()) == (load == 1.0)


def test_a_number_about_choosing_comes_from_the_raw_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = generator("evidence")
    header, records = rows.read(ROOT / "benchmarks/results/cpu/scaling.jsonl")
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    for load, told in ((1.0, True), (9.0, False)):
        lines = [{**one, "load": load, "cpus": 2} for one in records]
        for one in lines:
            if (one["what"], one["method"]) == ("selection", "divprune"):
                one["points"]["32768"]["seconds"] = 3.125
        rows.write(tmp_path / "cpu/scaling.jsonl", [header, *lines])
        found = [one["told"] for one in evidence.choosing(lambda *args, **_: {"told": args[3]})]
        assert bool(found) == told and all("`divprune` 3125 ms" in one for one in found)


def test_times_of_the_shipped_benchmark_are_of_quiet_rows() -> None:
    pages = readme.accuracy_pages
    for path in (pages.BENCH, pages.VIDEOS):
        shown = {(row.method, row.keep) for row in pages.results_of(path).rows if row.timing}
        _, records = rows.read(path)
        taken = [one for one in records if one.get("timing")]
        assert shown == {(one["method"], one["keep"]) for one in taken if not rows.is_loaded(one)}
        assert all(one["timing"]["load"] <= one["environment"]["cores"] for one in taken if not rows.is_loaded(one))
