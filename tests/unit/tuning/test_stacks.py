# SPDX-License-Identifier: Apache-2.0
"""Stacks that the tuner proposes, and settings that the closed forms rule out, on made-up answers."""

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

# What each loses, and what it spends: the stack of two loses and spends what its parts do together.
SINGLES = {
    "downsample 0.9": (0.0, 0.9), "downsample 0.5": (0.003, 0.5), "tome 0.5": (0.3, 0.6), "divprune 0.5": (0.003, 0.8),
    "divprune 0.25": (0.2, 0.7), "fastv 0.5": (0.0, 0.85),
}  # fmt: skip


class World(Fake):
    """Also answers stacks: they lose what any of their parts loses, and spend the product."""

    def _parts(self, candidate: Setting | None) -> list[Setting]:
        setting = None if candidate is None else candidate.to_json()
        if setting is None or not isinstance(setting["method"], list):
            return []
        pairs = zip(setting["method"], setting["keep"], strict=True)
        return [Setting.from_json({**one, "keep": keep}) for one, keep in pairs]

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


def found(**options: Any) -> tuple[World, Tuner, Any]:
    world = World(1500, candidates(SINGLES))
    tuner = Tuner(world, list(world.costs), Promise(0.03), objective="flops", repeats=1, **options)
    return world, tuner, tuner.run()


def test_the_best_stack_beats_the_best_method() -> None:
    _, tuner, alone = found()
    assert str(alone.choice.candidate) == "downsample 0.5" and tuner.stacks == 0
    world, tuner, tuning = found(stacks=12)
    assert tuning.choice.candidate.name == "downsample+divprune+fastv"
    assert tuning.choice.candidate.keep_text == "0.5, 0.5, 0.5" and tuning.choice.bound < 0.03
    stacks = [trial for trial in tuning.trials if "+" in trial.candidate.name]
    assert 0 < len(stacks) <= 12 and all(trial.state for trial in stacks)
    assert tuner._done <= tuner.total
    # tome lost too much to be stacked, and nothing was asked twice.
    assert not any("tome" in trial.candidate.name for trial in stacks)
    assert len(set(world.asked)) == len(world.asked)
    assert "downsample+divprune+fastv, keep 0.5, 0.5, 0.5" in describe_outcome(tuning)[0]


def test_stacks_are_made_of_the_fronts_of_two_sites_and_more() -> None:
    settings = candidates({"downsample 0.5": (0, 0), "divprune 0.5": (0, 0), "dart 0.5": (0, 0), "pool 0.5": (0, 0)})
    down, div, dart, pool = settings
    right = np.zeros(100)
    wrong = np.concatenate([np.ones(10), np.zeros(90)])
    alone = [StackPart(down, right, 0.5), StackPart(div, right, 0.6)]
    alone += [StackPart(pool, wrong, 0.7), StackPart(dart, wrong, 0.5)]
    assert find_sites(settings) == {Site.PRE_ENCODER, Site.PRE_LLM, Site.IN_LLM}

    def estimate(drops: np.ndarray, saving: float) -> Estimate:
        return Estimate.from_drops(drops, saving, Promise(0.15), 1000)

    made = propose_stacks(alone, lambda candidate: None, estimate)
    names = {one.name for one in made}
    # pool loses more than divprune, which acts where it does and spends less.
    assert "downsample+divprune+dart" in names and not any("pool" in name for name in names)
    assert {len(one.methods) for one in made} == {2, 3} and len(set(made)) == len(made)
    assert len(propose_stacks(alone, lambda candidate: None, estimate, max_stacks=1)) == 1
    # What spends no less than a setting that loses no more is left out.
    assert not propose_stacks(alone, lambda candidate: 0.55, estimate)
    seeded = StackPart(Setting.from_json({"method": "random", "keep": 0.5, "seed": 0}), right, 0.4)
    (one, *_) = propose_stacks([alone[0], seeded], lambda candidate: None, estimate)
    assert one.to_json() == {"method": [{"method": "downsample"}, {"method": "random", "seed": 0}], "keep": [0.5, 0.5]}


def test_methods_that_stack_nothing_are_left_alone() -> None:
    assert not find_sites(build_grid(["pevlm", "view_select"], [0.5]))
    world = World(600, candidates({"dart 0.9": (0.0, 0.9), "dart 0.5": (0.0, 0.5)}))
    assert Tuner(world, list(world.costs), Promise(0.03), stacks=9).stacks == 0  # one site


def test_what_cannot_win_is_not_asked() -> None:
    keeps = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    losses = {f"pool {keep}": (0.0, keep) for keep in keeps} | {"divprune 0.35": (0.0, 0.35), "dart 0.95": (0.2, 1.0)}
    fake = Fake(1500, candidates(losses))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03), objective="flops", repeats=1)
    assert not any(trial.state for trial in tuner.trials) and tuner.run().choice is not None
    asked_of_all = len(fake.asked)

    fake = Fake(1500, candidates(losses))
    fake.predicted = {one: {"flops": cost} for one, cost in fake.costs.items()}
    tuning = Tuner(fake, list(fake.costs), Promise(0.03), objective="flops", repeats=1).run()
    states = {str(trial.candidate): trial.state for trial in tuning.trials}
    assert states["dart 0.95"] == "saves no cost: 1.00x flops (predicted)"
    needed = {name for name, state in states.items() if "(predicted)" not in state}
    # Four that spend least, and the mildest of each method.
    assert needed == {"pool 0.2", "pool 0.3", "divprune 0.35", "pool 0.4", "pool 0.9"}
    assert states["pool 0.5"] == "not asked: 4 cheaper settings (predicted) lost no score"
    assert str(tuning.choice.candidate) == "pool 0.2" and len(fake.asked) <= asked_of_all - 5 * tuner.sizes[0]


def test_what_lost_something_rules_nothing_out() -> None:
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
    fake.times = {slow: 0.4, fast: 0.7}  # batches take the square of it
    tuning = Tuner(fake, list(fake.costs), Promise(0.02), objective="throughput", repeats=1).run()
    assert tuning.choice.candidate == slow and tuning.ranked_by == "throughput"
    assert "questions a second 6.25x" in describe_outcome(tuning)[1]
    fake.spread = 0.6
    tuning = Tuner(fake, list(fake.costs), Promise(0.02), objective="throughput", repeats=1).run()
    assert tuning.ranked_by == "flops" and "ranked by prefill FLOPs instead" in describe_outcome(tuning)[-1]


def test_the_tower_counts_before_times_are_there() -> None:
    cost = {
        "prefill_flops_ratio": 0.4, "visual_tokens_average": 1, "visual_tokens_in": 2, "kv_bytes": 1, "kv_bytes_full": 2
    }  # fmt: skip
    assert compute_shares(cost, None)["work"] == 0.4
    assert compute_shares(cost, None, {"tower_share": 0.75, "tower": 1.0})["work"] == pytest.approx(0.85)
    assert compute_shares(cost, None, {"tower_share": 0.75, "tower": 0.2})["work"] == pytest.approx(0.25)
    subject = load_model("demo_vlm")
    panel = Evaluator(subject, load_heldout(limit=2))
    told = {name: panel.predict(one) for name, one in zip(("downsample", "divprune"), (
        *build_grid(["downsample"], [0.5]), *build_grid(["divprune"], [0.5])), strict=True)}  # fmt: skip
    assert told["divprune"]["tower"] == 1 > told["downsample"]["tower"] and 0.3 < told["divprune"]["tower_share"] < 0.5
    assert told["downsample"]["flops"] == told["divprune"]["flops"] < told["divprune"]["work"]
    assert told["divprune"]["tokens"] == 0.5
    tuner = Tuner(panel, build_grid(["downsample", "divprune"], [0.5]), Promise(0.4))
    assert tuner._by == "work" == tuner._stand_in


def test_times_begin_with_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks once a look: what the processor takes is part of the time to the first token."""
    from contextlib import nullcontext

    from tokenprune_bench.profiling import timing

    ticks = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks) / 1000)
    subject, example = load_model("demo_vlm"), load_heldout(limit=1)[0]

    def ask() -> Any:
        for _ in range(4):
            timing.time.perf_counter()
        return subject.inputs([example.image], [example.question])

    without, whole = (
        compare_times(subject, nullcontext, ask, 1, 2, processor=processor) for processor in (False, True)
    )
    assert whole["ttft_ms"]["p50"] - without["ttft_ms"]["p50"] == pytest.approx(5)
    assert whole["ttft_ms_unpatched"]["p50"] == whole["ttft_ms"]["p50"]
    assert whole["token_ms"] == without["token_ms"]
    runs: list[str] = []

    def looks(name: str, count: int) -> Callable[[], None]:
        return lambda: (runs.append(name), [timing.time.perf_counter() for _ in range(count)])[0]

    batch = compare_batches(looks("whole", 9), looks("small", 4), 2, 3)
    assert batch["batch_ratio"]["p50"] == 0.5 and batch["batch_ms_unpatched"]["p50"] == 10 and batch["batch_rows"] == 3
    assert sorted(runs) == ["small"] * 3 + ["whole"] * 3
