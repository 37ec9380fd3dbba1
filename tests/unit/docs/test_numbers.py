# SPDX-License-Identifier: Apache-2.0
"""Numbers on pages: no placeholders, no times of a loaded machine, and speed with accuracy of one setting."""

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
TOWER_INCLUDED = "vision tower included"
readme = generator()
front_page, performance, rows = readme.front_page, readme.performance, readme.rows


def generated_parts() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the generated parts of all pages."""
    for page, parts in readme.PAGES.items():
        for name, make in parts.items():
            yield f"{page} {name}", make()


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences. Each table row and list item is separate."""
    lines = (re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*])", line) for line in text.splitlines())
    return [sentence for line in lines for sentence in line]


@each("page", GUIDES)
def test_pages_have_no_placeholder(page: Path) -> None:
    placeholder = PLACEHOLDER.search(page.read_text())
    assert placeholder is None, f"{placeholder[0]!r}: measure it, or remove the block"


def test_generated_parts_hold_no_placeholder() -> None:
    for name, text in generated_parts():
        assert not PLACEHOLDER.search(text), name


def test_speed_stands_beside_accuracy_at_one_setting_of_one_model() -> None:
    text = front_page.speed_and_accuracy()
    both = [sentence for sentence in split_sentences(text) if SPEED.search(sentence) and ACCURACY.search(sentence)]
    assert len(both) == 1 and TOWER_INCLUDED in both[0] and "`demo_smol`" in both[0]


def test_no_generated_sentence_gives_speed_and_accuracy_of_two_settings() -> None:
    """A sentence with both mentions the tower, which only the sentence tested above does."""
    for name, text in generated_parts():
        for sentence in split_sentences(text):
            assert not (SPEED.search(sentence) and ACCURACY.search(sentence)) or TOWER_INCLUDED in sentence, (
                f"{name}: {sentence}"
            )
    assert SPEED.search("prefill x2.2 as fast") and ACCURACY.search("answers 76.1 % of 180 questions right")


def test_pages_omit_times_of_loaded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    names = {"efficiency": performance.efficiency, "scaling": performance.scaling}
    for name, make in names.items():
        header, records = rows.read(ROOT / f"benchmarks/results/cpu/{name}.jsonl")
        records = [record for record in records if record["method"] != "unpatched"][:3]
        for load in (1.0, 9.0):
            lines = [{**record, "load": load, "cpus": 2} for record in records]
            for record in lines:
                record.pop("loaded", None)
            rows.write(tmp_path / f"cpu/{name}.jsonl", [header, *lines])
            assert (f"| `{records[0]['method']}` |" in make()) == (load == 1.0), (name, load)
        assert make() == ""  # the empty table is omitted
        lines[0]["load"] = 1.0
        rows.write(tmp_path / f"cpu/{name}.jsonl", [header, *lines])
        assert f"| `{records[0]['method']}` |" in make() and "load at most 1" in make()


def test_loaded_rows_show_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, path = readme.tower_page, ROOT / "benchmarks/results/cpu/first_token.jsonl"
    header, records = rows.read(path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "FIRST_TOKEN", {tmp_path / "times.jsonl": "A model"})
    cut = next(record for record in records if record["way"] == "tome, in every block")
    for load in (1.0, 9.0):
        rows.write(tmp_path / "times.jsonl", [header, *({**record, "load": load, "cpus": 2} for record in records)])
        wall, cpu = f"{cut['times']:.2f} ({cut['least']:.2f}–{cut['most']:.2f})", f"| {cut['cpu']:.2f} |"
        assert (wall in page.first_token(), cpu in page.first_token()) == (load == 1.0, load == 9.0)
        assert ("s unpatched" in page.first_token()) == (load == 1.0)


def test_selection_times_come_from_the_raw_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = generator("evidence")
    header, records = rows.read(ROOT / "benchmarks/results/cpu/scaling.jsonl")
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    for load, is_shown in ((1.0, True), (9.0, False)):
        lines = [{**record, "load": load, "cpus": 2} for record in records]
        for record in lines:
            if (record["what"], record["method"]) == ("selection", "divprune"):
                record["points"]["32768"]["seconds"] = 3.125
        rows.write(tmp_path / "cpu/scaling.jsonl", [header, *lines])
        numbers = [entry["told"] for entry in evidence.choosing(lambda *args, **_: {"told": args[3]})]
        assert bool(numbers) == is_shown and all("`divprune` 3125 ms" in text for text in numbers)


def test_times_of_the_shipped_benchmark_come_from_quiet_rows() -> None:
    pages = readme.accuracy_pages
    for path in (pages.BENCH, pages.VIDEOS):
        shown = {(row.method, row.keep) for row in pages.results_of(path).rows if row.timing}
        _, records = rows.read(path)
        timed = [record for record in records if record.get("timing")]
        assert shown == {(record["method"], record["keep"]) for record in timed if not rows.is_loaded(record)}
        assert all(
            record["timing"]["load"] <= record["environment"]["cores"] for record in timed if not rows.is_loaded(record)
        )
