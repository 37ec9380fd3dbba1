# SPDX-License-Identifier: Apache-2.0
"""The tuner with a shipped model, and the tune command."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tokenprune
from made_up_panels import Fake, candidates
from tokenprune.cli import app
from tokenprune.errors import OptionError
from tokenprune.integrations.shared.attachment import get_attachment
from tokenprune.settings import Setting
from tokenprune_bench.backend import HfBackend
from tokenprune_bench.errors import RunError
from tokenprune_bench.group import Group
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.run_folder import RunFolder, config_of
from tokenprune_bench.tuning import Evaluator, Promise, Search, Tuner, build_grid
from tokenprune_bench.tuning.report import build_tuned_config
from tokenprune_demo.heldout import load_heldout


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model(device="cpu")


def test_candidates_are_asked_without_the_guard(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    """With the processor, which pixel methods get, the guard would read prompts, warn, and add to the measured time."""
    questions = [question for question in load_heldout(limit=2) if question.kind == "count"]
    candidate = Setting.from_json({"method": "downsample", "keep": 0.25})
    with caplog.at_level("WARNING", logger="tokenprune"):
        Evaluator(subject, questions).ask(candidate, [0, 1])
    assert caplog.records == []


def test_the_panel_stores_answers_and_resumes(subject: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = load_heldout(limit=1)
    (pool,) = build_grid(["pool"], [0.25])
    batch_sizes: list[int] = []
    generate = Model.generate

    def count_batches(self: Model, inputs: dict[str, Any], **options: Any) -> list[str]:
        batch_sizes.append(len(inputs["input_ids"]))
        return generate(self, inputs, **options)

    def open_folder(metric: str = "exact") -> RunFolder:
        return RunFolder(tmp_path / "run", config_of(subject, Search([pool.to_json()], 0, 3), metric, {}))

    monkeypatch.setattr(Model, "generate", count_batches)
    chunk = [5, 1, 3, 0]
    with open_folder() as folder:
        panel = Evaluator(subject, questions, batch_size=3, folder=folder)
        for candidate in (None, pool, pool):
            panel.ask(candidate, chunk)
        assert batch_sizes == [3, 1, 3, 1]
        with tokenprune.patched(subject.model, "pool", keep=0.25):
            chosen = [questions[index] for index in chunk]
            answers = generate(subject, subject.inputs([q.images for q in chosen], [q.question for q in chosen]))
        scores = [float(q.is_right(answer)) for q, answer in zip(chosen, answers, strict=True)]
        assert panel.scores(pool, chunk).tolist() == scores
        cost = panel.cost(pool)
        assert cost["keep_ratio"] == 0.25 and 0.2 < cost["prefill_flops_ratio"] < 0.3
    sizes: list[int] = []
    with open_folder() as folder:
        resumed = Evaluator(subject, questions, batch_size=3, folder=folder)
        assert resumed.is_cached(pool, chunk) and not resumed.is_cached(pool, [2])
        for candidate in (None, pool):
            resumed.ask(candidate, chunk, sizes.append)
        assert len(batch_sizes) == 4 and sizes == [4, 4]  # stored answers are reported but not generated again
        assert resumed.scores(pool, chunk).tolist() == scores and resumed.cost(pool) == cost
        resumed.ask(pool, [2, 4])
        assert batch_sizes[4:] == [2] and resumed.cost(pool)["visual_tokens_out"] == 6 * 64
    with pytest.raises(RunError, match='has a run with metric "exact", but this run has "anls"'):
        open_folder("anls").__enter__()
    with pytest.raises(OptionError, match="cider cannot be tuned"):
        Evaluator(subject, questions, "cider")


def test_processes_share_the_work(subject: Model, tmp_path: Path) -> None:
    questions, candidates = load_heldout(limit=5), build_grid(["pool", "uniform"], [0.5])
    single = Tuner(
        Evaluator(subject, questions, batch_size=4), candidates, Promise(0.4), objective="kv", repeats=1
    ).run()
    size = 2
    meeting, gathered, lock = threading.Barrier(size), [None] * size, threading.Lock()

    class Threads(Group):
        def gather(self, value: Any) -> list[Any]:
            gathered[self.rank] = value
            meeting.wait(60)
            values = list(gathered)
            meeting.wait(60)
            return values

    @dataclass
    class Locked(HfBackend):
        """Threads share one model. Processes would have one each."""

        subject: Model

        def __post_init__(self) -> None:
            super().__init__(self.subject)
            self.answers = 0

        @contextmanager
        def answering(self, setting: Any) -> Iterator[Any]:
            def answer(index: int, batch: list[Any]) -> Any:
                with lock, HfBackend.answering(self, setting) as ask:
                    self.answers += len(batch)
                    return ask(index, batch)

            yield answer

    backends, tunings = [Locked(subject) for _ in range(size)], [None] * size

    def work(rank: int) -> None:
        with RunFolder(tmp_path / "run", {}, Threads(rank, size)) as folder:
            panel = Evaluator(backends[rank], questions, batch_size=4, folder=folder, group=folder.group)
            tunings[rank] = Tuner(panel, candidates, Promise(0.4), objective="kv", repeats=1).run()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for tuning in tunings:
        assert [(trial.state, trial.drop, trial.search, trial.held_out) for trial in tuning.trials] == [
            (trial.state, trial.drop, trial.search, trial.held_out) for trial in single.trials
        ]
    assert tunings[0].choice.timing == tunings[1].choice.timing is not None
    num_answers = 40 + sum(trial.search + trial.held_out for trial in single.trials)
    assert (
        sum(backend.answers for backend in backends) == num_answers
        and min(backend.answers for backend in backends) > num_answers / 4
    )


def tune(*arguments: object, code: int = 0) -> Result:
    fixed = "tune --device cpu --limit 40 --methods pool,pevlm --keep 0.5".split()
    result = CliRunner(env={"COLUMNS": "220"}).invoke(app, [*fixed, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_patch_reads_the_config_of_the_command(tmp_path: Path, subject: Model) -> None:
    out, run = tmp_path / "tokenprune.json", tmp_path / "run"
    # The objective is bytes, because the order of times varies on a busy machine.
    by_bytes = ["--objective", "kv"]
    result = tune("--max-drop", "40%", *by_bytes, "--out", out, "--run", run)
    verdict, summary, *_ = result.stdout.splitlines()
    assert verdict == "pool, keep 0.5: less than 40 points lost, with a confidence of 95 %."
    assert re.match(
        r"accuracy % \d+\.\d → \d+\.\d on 24 held-out questions \(shown: less than .* points lost\); ", summary
    )
    assert "visual tokens 256 → 128 (50%" in summary and re.search(r"TTFT \d.* → \d.* ms \(\d\.\d\dx", summary)
    assert re.search(r"KV cache 12\d\d → 6\d\d KiB \(5\d%\); prefill FLOPs 47%, with", summary)
    assert summary.endswith("with the vision tower's 70%.")
    assert "pool" in result.stdout and "pevlm" not in result.stdout  # only tested settings are shown
    table = [line for line in result.stdout.splitlines() if line.startswith(tuple("┏┡│└┃"))]
    assert table and max(map(len, table)) <= 80 and len(result.stdout.splitlines()) <= 12
    assert "1 more settings were not tested. --details prints the reasons." in result.stdout
    assert re.match(r"2 settings, 40 questions: at most \d+ answers, about \d+ \w+\n", result.stderr)
    written = json.loads(out.read_text())
    assert written["setting"] == {"method": "pool", "keep": 0.5}
    tuned = written["tuned"]
    assert tuned["promise"] == {"max_drop": 0.4, "confidence": 0.95, "max_kind_drop": None, "target_ttft": None}
    assert tuned["questions"] == {"search": 16, "held_out": 24} and tuned["measured"]["drop_below"] <= 0.4
    assert tuned["objective"] == tuned["ranked_by"] == "kv"
    cost = tuned["cost"]
    assert (cost["visual_tokens"], cost["visual_tokens_unpatched"]) == (128, 256)
    assert cost["kv_bytes"] / cost["kv_bytes_unpatched"] == pytest.approx(cost["kv_ratio"]) != 1
    assert cost["ttft_ms"] == pytest.approx(cost["ttft_ratio"] * cost["ttft_ms_unpatched"])
    assert tuned["data"]["name"] == "held-out set of tokenprune" and len(tuned["measured"]["kinds"]) == 8
    assert tuned["environment"]["tokenprune"] == tokenprune.__version__ and str(tmp_path) not in out.read_text()
    with tokenprune.patched(subject.model, config=out):
        assert "pool" in get_attachment(subject.model).describe()
    # This run reuses all stored answers, and no setting keeps the stricter promise.
    out.unlink()
    stricter = ["--max-drop", "15%", "--confidence", "0.9", "--max-kind-drop", "0.1%", "--details"]
    repeated = tune(*stricter, *by_bytes, "--out", out, "--run", run, code=1)
    assert repeated.stdout.startswith("None of 1 tested was shown to lose less than 15 points") and not out.exists()
    assert "pevlm works on videos" in repeated.stdout and "goes on where it stopped" in repeated.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-drop", "1%"], "40 questions are too few for a drop below 1 point"),
        (["--max-drop", "1"], "1%, 1pt and 0.01 all mean"),
        (["--methods", "pol"], "did you mean 'pool'"),
        (["--target-ttft", "fast"], 'Use "0.5x"'),
        (["--objective", "foo"], "objective 'foo' is not known. Use one of ttft, throughput, tokens, flops, kv"),
        (["--out", "gone/tokenprune.json"], "the folder gone does not exist"),
        (["--data", "gone.jsonl"], "gone.jsonl does not exist"),
        (["--metric", "cidr"], "Metric 'cidr' is not known"),
        (["--metric", "cider"], "cider cannot be tuned"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "tokenprune_bench.profiling.model.load_model", lambda *args, **options: pytest.fail("the model was loaded")
    )
    result = tune("--max-drop", "40%", *arguments, code=2)
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_config_records_the_promise(subject: Model) -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9)}))
    tuning = Tuner(fake, list(fake.costs), Promise(0.02)).run()
    config = build_tuned_config(tuning, Evaluator(subject, load_heldout(limit=1)), {"name": "mine"})
    assert config.to_json() == {"method": "dart", "keep": 0.9}
    assert config.tuned["measured"] | {"kinds": None} == {
        "unpatched": 1.0, "tuned": 1.0, "drop": 0.0, "drop_below": tuning.choice.bound, "kinds": None
    }  # fmt: skip
    cost = {name: round(value, 9) for name, value in config.tuned["cost"].items()}
    assert cost == {
        "prefill_flops_ratio": 0.9, "keep_ratio": 0.9, "visual_tokens": 81, "visual_tokens_unpatched": 100,
        "kv_ratio": 0.15, "kv_bytes": 307.2, "kv_bytes_unpatched": 2048, "ttft_ratio": 0.9, "ttft_ms": 90,
        "ttft_ms_unpatched": 100, "ttft_reliable": True, "work_ratio": 0.9,
    }  # fmt: skip
    assert config.tuned["tested"] == 1 and config.tuned["objective"] == config.tuned["ranked_by"] == "ttft"


def test_bad_rows_are_skipped(tmp_path: Path) -> None:
    rows = [
        {"image": str(question.path), "question": question.question, "answer": question.answer, "kind": question.kind}
        for question in load_heldout(limit=5)
    ]
    rows[2]["question"] = "<image> " + rows[2]["question"]
    data, out = tmp_path / "mine.jsonl", tmp_path / "tokenprune.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    options = ["--limit", 0, "--max-drop", "40%", "--objective", "kv", "--data", data, "--out", out]
    rows_only = tmp_path / "rows.jsonl"
    rows_only.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        "line 3: its question contains the placeholder '<image>'" in tune(*options, "--data", rows_only, code=2).stderr
    )
    result = tune(*options, "--skip-bad")
    skipped = [line for line in result.stderr.splitlines() if line.startswith("skipped: ")]
    assert [line[:17] for line in skipped] == ["skipped: line 3: ", "skipped: line 41:"]
    tuned = json.loads(out.read_text())["tuned"]
    assert tuned["data"]["questions"] == 39 == sum(tuned["questions"].values()) and len(tuned["data"]["skipped"]) == 2
    assert tuned["objective"] == tuned["ranked_by"] == "kv"
