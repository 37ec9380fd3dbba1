# SPDX-License-Identifier: Apache-2.0
"""The tuner's promise: how often it is broken in simulated worlds; and benchmarks/experiments/studies/tuner_promise.py,
which proves it on the shipped model: its arithmetic by hand, and the page that shows its results."""

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
    """A panel whose answers are drawn anew, question by question; of each candidate the true drop is known.

    drops: the true drop and the cost of each candidate, in the order of their keeps. flips: the share of answers that
    the patched model gets right and the unpatched one does not. The unpatched model is right nine times of ten.
    """

    videos = False

    def __init__(self, rng: np.random.Generator, drops: Sequence[tuple[float, float]], flips: float) -> None:
        self.kinds, self.groups = ["all"] * QUESTIONS, list(range(QUESTIONS))
        base = rng.random(QUESTIONS) < 0.9
        self.true = {
            Setting.from_json({"method": "dart", "keep": 1 - 0.1 * place}): one for place, one in enumerate(drops)
        }
        self.answers: dict[Setting | None, np.ndarray] = {None: base.astype(float)}
        for candidate, (drop, _) in self.true.items():
            lost, won = (drop + flips) / 0.9, flips / 0.1
            draw = rng.random(QUESTIONS)
            self.answers[candidate] = np.where(base, draw >= lost, draw < won).astype(float)

    def ask(self, candidate: Setting | None, chunk: Sequence[int], told: Callable[[int], None]) -> None:
        told(len(chunk))

    def scores(self, candidate: Setting | None, numbers: Sequence[int]) -> np.ndarray:
        return self.answers[candidate][list(numbers)]

    def cost(self, candidate: Setting) -> dict[str, Any]:
        ratio = self.true[candidate][1]
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": ratio, "visual_tokens_in": 1, "keep_ratio": ratio,
            "kv_bytes": ratio, "kv_bytes_full": 1,
        }  # fmt: skip

    def predict(self, candidate: Setting) -> dict[str, float]:
        return {}

    def time(self, candidate: Setting, numbers: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        ratio = self.true[candidate][1]
        return {"ttft_ratio": dict.fromkeys(("p20", "p50", "p80"), ratio), "ttft_ms_unpatched": {"p50": 1.0}}


def tuned(drops: Sequence[tuple[float, float]], flips: float, seed: int) -> tuple[list[bool], list[int]]:
    """Tune in many worlds; return for each choice whether its true drop is below the limit, and how many were tested
    each time."""
    kept, tested = [], []
    for run in range(RUNS):
        world = World(np.random.default_rng([seed, run]), drops, flips)
        found = Tuner(world, list(world.true), Promise(LIMIT, CONFIDENCE), seed=run).run()
        tested.append(len(found.tested))
        if found.choice is not None:
            kept.append(world.true[found.choice.candidate][0] < LIMIT)
    return kept, tested


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what a tuner works out to be told, and decides nothing by: it would take most of the time."""
    monkeypatch.setattr("tokenprune_bench.tuning.tuner.compute_upper_bound", lambda drops, level: 1.0)
    monkeypatch.setattr("tokenprune_bench.tuning.tuner.estimate_questions_needed", lambda *given: None)


COSTS = (0.9, 0.7, 0.5, 0.3)


@pytest.mark.usefixtures("decisions")
@pytest.mark.parametrize(
    ("drops", "flips"),
    [
        pytest.param((LIMIT,) * 4, 0.0, marks=pytest.mark.thorough),  # none is good, by a hair
        ((LIMIT,) * 4, 0.05),
        pytest.param((LIMIT, LIMIT, 0.5, 0.5), 0.05, marks=pytest.mark.thorough),
        ((LIMIT + 0.01, 0.12, 0.14, 0.16), 0.0),  # the safest is barely bad, and the others are worse
        ((LIMIT, 0.02, LIMIT, 0.02), 0.05),  # what costs most is not what is safest
        ((0.0, LIMIT, LIMIT, LIMIT), 0.0),  # the safest passes, and three bad ones come behind it
        pytest.param((0.06, LIMIT, LIMIT, LIMIT), 0.05, marks=pytest.mark.thorough),
    ],
    ids=["all-bad", "all-bad-flips", "two-bad", "barely-bad", "order", "one-good", "one-fair"],
)
def test_promises_are_kept_in_simulated_worlds(drops: tuple[float, ...], flips: float) -> None:
    """A drop of just the limit is no drop below it: choosing it counts as broken."""
    kept, _ = tuned(list(zip(drops, COSTS, strict=True)), flips, seed=1)
    broken = len(kept) - sum(kept)
    level = 1 - CONFIDENCE
    assert broken <= RUNS * level + 3 * math.sqrt(RUNS * level * (1 - level))


@pytest.mark.usefixtures("decisions")
def test_four_bad_settings_in_a_row_are_no_four_chances() -> None:
    """All four are finalists here, whatever the search says, and lose just what is not allowed, by other answers each:
    with a further try after each that fails, or the order of the test itself, promises would break far more often."""
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
def test_where_there_is_something_to_find_it_is_found() -> None:
    """Or the promise would be kept by saying nothing. With chances like these most runs end with the cheapest."""
    kept, tested = tuned([(0.0, 0.9), (0.01, 0.7), (0.02, 0.5), (0.3, 0.3)], 0.0, seed=2)
    assert all(kept) and len(kept) > 0.95 * RUNS
    assert 1 < np.mean(tested) <= 4


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/experiments/studies"))
    before = set(sys.modules)
    yield importlib.import_module("tuner_promise")
    for name in set(sys.modules) - before:  # `common` and the like are nobody else's names
        if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{ROOT}/experiments"):
            del sys.modules[name]


def test_questions_are_drawn_like_those_held_out(script: Any) -> None:
    first, again, other = script.draw(3, 1), script.draw(3, 1), script.draw(3, 2)
    assert Counter(one.kind for one in first) == dict.fromkeys(KINDS, 3)
    assert len({one.path for one in first}) == 3 and not {one.path for one in first} & {one.path for one in other}
    assert [(one.question, one.answers, one.image.tobytes()) for one in first] == [
        (one.question, one.answers, one.image.tobytes()) for one in again
    ]


def test_what_was_promised_is_held_against_what_was_measured(script: Any, tmp_path: Path) -> None:
    good, bad, later = ({"method": "pool", "keep": keep} for keep in (0.5, 0.25, 0.1))

    def tuned(seed: int, setting: Any) -> dict[str, Any]:
        held = {"questions": 60, "drop": setting and 0.01, "below": setting and 0.019}
        return {"record": "tuning", "seed": seed, "setting": setting, "prefill_flops_ratio": 0.5, "held_out": held}

    def fresh(setting: Any, lost: int) -> dict[str, Any]:
        return {"record": "fresh", "setting": setting, "right": "0" * lost + "1" * (100 - lost)}

    parts = [
        [fresh(None, 0), tuned(0, good), fresh(good, 1), tuned(2, None)],
        [tuned(1, bad), fresh(bad, 2), tuned(3, good), tuned(5, later)],
    ]
    out = tmp_path / "promise.jsonl"
    for rank, records in enumerate(parts):
        script._part(out, rank).write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "other.part0.jsonl").write_text(json.dumps(fresh(good, 90)) + "\n")  # of another run
    plan = argparse.Namespace(out=out, max_drop=0.02, confidence=0.95, methods="pool", keep="0.5", images=10, fresh=5)
    script.collect(plan)
    _, *records = map(json.loads, out.read_text().splitlines())
    kept = {one["seed"]: one.get("kept") for one in records if one["record"] == "tuning"}
    assert kept == {0: True, 1: False, 2: None, 3: True}
    table = script.table(out)
    assert "Kept in 2 of 3 choices, of 4 seeds" in table
    assert " to 2.00 points" in table


def test_the_page_shows_the_results(script: Any) -> None:
    page = (ROOT / "docs/measure/tune.md").read_text()
    shown = page.split(script.BEGIN)[1].split(script.END)[0]
    assert shown.strip() == script.table(script.RESULTS).strip()
