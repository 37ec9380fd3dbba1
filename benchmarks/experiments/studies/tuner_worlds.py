# SPDX-License-Identifier: Apache-2.0
"""How often does the tuner answer, and how often wrongly? Search in simulated worlds whose true losses are known.

python experiments/studies/tuner_worlds.py --search NAME   # adds rows under this name, in place of those it has
python experiments/studies/tuner_worlds.py --page        # write the table of results into docs/measure/tune.md

Answers are drawn, so that no model is needed. A question that one setting gets wrong is a hard one for the others, too.
With PYTHONPATH the tuner of another checkout can be measured.
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
SHOWN = "after"  # of the searches that were simulated
BEGIN, END = "<!-- worlds:begin (benchmarks/experiments/studies/tuner_worlds.py --page) -->", "<!-- worlds:end -->"
LIMIT, CONFIDENCE = 0.03, 0.95
RIGHT = 0.9  # share of the questions that the unpatched model gets right
ALIKE = 0.5  # correlation of how hard a question is for two settings
METHODS = ("dart", "divprune", "pool", "visionzip", "prumerge", "tome", "cdpruner", "scope")
COSTS = {0.75: 0.72, 0.5: 0.47, 0.25: 0.24}  # prefill FLOPs, patched / unpatched, of the shipped model
INSIDE = {0.75: 0.82, 0.5: 0.65, 0.25: 0.49}  # of a cut inside the decoder


@dataclass(frozen=True)
class World:
    """losses: the true drop and the cost for each method and keep. changed: share of answers that get better and,
    beyond the drop, as many that get worse."""

    title: str
    questions: int
    losses: dict[tuple[str, float], tuple[float, float]]
    changed: float = 0.0


def _all(of: Callable[[int, float], float], methods: int = 4) -> dict[tuple[str, float], tuple[float, float]]:
    names = enumerate(METHODS[:methods])
    return {(name, keep): (of(place, keep), cost) for place, name in names for keep, cost in COSTS.items()}


def _gradual(place: int, keep: float) -> float:
    return 0.04 * (place + 1) * (1 - keep) ** 2


def _mixed(place: int, keep: float) -> float:
    return LIMIT * (0.6 + 0.6 * ((3 * place + 4 * keep) * 5 % 24) / 23)


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
    "harmless": World("nothing is lost", 300, _all(lambda place, keep: 0.0), 0.001),
    "harmful": World("all lose just the limit", 600, _all(lambda place, keep: LIMIT), 0.005),
    "one": World(
        "one passes, the others lose 1.5 limits",
        300,
        _all(lambda place, keep: 1.5 * LIMIT) | {("pool", 0.75): (0.0, 0.72)},
    ),
    "gradual": World("the less is kept the more is lost", 600, _all(_gradual), 0.002),
    "shipped": World("as the shipped model, few questions", 208, _SHIPPED, 0.002),
    "bound": World("24 settings lose 0.6 to 1.2 limits", 1500, _all(_mixed, 8), 0.005),
    "reversed": World("the less is kept the less is lost", 300, _all(lambda place, keep: LIMIT * 3 * (keep - 0.25))),
}


class Simulated:
    """A panel of drawn answers to the questions of a world."""

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

    def scores(self, candidate: Setting | None, numbers: Sequence[int]) -> np.ndarray:
        return self.answers[candidate][list(numbers)]

    def cost(self, candidate: Setting) -> dict[str, Any]:
        ratio = self.share[candidate]
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": ratio, "visual_tokens_in": 1, "keep_ratio": ratio,
            "kv_bytes": ratio, "kv_bytes_full": 1,
        }  # fmt: skip

    def predict(self, candidate: Setting) -> dict[str, float]:
        return {"flops": self.share[candidate]}

    def time(self, candidate: Setting, numbers: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        ratio = dict.fromkeys(("p20", "p50", "p80"), self.share[candidate])
        return {"ttft_ratio": ratio, "ttft_ms_unpatched": {"p50": 1.0}}


def play(name: str, runs: int) -> dict[str, Any]:
    """Tune in `runs` draws of a world; "broken": choices whose true drop is not below the limit."""
    world, chosen, tests, asked = WORLDS[name], [], 0, 0
    for run in range(runs):
        panel = Simulated(world, np.random.default_rng([list(WORLDS).index(name), run]))
        found = Tuner(panel, list(panel.true), Promise(LIMIT, CONFIDENCE), seed=run, objective="flops").run()
        tests, asked = tests + len(found.tested), asked + panel.asked
        if found.choice is not None:
            chosen.append((panel.true[found.choice.candidate], panel.share[found.choice.candidate]))
    return {
        "world": name, "questions": world.questions, "runs": runs, "answered": len(chosen),
        "broken": sum(drop >= LIMIT for drop, _ in chosen),
        "saved": round(sum(1 - share for _, share in chosen) / runs, 4),  # nothing where there is no answer
        "tests": round(tests / runs, 2), "asked": round(asked / runs),
    }  # fmt: skip


def table(path: Path) -> str:
    """Return the table in Markdown: for each world, what the search that is in force does."""
    (head, *records) = map(json.loads, path.read_text().splitlines())
    lines = [
        f"Promise: less than {100 * head['limit']:g} points lost, confidence {100 * head['confidence']:g} %. Saved: "
        "prefill FLOPs, nothing where there is no answer. A promise is false where the true loss of the choice is not "
        "below the limit.",
        "",
        "| world | questions | runs | answered | false promises | saved on average | answers asked for |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, world in WORLDS.items():
        lines += [
            f"| {world.title} | {one['questions']} | {one['runs']} "
            f"| {one['answered'] / one['runs']:.0%} | {one['broken'] / one['runs']:.1%} | {one['saved']:.0%} "
            f"| {one['asked']} |"
            for one in records
            if one["world"] == name and one["search"] == SHOWN
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", default="today", help="a name for the search that is simulated")
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--page", action="store_true", help="write the table of --out into docs/measure/tune.md")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.page:
        fill_page(PAGE, BEGIN, END, table(args.out))
        return
    # What a tuner only reports, and decides nothing by, would take most of the time.
    tuner.compute_upper_bound, tuner.estimate_questions_needed = lambda drops, level: 1.0, lambda *given: None
    records = read(args.out)[1] if args.out.exists() else []
    for name in args.worlds.split(","):
        made = {"search": args.search, "code": code_version()} | play(name, args.runs)
        records = [one for one in records if (one["search"], one["world"]) != (args.search, name)] + [made]
        write(args.out, [header(torch.device("cpu"), limit=LIMIT, confidence=CONFIDENCE), *records])
        print(made, flush=True)


if __name__ == "__main__":
    main()
