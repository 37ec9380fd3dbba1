# SPDX-License-Identifier: Apache-2.0
"""Stacks that the tuner proposes, and settings that cost predictions exclude, on simulated answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from made_up_panels import Fake, candidates
from tokenprune.selection.method import Site
from tokenprune.settings import Setting
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.profiling.timing import compare_batches, compare_times
from tokenprune_bench.tuning import Evaluator, Promise, Tuner, build_grid
from tokenprune_bench.tuning.estimate import Estimate
from tokenprune_bench.tuning.objective import compute_shares
from tokenprune_bench.tuning.report import describe_outcome
from tokenprune_bench.tuning.stacks import StackPart, explain_skip, find_sites, propose_stacks
from tokenprune_demo.heldout import load_heldout

# Loss and cost of each setting. World derives the loss and cost of a stack from its parts.
SINGLES = {
    "downsample 0.9": (0.0, 0.9), "downsample 0.5": (0.003, 0.5), "tome 0.5": (0.3, 0.6), "divprune 0.5": (0.003, 0.8),
    "divprune 0.25": (0.2, 0.7), "fastv 0.5": (0.0, 0.85),
}  # fmt: skip


class World(Fake):
    """Also answers stacks: a stack loses each question that a part loses, and its cost is the product."""

    def _parts(self, candidate: Setting | None) -> list[Setting]:
        setting = None if candidate is None else candidate.to_json()
        if setting is None or not isinstance(setting["method"], list):
            return []
        pairs = zip(setting["method"], setting["keep"], strict=True)
        return [Setting.from_json({**method, "keep": keep}) for method, keep in pairs]

    def ask(
        self, candidate: Setting | None, chunk: Sequence[int], told: Callable[[int], None] = lambda size: None
    ) -> None:
        if parts := self._parts(candidate):
            self.answers[candidate] = np.min([self.answers[part] for part in parts], axis=0)
            self.costs[candidate] = float(np.prod([self.costs[part] for part in parts]))
        super().ask(candidate, chunk, told)

    def predict(self, candidate: Setting) -> dict[str, float]:
        parts = self._parts(candidate) or [candidate]
        return dict.fromkeys(("flops", "work"), float(np.prod([self.costs[part] for part in parts])))


def tune(**options: Any) -> tuple[World, Tuner, Any]:
    world = World(1500, candidates(SINGLES))
    tuner = Tuner(world, list(world.costs), Promise(0.03), objective="flops", repeats=1, **options)
    return world, tuner, tuner.run()


def test_the_best_stack_beats_the_best_method() -> None:
    _, tuner, singles = tune()
    assert str(singles.choice.candidate) == "downsample 0.5" and tuner.stacks == 0
    world, tuner, tuning = tune(stacks=12)
    assert tuning.choice.candidate.name == "downsample+divprune+fastv"
    assert tuning.choice.candidate.keep_text == "0.5, 0.5, 0.5" and tuning.choice.bound < 0.03
    stacks = [trial for trial in tuning.trials if "+" in trial.candidate.name]
    assert 0 < len(stacks) <= 12 and all(trial.state for trial in stacks)
    assert tuner._done <= tuner.total
    # tome lost too much for a stack, and no question was answered twice.
    assert not any("tome" in trial.candidate.name for trial in stacks)
    assert len(set(world.asked)) == len(world.asked)
    assert "downsample+divprune+fastv, keep 0.5, 0.5, 0.5" in describe_outcome(tuning)[0]


def test_stacks_combine_the_best_settings_of_two_or_three_sites() -> None:
    settings = candidates({"downsample 0.5": (0, 0), "divprune 0.5": (0, 0), "dart 0.5": (0, 0), "pool 0.5": (0, 0)})
    downsample, divprune, dart, pool = settings
    right = np.zeros(100)
    wrong = np.concatenate([np.ones(10), np.zeros(90)])
    singles = [StackPart(downsample, right, 0.5), StackPart(divprune, right, 0.6)]
    singles += [StackPart(pool, wrong, 0.7), StackPart(dart, wrong, 0.5)]
    assert find_sites(settings) == {Site.PRE_ENCODER, Site.PRE_LLM, Site.IN_LLM}

    def estimate(drops: np.ndarray, saving: float) -> Estimate:
        return Estimate.from_drops(drops, saving, Promise(0.15), 1000)

    stacks = propose_stacks(singles, lambda candidate: None, estimate)
    names = {stack.name for stack in stacks}
    # pool acts at the same site as divprune, loses more and costs more.
    assert "downsample+divprune+dart" in names and not any("pool" in name for name in names)
    assert {len(stack.methods) for stack in stacks} == {2, 3} and len(set(stacks)) == len(stacks)
    assert len(propose_stacks(singles, lambda candidate: None, estimate, max_stacks=1)) == 1
    # A stack must cost less than each setting that loses as little.
    assert not propose_stacks(singles, lambda candidate: 0.55, estimate)
    seeded = StackPart(Setting.from_json({"method": "random", "keep": 0.5, "seed": 0}), right, 0.4)
    (stack, *_) = propose_stacks([singles[0], seeded], lambda candidate: None, estimate)
    assert stack.to_json() == {
        "method": [{"method": "downsample"}, {"method": "random", "seed": 0}],
        "keep": [0.5, 0.5],
    }


def test_methods_of_one_site_are_not_stacked() -> None:
    assert not find_sites(build_grid(["pevlm", "view_select"], [0.5]))
    world = World(600, candidates({"dart 0.9": (0.0, 0.9), "dart 0.5": (0.0, 0.5)}))
    assert Tuner(world, list(world.costs), Promise(0.03), stacks=9).stacks == 0  # a single site


def test_settings_that_cannot_win_are_skipped() -> None:
    keeps = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    losses = {f"pool {keep}": (0.0, keep) for keep in keeps} | {"divprune 0.35": (0.0, 0.35), "dart 0.95": (0.2, 1.0)}
    fake = Fake(1500, candidates(losses))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03), objective="flops", repeats=1)
    assert not any(trial.state for trial in tuner.trials) and tuner.run().choice is not None
    num_asked = len(fake.asked)

    fake = Fake(1500, candidates(losses))
    fake.predicted = {candidate: {"flops": cost} for candidate, cost in fake.costs.items()}
    tuning = Tuner(fake, list(fake.costs), Promise(0.03), objective="flops", repeats=1).run()
    states = {str(trial.candidate): trial.state for trial in tuning.trials}
    assert states["dart 0.95"] == "saves no cost: 1.00x flops (predicted)"
    needed = {name for name, state in states.items() if "(predicted)" not in state}
    # The four cheapest settings, and the largest keep of each method.
    assert needed == {"pool 0.2", "pool 0.3", "divprune 0.35", "pool 0.4", "pool 0.9"}
    assert states["pool 0.5"] == "not asked: 4 cheaper settings (predicted) lost no score"
    assert str(tuning.choice.candidate) == "pool 0.2" and len(fake.asked) <= num_asked - 5 * tuner.sizes[0]


def test_settings_with_losses_do_not_exclude_others() -> None:
    first, second = candidates({"pool 0.2": (0, 0), "pool 0.5": (0, 0)})
    cheap = SimpleNamespace(candidate=first, search=32, state="", drop=0.01, get_expected_share=lambda name: 0.2)
    trial = SimpleNamespace(candidate=second, search=0, state="", drop=None, get_expected_share=lambda name: 0.5)
    mild = SimpleNamespace(**vars(trial) | {"get_expected_share": lambda name: 0.9})
    assert explain_skip(trial, [cheap, trial, mild], "flops", 1) is None
    cheap.drop = 0.0
    assert explain_skip(trial, [cheap, trial, mild], "flops", 1) is not None
    assert explain_skip(mild, [cheap, trial, mild], "flops", 1) is None
    assert explain_skip(trial, [cheap, trial, mild], "flops", 2) is None
    trial.get_expected_share = lambda name: None
    assert explain_skip(trial, [cheap, trial, mild], "flops", 1) is None


def test_throughput_is_timed_on_batches() -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9), "dart 0.5": (0.0, 0.5)}))
    slow, fast = fake.costs
    fake.times = {slow: 0.4, fast: 0.7}  # a batch takes the square of this ratio
    tuning = Tuner(fake, list(fake.costs), Promise(0.02), objective="throughput", repeats=1).run()
    assert tuning.choice.candidate == slow and tuning.ranked_by == "throughput"
    assert "questions a second 6.25x" in describe_outcome(tuning)[1]
    fake.spread = 0.6
    tuning = Tuner(fake, list(fake.costs), Promise(0.02), objective="throughput", repeats=1).run()
    assert tuning.ranked_by == "flops" and "ranked by prefill FLOPs instead" in describe_outcome(tuning)[-1]


def test_predicted_costs_include_the_tower() -> None:
    cost = {
        "prefill_flops_ratio": 0.4, "visual_tokens_average": 1, "visual_tokens_in": 2, "kv_bytes": 1, "kv_bytes_full": 2
    }  # fmt: skip
    assert compute_shares(cost, None)["work"] == 0.4
    assert compute_shares(cost, None, {"tower_share": 0.75, "tower": 1.0})["work"] == pytest.approx(0.85)
    assert compute_shares(cost, None, {"tower_share": 0.75, "tower": 0.2})["work"] == pytest.approx(0.25)
    subject = load_model("demo_vlm")
    panel = Evaluator(subject, load_heldout(limit=2))
    predictions = {name: panel.predict(setting) for name, setting in zip(("downsample", "divprune"), (
        *build_grid(["downsample"], [0.5]), *build_grid(["divprune"], [0.5])), strict=True)}  # fmt: skip
    assert (
        predictions["divprune"]["tower"] == 1 > predictions["downsample"]["tower"]
        and 0.3 < predictions["divprune"]["tower_share"] < 0.5
    )
    assert predictions["downsample"]["flops"] == predictions["divprune"]["flops"] < predictions["divprune"]["work"]
    assert predictions["divprune"]["tokens"] == 0.5
    tuner = Tuner(panel, build_grid(["downsample", "divprune"], [0.5]), Promise(0.4))
    assert tuner._by == "work" == tuner._stand_in


def test_times_include_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that advances with each reading, the time to the first token includes the processor."""
    from contextlib import nullcontext

    from tokenprune_bench.profiling import timing

    ticks = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks) / 1000)
    subject, example = load_model("demo_vlm"), load_heldout(limit=1)[0]

    def ask() -> Any:
        for _ in range(4):
            timing.time.perf_counter()
        return subject.inputs([example.image], [example.question])

    without_processor, with_processor = (
        compare_times(subject, nullcontext, ask, 1, 2, processor=processor) for processor in (False, True)
    )
    assert with_processor["ttft_ms"]["p50"] - without_processor["ttft_ms"]["p50"] == pytest.approx(5)
    assert with_processor["ttft_ms_unpatched"]["p50"] == with_processor["ttft_ms"]["p50"]
    assert with_processor["token_ms"] == without_processor["token_ms"]
    runs: list[str] = []

    def build_run(name: str, count: int) -> Callable[[], None]:
        return lambda: (runs.append(name), [timing.time.perf_counter() for _ in range(count)])[0]

    batch = compare_batches(build_run("whole", 9), build_run("small", 4), 2, 3)
    assert batch["batch_ratio"]["p50"] == 0.5 and batch["batch_ms_unpatched"]["p50"] == 10 and batch["batch_rows"] == 3
    assert sorted(runs) == ["small"] * 3 + ["whole"] * 3
