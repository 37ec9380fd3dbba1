# SPDX-License-Identifier: Apache-2.0
"""Test the leaderboard: accepted and refused runs, every committed entry, and its page."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tokenprune
from each import each
from report_runs import QUESTIONS, header, result, timing
from tests.unit.docs.test_docs import generator
from tokenprune.cli import app
from tokenprune.cli.scaffold import new_method
from tokenprune.methods import registry
from tokenprune_bench.errors import DataError
from tokenprune_bench.leaderboard import checks, entry, submit
from tokenprune_bench.leaderboard.checks import check_entry, get_file_name, read_entry, to_json
from tokenprune_bench.leaderboard.run import read_run
from tokenprune_bench.run_folder import SCHEMA
from tokenprune_demo.heldout import load_heldout

ROOT = Path(__file__).parents[3]
ENTRIES = sorted((ROOT / "benchmarks/experiments/leaderboard/entries").glob("*.json"))
ABOUT = dict(
    model="an-org/A_Model", model_type="llava", weights="", device="a GPU", dtype="bfloat16", cores=2, threads=1,
    python="3.11.7", torch="2.13.0", transformers="5.19.0", tokenprune="0.1.0", machine="x86_64",
)  # fmt: skip
VERSIONS = {name: ABOUT[name] for name in ("python", "torch", "transformers", "tokenprune")}
Records = list[dict[str, Any]]


def build_records() -> Records:
    """Return a run of three methods at a quarter of the tokens."""
    random = result("random", 0.25, 60, 60, seeds=[0, 1, 2])
    random["right"] *= 3
    fast = result("fastv", 0.25, 90, 80, site="IN_LLM", timing=timing(0.7))
    results = [result("unpatched", 1.0, 100, 90), random, result("downsample", 0.25, 50, 50, site="PRE_ENCODER"), fast]
    head = header(plan=dict(seeds=[0, 1, 2], equal_cost=True), rows=5, metric="exact")
    head["environment"] = dict(ABOUT)
    skipped = dict(record="skipped", method="dart", keep=0.25, reason="no")
    return [head, *(record | dict(environment=dict(ABOUT)) for record in results), skipped]


def write(folder: Path, lines: Records, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    about = dict(schema=SCHEMA, versions=VERSIONS, fingerprint="bfloat16:abc") | config
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", build_records())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> entry.LeaderboardEntry:
    return read_run(write(tmp_path_factory.mktemp("good"), build_records()), by="<b>|me")


def add(run: Path, to: Path, *more: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["leaderboard", "add", str(run), "--by", "A. N. Other", "--to", str(to), *more])
    assert result.exit_code == code, result.output
    return result


# -- adding a run ----------------------------------------------------------------------------------------------------


def test_an_entry_has_the_values_of_its_run(run: Path, tmp_path: Path) -> None:
    result = add(run, tmp_path, "--note", "500 of them")
    (path,) = tmp_path.glob("*.json")
    assert f"written: {path}\n" in result.stdout and re.fullmatch(r"an-org-a-model-[0-9a-f]{12}\.json", path.name)
    saved_entry = read_entry(path)
    assert (saved_entry.by, saved_entry.note, saved_entry.model) == ("A. N. Other", "500 of them", ABOUT["model"])
    assert (saved_entry.weights, saved_entry.versions, saved_entry.seeds) == ("bfloat16:abc", VERSIONS, [0, 1, 2])
    assert (saved_entry.questions, saved_entry.layers) == (QUESTIONS, 2)
    assert (
        saved_entry.equal_cost
        and saved_entry.engine == "hf"
        and (saved_entry.data, saved_entry.digest) == ("shipped", None)
    )
    assert saved_entry.unpatched[0] == 0.95 and saved_entry.visual_tokens == 100
    random, downsample, fastv = saved_entry.lines
    assert (random.method, random.score[0], random.tokens, random.kv) == ("random", 0.6, 0.25, 0.25)
    assert (fastv.site, fastv.query_aware, fastv.ttft, fastv.marks) == ("IN_LLM", True, 0.7, [])
    assert (downsample.site, downsample.query_aware, downsample.ttft) == ("PRE_ENCODER", False, None)
    assert downsample.marks == ["≤rnd"]
    again = add(run, tmp_path, code=2)
    assert "was added before" in again.stderr and list(tmp_path.glob("*.json")) == [path]


def test_a_run_of_the_benchmark_becomes_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_QUESTIONS", 2)
    folder, data = tmp_path / "run", tmp_path / "mine.jsonl"
    questions = load_heldout(kinds=("colour", "word"), limit=1)
    rows = [
        {"image": str(question.path), "question": question.question, "answer": question.answer}
        for question in questions
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = "bench --methods random --keep 0.25 --repeats 0 --samples 0 --device cpu --metric anls"
    result = CliRunner().invoke(app, [*fixed.split(), "--data", str(data), "--run", str(folder)])
    assert result.exit_code == 0, result.output
    add(folder, tmp_path)
    (path,) = tmp_path.glob("*.json")
    saved_entry = read_entry(path)
    assert [line.method for line in saved_entry.lines] == ["random", "downsample"] and saved_entry.questions == 2
    assert saved_entry.model == "demo_vlm (shipped)" and saved_entry.weights and not saved_entry.equal_cost
    assert (saved_entry.data, saved_entry.metric) == ("mine.jsonl", "anls") and len(saved_entry.digest) == 16
    assert str(tmp_path) not in path.read_text()
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(lines[:-1]))
    assert "has 2 of 3 rows" in add(folder, tmp_path, code=2).stderr


def _other(index: int, **changes: Any) -> Callable[[Records], None]:
    return lambda lines: lines[index].update(changes)


def _about(index: int, **changes: Any) -> Callable[[Records], None]:
    return lambda lines: lines[index]["environment"].update(changes)


def _all(**changes: Any) -> Callable[[Records], Any]:
    return lambda lines: [record["environment"].update(changes) for record in lines[:-1]]


def _one_seed(lines: Records) -> None:
    lines[0]["plan"] = dict(seeds=[0])
    lines[2] |= dict(seeds=[0], right=lines[2]["right"][:1])


def _short(lines: Records) -> None:
    lines[0]["kind_of_question"] = "01" * 20
    for record in lines[1:-1]:
        record |= dict(questions=40, right=[answers[:40] for answers in record["right"]])


BROKEN: dict[str, tuple[Callable[[Records], Any], str]] = {
    "another schema": (_other(0, schema=7), "has schema 7"),
    "no header": (lambda lines: lines.pop(0), "its first line is not a header"),
    "no unpatched row": (lambda lines: lines.pop(1), "lacks the row of the unpatched model"),
    "a row is missing": (lambda lines: lines.pop(4), "has 4 of 5 rows"),
    "no answers": (_other(0, evidence_only=True), "has no answers"),
    "limited": (lambda lines: lines[0]["plan"].update(max_visual_tokens=64), "limits the tokens of an image"),
    "an answer is missing": (lambda lines: lines[4]["right"].append(lines[4]["right"].pop()[:-1]), "damaged"),
    "an answer is neither": (lambda lines: lines[4].update(right=["7" * QUESTIONS]), "neither 1"),
    "another number of questions": (_other(4, questions=10), "does not have 200 answers"),
    "too few questions": (_short, "40 questions are too few. Ask at least 50"),
    "a seed is missing": (lambda lines: lines[2]["right"].pop(), "lacks some of the seeds"),
    "other seeds": (_other(2, seeds=[0, 1, 5]), "lacks some of the seeds"),
    "one seed": (_one_seed, "1 seeds are too few"),
    "another model": (_about(4, model="b"), "fastv ran with model 'b', not 'an-org/A_Model'"),
    "other weights": (_about(3, weights="b"), "downsample ran with weights 'b'"),
    "other versions": (_about(3, torch="1.0"), "downsample ran with different versions"),
    "versions of another run": (_all(torch="1"), "have different versions"),
    "nothing to compare with": (lambda lines: (lines.pop(2), lines[0].update(rows=4)), "line of random is missing"),
    "a folder of one machine": (_all(model="/data/models/x"), "with --model-name"),
    "an unknown method": (_other(4, method="mine"), "unknown method 'mine'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_run_that_does_not_fit_together_is_refused(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    lines = build_records()
    change(lines)
    run, to = write(tmp_path / "run", lines), tmp_path / "entries"
    to.mkdir()
    assert message in " ".join(add(run, to, code=2).stderr.split()) and not any(to.iterdir())


def test_a_model_in_a_folder_gets_a_name(tmp_path: Path) -> None:
    lines = build_records()
    _all(model="/data/models/x")(lines)
    assert read_run(write(tmp_path / "run", lines), by="me", model="org/x").model == "org/x"


def test_folders_without_a_run_are_refused(tmp_path: Path, run: Path) -> None:
    (tmp_path / "entries").mkdir()
    for folder in (tmp_path, tmp_path / "none", run / "results.jsonl"):
        assert "is not the folder of a run" in add(folder, tmp_path / "entries", code=2).stderr
    assert "does not exist" in add(run, tmp_path / "nowhere", code=2).stderr
    assert "has schema 1, but this version reads" in add(write(run, build_records(), schema=1), tmp_path, code=2).stderr
    (run / "config.json").write_text("{")
    assert "config.json is damaged" in add(run, tmp_path, code=2).stderr
    assert not list(tmp_path.glob("*.json"))


# -- entries ---------------------------------------------------------------------------------------------------------


def test_every_committed_entry_is_sound() -> None:
    for path in ENTRIES:
        read_entry(path)
    others = set((ROOT / "benchmarks/experiments/leaderboard/entries").iterdir()) - set(ENTRIES)
    assert {path.name for path in others} <= {".gitkeep"}


def _line(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["lines"][2].update(changes)


UNSOUND: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another schema": (lambda fields: fields.update(schema=2), "its schema is 2"),
    "a field too few": (lambda fields: fields.pop("seeds"), "missing field seeds"),
    "a field too many": (_line(extra=1), "line 2: unknown field extra"),
    "another type": (lambda fields: fields.update(questions="200"), "questions='200' must be an int >= 1"),
    "no number": (_line(tokens=float("nan")), "tokens=nan must be a number"),
    "a better score": (_line(score=[0.95, 0.8, 0.9]), "0.95 is not between"),
    "a narrower interval": (_line(score=[0.85, 0.84, 0.86]), "is not the interval of 0.85 of 200 questions"),
    "more than all": (_line(score=[1.2, 1.1, 1.3]), "1.2 is not a share"),
    "twice": (lambda fields: fields["lines"].append(fields["lines"][2]), "occurs twice"),
    "all or one": (_line(keep=1), "keep=1 is ambiguous"),
    "no site": (_line(site="MOON"), "is not one of PRE_ENCODER"),
    "another mark": (_line(marks=["best"]), "marks are"),
    "a long note": (lambda fields: fields.update(note="x" * 301), "note must be one line of at most 300"),
    "two lines": (lambda fields: fields.update(by="a\nb"), "by must be one line"),
    "nobody": (lambda fields: fields.update(by=" "), "must not be empty"),
    "no version": (lambda fields: fields["versions"].pop("tokenprune"), "must include tokenprune"),
    "no version of the engine": (lambda fields: fields.update(engine="vllm"), "must include vllm"),
    "another metric": (lambda fields: fields.update(metric="mine"), "metric='mine' is not one of exact"),
    "no date": (lambda fields: fields.update(date="yesterday"), "is not a date"),
    "no lines": (lambda fields: fields.update(lines=[]), "lines is empty"),
    "another name": (lambda fields: fields.update(run="0" * 12), "its name must be"),
}


@each("case", UNSOUND)
def test_an_entry_that_is_not_sound_is_refused(case: str, good: entry.LeaderboardEntry, tmp_path: Path) -> None:
    change, message = UNSOUND[case]
    fields = json.loads(json.dumps(to_json(good)))
    change(fields)
    path = tmp_path / get_file_name(good)
    path.write_text(json.dumps(fields))
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{re.escape(message)}"):
        read_entry(path)


def test_an_entry_is_read_as_it_was_written(good: entry.LeaderboardEntry, tmp_path: Path) -> None:
    path = tmp_path / get_file_name(good)
    path.write_text(json.dumps(to_json(good)))
    assert read_entry(path) == good


def test_the_template_names_every_field() -> None:
    template = json.loads((ROOT / "benchmarks/experiments/leaderboard/template.json").read_text())
    assert list(template) == [field.name for field in dataclasses.fields(entry.LeaderboardEntry)]
    assert list(template["lines"][0]) == [field.name for field in dataclasses.fields(entry.Line)]


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    return generator("leaderboard_page")


def test_the_page_is_current(script: Any) -> None:
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python dev/leaderboard_page.py"
    for run in map(script.ours, script.OURS):
        check_entry(dataclasses.replace(run.entry, run="0" * 12))


def test_a_row_has_the_values_of_its_line(
    script: Any, good: entry.LeaderboardEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "served", lambda: {"random": "yes", "fastv": "in_llm"})
    run = script.Run(good, ROOT / "benchmarks/experiments/leaderboard/entries/x.json")
    table = script.board([run]).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [
        f"| [`{n}`](../methods/{n}.md)" for n in ("fastv", "random", "downsample")
    ]
    fastv = table[2].strip("| ").split(" | ")
    low, high = (round(100 * end) for end in run.entry.lines[2].score[1:])
    assert fastv[1:] == [
        "an-org/A_Model", "25 %", f"85.0 [{low}–{high}]", "25.0", "0.70", "11 of 12", "in the language model", "yes",
        "in_llm",
    ]  # fmt: skip
    assert all(line.count(" | ") == len(script.COLUMNS) - 1 for line in table if "---" not in line)
    assert "&lt;b&gt;&#124;me" in script.sources([run])


def test_the_script_is_ours_and_knows_its_columns(script: Any) -> None:
    code = (ROOT / "docs/javascripts/leaderboard.js").read_text()
    assert not re.search(r"https?:|fetch\(|import |innerHTML|storage", code, re.IGNORECASE)
    assert set(script.FILTERS) <= set(script.COLUMNS)
    text = script.PAGE.read_text()
    assert f'<div id="board" data-filters="{",".join(script.FILTERS)}"></div>' in text
    assert 'getElementById("board")' in code and not re.search(r"^#+ board$", text, re.IGNORECASE | re.MULTILINE)


# -- a method of another package -------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["pre-llm", "in-llm"])
def test_a_method_of_another_package_is_checked_measured_and_written(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MIN_QUESTIONS", 2)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.syspath_prepend(folder := new_method("of_others", site, tmp_path / "made"))
    monkeypatch.chdir(folder)
    point = EntryPoint("of_others", "tokenprune_of_others", registry.ENTRY_POINT_GROUP)
    point.load()
    questions = load_heldout(kinds=("colour", "word"), limit=1)
    rows = [
        {"image": str(question.path), "question": question.question, "answer": question.answer}
        for question in questions
    ]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = "leaderboard submit of_others --keep 0.6 --data mine.jsonl --by me".split()
    try:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        (path,) = folder.glob("demo-vlm*.json")
        methods = [line.method for line in read_entry(path).lines]
        assert {"of_others", "random", "divprune", "uniform"} <= set(methods)
        page = Path("README.md").read_text()
        assert page.count("## Measured") == 1 and "| `of_others` | 0.6 |" in page
        path.unlink()
        monkeypatch.setattr(submit, "build_markdown_table", lambda entry: "another")
        assert CliRunner().invoke(app, command).exit_code == 0
        assert page.partition("<!--")[0] + "<!--" in Path("README.md").read_text()
        assert "another" in Path("README.md").read_text() and "of_others` | 0.6" not in Path("README.md").read_text()
    finally:
        sys.modules.pop("tokenprune_of_others", None)


def test_a_method_that_breaks_a_rule_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("# Mine\n")
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))

    @registry.register("breaks_it", site=tokenprune.Site.PRE_LLM, paper="none")
    @dataclasses.dataclass(frozen=True)
    class Breaks(tokenprune.Pruner):
        """Reads an observable that it did not declare."""

        def score(self, tokens: Any) -> Any:
            return tokens.keys.norm(dim=-1)

    fixed = ["leaderboard", "submit", "breaks_it", "--by", "me"]
    result = CliRunner().invoke(app, fixed)
    assert result.exit_code == 2 and "breaks_it" in result.output and not Path("runs").exists()
    assert "name one method" in CliRunner().invoke(app, [*fixed[:2], "divprune,dart", *fixed[3:]]).output
    assert "there is no page" in CliRunner().invoke(app, [*fixed, "--page", "none.md"]).output
    assert Path("README.md").read_text() == "# Mine\n"
