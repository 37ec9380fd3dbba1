# SPDX-License-Identifier: Apache-2.0
"""The command line: output, files and errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import tokenprune
from tokenprune.cli import app
from tokenprune.models import families
from tokenprune_bench import demo
from tokenprune_demo.heldout import FOLDER

IMAGE = FOLDER / "pictures/000.jpg"
SMALL = ("--images", 1, "--repeats", 0, "--device", "cpu")  # options of a small benchmark


def call(*arguments: object, code: int = 0) -> Result:
    # Wide enough for the tables, independent of the terminal that runs the tests.
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*arguments: object) -> str:
    """Return the single line of an error."""
    result = call(*arguments, code=2)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_version_prints_one_line() -> None:
    assert call("--version").output == f"tokenprune {tokenprune.__version__}\n"
    assert call("--version", "bench", "--nonsense").output == f"tokenprune {tokenprune.__version__}\n"
    assert "--version" in call("--help").output


def test_families_lists_sites_and_reasons() -> None:
    output = call("families").output
    lines = output.splitlines()
    (gemma,) = (line for line in lines if " gemma3 " in line)
    assert "PRE_LLM, IN_LLM" in gemma and "5.0" in gemma and "bidirectional attention" in gemma
    (mllama,) = (line for line in lines if " mllama " in line)
    assert "cross-attention" in mllama
    for name in (*families.SUPPORTED, *families.REFUSED):
        assert f" {name} " in output


def test_bench_takes_options_and_stacks(tmp_path: Path) -> None:
    methods = "dart:pivot_text=0,pivot_image=8,divprune+fastv:layer=3"
    result = call("bench", "--methods", methods, "--keep", "0.5", *SMALL, "--run", tmp_path)
    _, *records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    counts = {record["method"]: record["stats"]["visual_tokens_per_layer"] for record in records}
    # Eight questions with 256 tokens in six layers. dart cuts at layer 2, the stack before the decoder and at layer 3.
    assert counts["dart:pivot_text=0,pivot_image=8"] == [8 * count for count in (256, 256, 128, 128, 128, 128)]
    assert counts["divprune+fastv:layer=3"] == [8 * count for count in (128, 128, 128, 64, 64, 64)]
    assert "dart:pivot_text=0,pivot_image=8" in result.stdout and records[-1]["site"] == "PRE_LLM+IN_LLM"
    drawn = json.loads((tmp_path / "samples/samples.json").read_text())["samples"][0]["methods"]
    kept = {record["method"]: record["kept"] for record in drawn}
    assert (kept["dart:pivot_text=0,pivot_image=8"], kept["divprune+fastv:layer=3"]) == (128, 64)


def test_bench_report_and_their_files(tmp_path: Path) -> None:
    raw, page, plot = (tmp_path / name for name in ("out.jsonl", "out.html", "out.png"))
    files = ("--json", raw, "--html", page, "--plot", plot)
    result = call("bench", "--methods", "uniform", "--keep", "0.25", *SMALL, "--details", *files)
    for text in ("unpatched", "random", "downsample", "uniform", "256 → 64", "≤rnd", "Accuracy by kind", "grounding"):
        assert text in result.stdout
    assert "uniform 0.25" in result.stderr  # progress goes to stderr, not into a pipe
    records = [json.loads(line) for line in raw.read_text().splitlines()]
    assert [record["record"] for record in records] == ["header", *["result"] * 4]
    assert page.read_text().startswith("<!doctype html>")
    assert Image.open(plot).format == "PNG"
    assert str(tmp_path) not in raw.read_text() + page.read_text()

    second_page = tmp_path / "again.html"
    assert call("report", raw, "--details", "--html", second_page).stdout == result.stdout
    assert second_page.read_text() == page.read_text()
    assert "| uniform | 0.25 | 256 → 64 |" in call("report", raw, "--markdown").stdout


@pytest.mark.parametrize(("load", "is_noted"), [(100.0, True), (0.5, False)])
def test_demo_notes_a_busy_machine(load: float, is_noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REPEATS", 1)
    monkeypatch.setattr(demo, "NUM_QUESTIONS", 1)
    monkeypatch.setattr(demo, "get_machine_load", lambda: load)
    note = f"The machine was busy (load 100.0 on {os.cpu_count()} cores)"
    output = call("demo", "--model", "demo_vlm", "--device", "cpu").stdout
    assert (note in " ".join(output.split())) is is_noted


def test_demo_prints_one_screen_and_writes_a_page_and_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("demo", "--model", "demo_vlm", "--device", "cpu", "--out", "out")
    lines = result.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    for text in ("256 tokens", "64 tokens", "time to first token", "KV cache"):
        assert text in result.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/webp") == demo.NUM_QUESTIONS and "http" not in page.replace("http-equiv", "")
    assert Image.open(tmp_path / "out" / "kept.png").format == "PNG"


def count_lines(output: str) -> int:
    """Count terminal lines of 80 columns."""
    return sum(max(1, -(-len(line) // 80)) for line in output.splitlines())


def test_bench_prints_one_screen() -> None:
    methods = ("--methods", "uniform,divprune", "--keep", "0.5,0.25,0.11")
    output = call("bench", *methods, *SMALL).stdout
    assert count_lines(output) <= 24 and output.count("┏") == 1
    table, _, sentences = output.partition("┘\n")
    assert max(map(len, table.splitlines())) <= 80
    for text in ("unpatched", "256 → 64", "[95 % CI]", "TTFT", "KV"):
        assert text in table
    assert "Best at ≤ 1 point lost:" in sentences and "ass --details for all tables" in sentences


def test_profile_prints_one_screen() -> None:
    small = ("--methods", "divprune", "--repeats", 1, "--max-new-tokens", 2, "--device", "cpu")
    for arguments in (small, ("--config-only", "--methods", "divprune")):
        output = call("profile", *arguments).stdout
        assert count_lines(output) <= 24 and output.count("┏") == 1
        assert max(map(len, output.partition("┘\n")[0].splitlines())) <= 80


def test_show_writes_an_image(tmp_path: Path) -> None:
    out = tmp_path / "kept.png"
    result = call("show", IMAGE, "--method", "divprune", "--keep", "16", "--device", "cpu", "--out", out)
    assert "256 → 16" in result.output and "answer" in result.stdout
    assert len(result.stdout.splitlines()) <= 12 and max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert str(out) in result.output
    assert Image.open(out).format == "PNG"


def test_errors_print_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    for arguments, message in (
        (("bench", "--methods", "dartt"), "did you mean 'dart'"),
        (("show", IMAGE, "--method", "dartt"), "did you mean 'dart'"),
        (("bench", "--keep", "a"), "0.25"),
        (("show", IMAGE, "--keep", "0.5,0.25"), "is not one number"),
        (("bench", "--keep", "1.5"), "1.5"),
        (("show", tmp_path / "none.png"), "cannot read"),
        (("show", text), "as an image"),
        (("report", tmp_path / "none.jsonl"), "Cannot read"),
        (("demo", "--model", tmp_path), "cannot load"),
        (("bench", "--images", 1, "--device", "cpu", "--json", tmp_path / "no" / "out.jsonl"), "cannot write"),
    ):
        assert message in refused(*arguments), arguments


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert "tokenprune-bench" in refused("bench")


def test_other_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(tokenprune, "available_methods", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        call("methods")
