# SPDX-License-Identifier: Apache-2.0
"""The error rate of the tuner's promise in simulated worlds, and the study that measures it on a shipped model.

The study is benchmarks/experiments/studies/tuner_promise.py. Tests cover its arithmetic and the page of its results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenprune.settings import Setting
from tokenprune_bench.tuning import Promise, Tuner
from tokenprune_demo.scenes import KINDS

ROOT = Path(__file__).parents[3]

LIMIT, CONFIDENCE, QUESTIONS, RUNS = 0.1, 0.8, 120, 150


class World:
    """A panel with random answers and a known true drop for each candidate.

    drops: True drop and cost of each candidate, by descending keep.
    flips: Share of answers that only the patched model gets right. The unpatched model answers 90 % right.
    """

    videos = False

    def __init__(self, rng: np.random.Generator, drops: Sequence[tuple[float, float]], flips: float) -> None:
        self.kinds, self.groups = ["all"] * QUESTIONS, list(range(QUESTIONS))
        base = rng.random(QUESTIONS) < 0.9
        self.true = {
            Setting.from_json({"method": "dart", "keep": 1 - 0.1 * index}): drop_and_cost
            for index, drop_and_cost in enumerate(drops)
        }
        self.answers: dict[Setting | None, np.ndarray] = {None: base.astype(float)}
        for candidate, (drop, _) in self.true.items():
            lost, won = (drop + flips) / 0.9, flips / 0.1
            draw = rng.random(QUESTIONS)
            self.answers[candidate] = np.where(base, draw >= lost, draw < won).astype(float)

    def ask(self, candidate: Setting | None, chunk: Sequence[int], on_batch: Callable[[int], None]) -> None:
        on_batch(len(chunk))

    def scores(self, candidate: Setting | None, indices: Sequence[int]) -> np.ndarray:
        return self.answers[candidate][list(indices)]

    def cost(self, candidate: Setting) -> dict[str, Any]:
        ratio = self.true[candidate][1]
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": ratio, "visual_tokens_in": 1, "keep_ratio": ratio,
            "kv_bytes": ratio, "kv_bytes_full": 1,
        }  # fmt: skip

    def predict(self, candidate: Setting) -> dict[str, float]:
        return {}

    def time(self, candidate: Setting, indices: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        ratio = self.true[candidate][1]
        return {"ttft_ratio": dict.fromkeys(("p20", "p50", "p80"), ratio), "ttft_ms_unpatched": {"p50": 1.0}}


def tune_worlds(drops: Sequence[tuple[float, float]], flips: float, seed: int) -> tuple[list[bool], list[int]]:
    """Tune in many worlds. Return if the true drop of each choice is below the limit, and the tests of each run."""
    kept, tested = [], []
    for run in range(RUNS):
        world = World(np.random.default_rng([seed, run]), drops, flips)
        tuning = Tuner(world, list(world.true), Promise(LIMIT, CONFIDENCE), seed=run).run()
        tested.append(len(tuning.tested))
        if tuning.choice is not None:
            kept.append(world.true[tuning.choice.candidate][0] < LIMIT)
    return kept, tested


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip slow computations that are only reported and do not influence decisions."""
    monkeypatch.setattr("tokenprune_bench.tuning.tuner.compute_upper_bound", lambda drops, level: 1.0)
    monkeypatch.setattr("tokenprune_bench.tuning.tuner.estimate_questions_needed", lambda *args: None)


COSTS = (0.9, 0.7, 0.5, 0.3)


@pytest.mark.usefixtures("decisions")
@pytest.mark.parametrize(
    ("drops", "flips"),
    [
        pytest.param((LIMIT,) * 4, 0.0, marks=pytest.mark.thorough),  # all at the limit
        ((LIMIT,) * 4, 0.05),
        pytest.param((LIMIT, LIMIT, 0.5, 0.5), 0.05, marks=pytest.mark.thorough),
        ((LIMIT + 0.01, 0.12, 0.14, 0.16), 0.0),  # the safest is slightly above the limit, and the others are worse
        ((LIMIT, 0.02, LIMIT, 0.02), 0.05),  # the most expensive setting is not the safest
        ((0.0, LIMIT, LIMIT, LIMIT), 0.0),  # the safest passes, three bad settings follow
        pytest.param((0.06, LIMIT, LIMIT, LIMIT), 0.05, marks=pytest.mark.thorough),
    ],
    ids=["all-bad", "all-bad-flips", "two-bad", "barely-bad", "order", "one-good", "one-fair"],
)
def test_promises_are_kept_in_simulated_worlds(drops: tuple[float, ...], flips: float) -> None:
    """A drop equal to the limit is not below it, so choosing it breaks the promise."""
    kept, _ = tune_worlds(list(zip(drops, COSTS, strict=True)), flips, seed=1)
    broken = len(kept) - sum(kept)
    level = 1 - CONFIDENCE
    assert broken <= RUNS * level + 3 * math.sqrt(RUNS * level * (1 - level))


@pytest.mark.usefixtures("decisions")
def test_a_sequence_of_bad_settings_fails_at_the_first() -> None:
    """All four settings are finalists with a drop equal to the limit, and lose different answers.

    Further tests after a failure, or an order that depends on the test, would break the promise far more often.
    """
    broken = 0
    for run in range(RUNS):
        world = World(np.random.default_rng([3, run]), [(LIMIT, cost) for cost in COSTS], 0.0)
        tuner = Tuner(world, list(world.true), Promise(LIMIT, CONFIDENCE), seed=run, objective="flops")
        for trial in tuner.trials:
            trial.search, trial.cost = 1, world.cost(trial.candidate)
        broken += tuner._tested(tuner.trials)[0] is not None
    level = 1 - CONFIDENCE
    assert 0 < broken <= RUNS * level + 2 * math.sqrt(RUNS * level * (1 - level))


@pytest.mark.usefixtures("decisions")
def test_good_settings_are_found() -> None:
    """A tuner that never chooses would keep its promise, too. Most runs end with the cheapest good setting."""
    kept, tested = tune_worlds([(0.0, 0.9), (0.01, 0.7), (0.02, 0.5), (0.3, 0.3)], 0.0, seed=2)
    assert all(kept) and len(kept) > 0.95 * RUNS
    assert 1 < np.mean(tested) <= 4


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/experiments/studies"))
    before = set(sys.modules)
    yield importlib.import_module("tuner_promise")
    for name in set(sys.modules) - before:  # `common` and similar names are used by this study only
        if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{ROOT}/experiments"):
            del sys.modules[name]


def test_fresh_questions_are_drawn_like_held_out_questions(script: Any) -> None:
    first, repeated, other = script.draw(3, 1), script.draw(3, 1), script.draw(3, 2)
    assert Counter(question.kind for question in first) == dict.fromkeys(KINDS, 3)
    assert len({question.path for question in first}) == 3 and not {question.path for question in first} & {
        question.path for question in other
    }
    assert [(question.question, question.answers, question.image.tobytes()) for question in first] == [
        (question.question, question.answers, question.image.tobytes()) for question in repeated
    ]


def test_promises_are_compared_with_fresh_measurements(script: Any, tmp_path: Path) -> None:
    good, bad, missing = ({"method": "pool", "keep": keep} for keep in (0.5, 0.25, 0.1))

    def tuning_record(seed: int, setting: Any) -> dict[str, Any]:
        held_out = {"questions": 60, "drop": setting and 0.01, "below": setting and 0.019}
        return {"record": "tuning", "seed": seed, "setting": setting, "prefill_flops_ratio": 0.5, "held_out": held_out}

    def fresh(setting: Any, lost: int) -> dict[str, Any]:
        return {"record": "fresh", "setting": setting, "right": "0" * lost + "1" * (100 - lost)}

    parts = [
        [fresh(None, 0), tuning_record(0, good), fresh(good, 1), tuning_record(2, None)],
        [tuning_record(1, bad), fresh(bad, 2), tuning_record(3, good), tuning_record(5, missing)],
    ]
    out = tmp_path / "promise.jsonl"
    for rank, records in enumerate(parts):
        script._part(out, rank).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "other.part0.jsonl").write_text(json.dumps(fresh(good, 90)) + "\n")  # a part of another run
    plan = argparse.Namespace(out=out, max_drop=0.02, confidence=0.95, methods="pool", keep="0.5", images=10, fresh=5)
    script.collect(plan)
    _, *records = map(json.loads, out.read_text().splitlines())
    kept = {record["seed"]: record.get("kept") for record in records if record["record"] == "tuning"}
    assert kept == {0: True, 1: False, 2: None, 3: True}
    table = script.table(out)
    assert "Kept in 2 of 3 choices, of 4 seeds" in table
    assert " to 2.00 points" in table


def test_the_page_shows_the_results(script: Any) -> None:
    page = (ROOT / "docs/measure/tune.md").read_text()
    table = page.split(script.BEGIN)[1].split(script.END)[0]
    assert table.strip() == script.table(script.RESULTS).strip()
