# SPDX-License-Identifier: Apache-2.0
"""Measure how often the tuner finds a setting, and how often it is wrong, in simulated worlds with known losses.

python experiments/studies/tuner_worlds.py --search NAME   # add rows under this name, or replace them
python experiments/studies/tuner_worlds.py --page        # write the table of results into docs/measure/tune.md

Answers are drawn at random, so no model is needed. Errors are correlated: a question that one setting answers wrongly
is hard for the other settings, too. Set PYTHONPATH to measure the tuner of another checkout. The raw file is
results/tuner_worlds.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import code_version, fill_page, header, read, write

from tokenprune.settings import Setting
from tokenprune_bench.tuning import Promise, Tuner, tuner

RESULTS = Path(__file__).parents[2] / "results/tuner_worlds.jsonl"
PAGE = Path(__file__).parents[3] / "docs/measure/tune.md"
SHOWN = "after"  # name of the search in the page's table
BEGIN, END = "<!-- worlds:begin (benchmarks/experiments/studies/tuner_worlds.py --page) -->", "<!-- worlds:end -->"
LIMIT, CONFIDENCE = 0.03, 0.95
RIGHT = 0.9  # accuracy of the unpatched model
ALIKE = 0.5  # correlation of a question's difficulty between two settings
METHODS = ("dart", "divprune", "pool", "visionzip", "prumerge", "tome", "cdpruner", "scope")
COSTS = {0.75: 0.72, 0.5: 0.47, 0.25: 0.24}  # prefill FLOPs of the shipped model, patched / unpatched
INSIDE = {0.75: 0.82, 0.5: 0.65, 0.25: 0.49}  # the same for a cut inside the decoder


@dataclass(frozen=True)
class World:
    """A simulated world.

    Attributes:
        title: Label in the table.
        questions: Number of questions.
        losses: True drop and cost of each method and keep.
        changed: Share of answers that improve, and share that get worse in addition to the drop.
    """

    title: str
    questions: int
    losses: dict[tuple[str, float], tuple[float, float]]
    changed: float = 0.0


def _all(loss: Callable[[int, float], float], methods: int = 4) -> dict[tuple[str, float], tuple[float, float]]:
    names = enumerate(METHODS[:methods])
    return {(name, keep): (loss(index, keep), cost) for index, name in names for keep, cost in COSTS.items()}


def _gradual(index: int, keep: float) -> float:
    return 0.04 * (index + 1) * (1 - keep) ** 2


def _mixed(index: int, keep: float) -> float:
    return LIMIT * (0.6 + 0.6 * ((3 * index + 4 * keep) * 5 % 24) / 23)


_SHIPPED = {
    (name, keep): (drop, costs[keep])
    for name, costs, drops in (
        ("fastv", INSIDE, (0.001, 0.007, 0.015)),
        ("divprune", COSTS, (0.007, 0.021, 0.030)),
        ("pool", COSTS, (0.007, 0.019, 0.027)),
    )
    for keep, drop in zip(costs, drops, strict=True)
}
WORLDS = {
    "harmless": World("nothing is lost", 300, _all(lambda index, keep: 0.0), 0.001),
    "harmful": World("all lose just the limit", 600, _all(lambda index, keep: LIMIT), 0.005),
    "one": World(
        "one passes, the others lose 1.5 limits",
        300,
        _all(lambda index, keep: 1.5 * LIMIT) | {("pool", 0.75): (0.0, 0.72)},
    ),
    "gradual": World("the less is kept the more is lost", 600, _all(_gradual), 0.002),
    "shipped": World("as the shipped model, few questions", 208, _SHIPPED, 0.002),
    "bound": World("24 settings lose 0.6 to 1.2 limits", 1500, _all(_mixed, 8), 0.005),
    "reversed": World("the less is kept the less is lost", 300, _all(lambda index, keep: LIMIT * 3 * (keep - 0.25))),
}


class Simulated:
    """Evaluator with random answers to the questions of a world."""

    videos = False

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        count = world.questions
        self.kinds, self.groups = ["all"] * count, list(range(count))
        right, hard = rng.random(count) < RIGHT, rng.standard_normal(count)
        self.answers: dict[Setting | None, np.ndarray] = {None: right.astype(float)}
        self.true, self.share, self.asked = {}, {}, 0
        for (method, keep), (drop, cost) in world.losses.items():
            candidate = Setting.from_json({"method": method, "keep": keep})
            self.true[candidate], self.share[candidate] = drop, cost
            grade = ALIKE**0.5 * hard + (1 - ALIKE) ** 0.5 * rng.standard_normal(count)
            share = (drop + world.changed) / RIGHT
            lost = grade < NormalDist().inv_cdf(share) if share else np.zeros(count, bool)
            won = rng.random(count) < world.changed / (1 - RIGHT)
            self.answers[candidate] = np.where(right, ~lost, won).astype(float)

    def ask(self, candidate: Setting | None, chunk: Sequence[int], on_batch: Callable[[int], None]) -> None:
        self.asked += len(chunk)
        on_batch(len(chunk))

    def scores(self, candidate: Setting | None, indices: Sequence[int]) -> np.ndarray:
        return self.answers[candidate][list(indices)]

    def cost(self, candidate: Setting) -> dict[str, Any]:
        ratio = self.share[candidate]
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": ratio, "visual_tokens_in": 1, "keep_ratio": ratio,
            "kv_bytes": ratio, "kv_bytes_full": 1,
        }  # fmt: skip

    def predict(self, candidate: Setting) -> dict[str, float]:
        return {"flops": self.share[candidate]}

    def time(self, candidate: Setting, indices: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        ratio = dict.fromkeys(("p20", "p50", "p80"), self.share[candidate])
        return {"ttft_ratio": ratio, "ttft_ms_unpatched": {"p50": 1.0}}


def play(name: str, runs: int) -> dict[str, Any]:
    """Tune in `runs` draws of a world. "broken" counts choices whose true drop is not below the limit."""
    world, chosen, tests, num_asked = WORLDS[name], [], 0, 0
    for run in range(runs):
        panel = Simulated(world, np.random.default_rng([list(WORLDS).index(name), run]))
        result = Tuner(panel, list(panel.true), Promise(LIMIT, CONFIDENCE), seed=run, objective="flops").run()
        tests, num_asked = tests + len(result.tested), num_asked + panel.asked
        if result.choice is not None:
            chosen.append((panel.true[result.choice.candidate], panel.share[result.choice.candidate]))
    return {
        "world": name, "questions": world.questions, "runs": runs, "answered": len(chosen),
        "broken": sum(drop >= LIMIT for drop, _ in chosen),
        "saved": round(sum(1 - share for _, share in chosen) / runs, 4),  # zero without a choice
        "tests": round(tests / runs, 2), "asked": round(num_asked / runs),
    }  # fmt: skip


def table(path: Path) -> str:
    """Return the Markdown table of the shown search in each world."""
    (head, *records) = map(json.loads, path.read_text().splitlines())
    lines = [
        f"Promise: less than {100 * head['limit']:g} points lost, confidence {100 * head['confidence']:g} %. Saved: "
        "prefill FLOPs, 0 without a choice. A promise is false if the true loss of the choice is not below the limit.",
        "",
        "| world | questions | runs | answered | false promises | saved on average | questions asked |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, world in WORLDS.items():
        lines += [
            f"| {world.title} | {record['questions']} | {record['runs']} "
            f"| {record['answered'] / record['runs']:.0%} | {record['broken'] / record['runs']:.1%} "
            f"| {record['saved']:.0%} | {record['asked']} |"
            for record in records
            if record["world"] == name and record["search"] == SHOWN
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", default="today", help="name of the simulated search")
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--page", action="store_true", help="write the table of --out into docs/measure/tune.md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.page:
        fill_page(PAGE, BEGIN, END, table(args.out))
        return
    # Skip values that the tuner only reports, because they would take most of the time.
    tuner.compute_upper_bound, tuner.estimate_questions_needed = lambda drops, level: 1.0, lambda *arguments: None
    records = read(args.out)[1] if args.out.exists() else []
    for name in args.worlds.split(","):
        row = {"search": args.search, "code": code_version()} | play(name, args.runs)
        records = [record for record in records if (record["search"], record["world"]) != (args.search, name)] + [row]
        write(args.out, [header(torch.device("cpu"), limit=LIMIT, confidence=CONFIDENCE), *records])
        print(row, flush=True)


if __name__ == "__main__":
    main()
