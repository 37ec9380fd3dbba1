# SPDX-License-Identifier: Apache-2.0
"""Compare the best stack of methods with the best single method and `downsample`, at a limited loss of accuracy.

    TOKENPRUNE_EMOJI=emoji.npz python experiments/stacks.py --images 70   # new images, 448 x 448: 784 visual tokens
    python experiments/stacks.py --images 0                              # held-out images of this size
    python experiments/stacks.py --retime                                # measure the times of the found settings again
    python experiments/stacks.py --page                                  # write the table into docs/measure/tune.md

(experiments/training/qwen/README.md describes how to create emoji.npz.) The model is demo_qwen. The tuner searches
among single methods and stacks, as `tokenprune tune --objective ttft`. For each group (downsample, single methods,
stacks), the setting with the least work by the closed forms answers all questions, and the next one if it loses too
much. The table has the measured loss, its confidence bound, and the profiled times from the image to the first token,
including processor and tower, in turn with the unpatched model. The raw file is benchmarks/results/DEVICE/stacks.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import Load, add_options, code_version, fill_page, header, read, results_path, write
from PIL import Image
from rich.console import Console
from rows import is_loaded

from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.profiling.profile import FIRST_TOKEN, STAGES, profile_call
from tokenprune_bench.profiling.profile_tables import format_setting
from tokenprune_bench.tables import Cell, Table, to_markdown, to_rich
from tokenprune_bench.tuning import Evaluator, Promise, Tuner, build_grid
from tokenprune_bench.tuning.betting import compute_upper_bound
from tokenprune_bench.tuning.promise import format_points
from tokenprune_bench.tuning.stacks import MAX_STACKS
from tokenprune_bench.tuning.trial import Trial
from tokenprune_demo.heldout import NATIVE, load_heldout
from tokenprune_demo.scenes import KINDS

SIDE = 448  # pixels per side, 784 visual tokens
METHODS = "downsample,tome,divprune,pool,vscan,fastv,dart,dyrate"
KEEPS = "0.75,0.5,0.35,0.25,0.15"
GROUPS = ("downsample", "single", "stack")
PAGE = Path(__file__).parents[2] / "docs/measure/tune.md"
BEGIN, END = "<!-- stacks:begin (benchmarks/experiments/stacks.py --page) -->", "<!-- stacks:end -->"


@dataclass(frozen=True, eq=False)
class Drawn:
    """A question about a drawn image. `path` identifies the image and is not a file."""

    path: str
    kind: str
    question: str
    answers: tuple[str, ...]
    image: Image.Image
    is_video: bool = False

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return (self.image,)


def questions(images: int, seed: int) -> list[Any]:
    """Return questions of all kinds about `images` drawn images of `SIDE` x `SIDE`. 0: the held-out images."""
    if not images:
        return [example for example in load_heldout(folder=NATIVE) if example.image.size == (SIDE, SIDE)]
    sys.path.insert(0, str(Path(__file__).parent / "training" / "qwen"))
    from native_scenes import draw_native

    rng, examples = np.random.default_rng(seed), []
    for index in range(images):
        scene = draw_native(rng, SIDE, SIDE, float(rng.uniform(1.1, 1.6)))
        image = Image.fromarray(scene.pixels[0])
        for kind in (*KINDS, "thing"):
            pool = [candidate for candidate in scene.questions if candidate.kind == kind]
            if pool:
                question = pool[int(rng.integers(len(pool)))]
                examples.append(Drawn(f"drawn {index}", kind, question.text, (question.answer,), image))
    return examples


def group_of(trial: Trial) -> str:
    """Return the group in `GROUPS` of a setting."""
    name = trial.candidate.name
    return "stack" if "+" in name else "downsample" if name == "downsample" else "single"


def best_of(group: str, tuner: Tuner, max_drop: float, tries: int) -> tuple[Trial, float, float] | None:
    """Return the setting of a group with the least work that loses at most `max_drop` on all questions.

    If all lose more, return the setting with the smallest loss. At most `tries` settings answer all questions.

    Returns:
        The setting, its loss, and the upper confidence bound of the loss; None if the search tried none of the group.
    """
    panel, everything = tuner.evaluator, [*tuner.search, *tuner.held_out]
    panel.ask(None, tuner.held_out)
    tried = [trial for trial in tuner.trials if trial.search and group_of(trial) == group]
    # Keep settings with one wrong answer too many: all questions decide.
    tried = [trial for trial in tried if trial.drop <= max_drop + 1 / trial.search] or tried
    best = None
    for trial in sorted(tried, key=lambda candidate: candidate.get_expected_share("work"))[:tries]:
        for part in (tuner.search, tuner.held_out):
            missing = [index for index in part if index not in panel.answered_questions(trial.candidate)]
            if missing:
                panel.ask(trial.candidate, missing)
        drops = panel.scores(None, everything) - panel.scores(trial.candidate, everything)
        result = trial, float(drops.mean()), compute_upper_bound(drops, 1 - tuner.promise.confidence)
        if result[1] <= max_drop:
            return result
        if best is None or result[1] < best[1]:
            best = result
    return best


def record(group: str, best: tuple[Trial, float, float], times: dict[str, Any], num_questions: int) -> dict[str, Any]:
    trial, drop, bound = best
    return {
        "group": group, "setting": trial.candidate.to_json(), "asked": num_questions, "drop": drop, "drop_below": bound,
        "work": trial.get_expected_share("work"), **times,
    }  # fmt: skip


def table(path: Path) -> Table:
    """Return the table of a raw file. Times of a loaded machine are left out."""
    about, lines = read(path)
    groups = [line for line in lines if "group" in line]
    quiet = [row for row in groups if not is_loaded(row, about)]
    rows = []
    for row in groups:
        cells = [row["group"], row["name"], f"{100 * row['drop']:.2f}", f"{100 * row['drop_below']:.1f}"]
        cells.append(f"x{1 / row['work']:.2f}")
        rows.append([*map(Cell, [*cells, *(_times(row) if row in quiet else [""] * len(TIMES) if quiet else [])])])
    columns = ("group", "setting", "points lost", "shown below", "by FLOPs", *(TIMES if quiet else ()))
    note = (
        f"{about['questions']} questions ({about['source']}) on images of {SIDE} x {SIDE} pixels, 784 visual tokens; "
        f"the unpatched model gets {100 * about['unpatched']:.1f} % right. "
        f"Allowed: {format_points(about['max_drop'])}; weights {about['weights']}, {about['date']}."
    )
    if quiet:
        note += (
            f" Time from the image on, processor and tower included: medians of {about['repeats']} pairs of runs, "
            f"{quiet[0].get('threads', about['threads'])} threads, load at most {max(row['load'] for row in quiet):g}."
        )
    return Table("demo_qwen, by group the setting that spends least", columns, rows, (note,))


TIMES = ("to the first token", "processor, ms", "tower, ms", "prefill, ms", "choosing, ms", "what limits")


def _times(row: dict[str, Any]) -> list[str]:
    cells = {
        stage: " → ".join(f"{row[side]['stages_ms'][stage]['p50']:.0f}" for side in ("before", "after"))
        for stage in STAGES
    }
    after = {stage: row["after"]["stages_ms"][stage]["p50"] for stage in FIRST_TOKEN}
    slowest = max(after, key=after.get)
    limits = f"{STAGES[slowest]}, {after[slowest] / sum(after.values()):.0%}"
    stages = [cells["processor"], cells["tower"], cells["prefill"]]
    return [f"x{row['speedup']:.2f}", *stages, f"{after['selection']:.0f}", limits]


def time_setting(
    subject: Any, examples: list[Any], setting: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Profile a setting in turn with the unpatched model, and return times and load."""
    load = Load(args.allow_load)
    profile = profile_call(subject, examples[0].images, examples[0].question, setting, repeats=args.repeats)
    about = load.record() | {"threads": args.threads, "code": code_version()}
    return {"name": format_setting(profile), **profile.as_dict(), **about}


def retime(path: Path, args: argparse.Namespace) -> None:
    """Measure the times of a file's groups again. With --resume, rows of this code that are not loaded are kept."""
    about, lines = read(path)
    subject = load_model("demo_qwen", device=args.device)
    examples = questions(0, args.seed)
    for line in lines:
        known = line.get("code") == code_version() and not is_loaded(line, about)
        if "group" in line and not (args.resume and known):
            line.pop("loaded", None)
            line |= time_setting(subject, examples, line["setting"], args)
            write(path, [about, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=70, help="number of drawn images; 0: use held-out images")
    parser.add_argument("--limit", type=int, help="maximum number of questions")
    parser.add_argument("--max-drop", type=float, default=0.01)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keep", default=KEEPS)
    parser.add_argument("--stacks", type=int, default=MAX_STACKS)
    parser.add_argument("--tries", type=int, default=6, help="maximum number of settings per group on all questions")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--retime", action="store_true", help="measure the times of the settings in --json again")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=20260303)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/stacks.jsonl")
    parser.add_argument("--page", action="store_true", help="write the table of --json into docs/measure/tune.md")
    args = parser.parse_args()
    path, console = args.json or results_path(torch.device(args.device), "stacks"), Console(width=200)
    if args.page:
        fill_page(PAGE, BEGIN, END, to_markdown(table(path)))
        return
    torch.set_num_threads(args.threads)
    if args.retime:
        retime(path, args)
        return
    subject = load_model("demo_qwen", device=args.device)
    examples = questions(args.images, args.seed)[: args.limit]
    candidates = build_grid(args.methods.split(","), [float(keep) for keep in args.keep.split(",")])
    panel = Evaluator(subject, examples, batch_size=args.batch_size)
    # Few questions cannot prove a loss below one point. Relax the promise until the search can run.
    promise = Promise(args.max_drop)
    while promise.questions_needed > len(examples) // 2:
        promise = Promise(1.25 * promise.max_drop)
    tuner = Tuner(
        panel, candidates, promise, stacks=args.stacks, objective="ttft", repeats=1,
        step=lambda label, done, total: console.print(f"{done}/{total} {label}", end="\r", markup=False),
    )  # fmt: skip
    tuner.search_only()
    lines = [
        header(torch.device(args.device), questions=len(examples), source="drawn" if args.images else "held-out",
               repeats=args.repeats, max_drop=args.max_drop, weights=subject.weights, seed=args.seed)
    ]  # fmt: skip
    lines += [
        {
            "trial": trial.candidate.to_json(),
            "search": trial.search,
            "drop": trial.drop,
            "state": trial.state,
            **trial.predicted,
        }
        for trial in tuner.trials
    ]
    for group in GROUPS:
        best = best_of(group, tuner, args.max_drop, args.tries)
        if best is None:
            console.print(f"{group}: no setting was tried", markup=False)
            continue
        lines.append(record(group, best, time_setting(subject, examples, best[0].candidate, args), len(examples)))
        lines[0]["unpatched"] = float(panel.scores(None, [*tuner.search, *tuner.held_out]).mean())
        write(path, lines)
    summary_table = table(path)
    console.print(to_rich(summary_table))
    console.print(summary_table.notes[0], markup=False)


if __name__ == "__main__":
    main()
