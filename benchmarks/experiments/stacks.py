# SPDX-License-Identifier: Apache-2.0
"""The best stack against the best single method and `downsample`: time from the image to the first token, at no more
than so many points lost, on the native-resolution model that ships.

    TOKENPRUNE_EMOJI=emoji.npz python experiments/stacks.py --images 70   # fresh images, 448 x 448: 784 visual tokens
    python experiments/stacks.py --images 0                              # those of the held-out set that are so large
    python experiments/stacks.py --retime                                # take the times of the found settings anew
    python experiments/stacks.py --page                                  # write the table into docs/measure/tune.md

(experiments/training/qwen/README.md says how emoji.npz is made.) The tuner searches among single methods and stacks, as
`tokenprune tune --objective ttft` does. Then, of each group (downsample, single methods, stacks), the setting that
spends least by the closed forms answers all questions, and the next one if it loses too much; what it lost stands
beside the bound that was shown, and where its time goes is profiled, processor and tower included, in turn with the
unpatched model.
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

SIDE = 448  # pixels, which make 784 visual tokens
METHODS = "downsample,tome,divprune,pool,vscan,fastv,dart,dyrate"
KEEPS = "0.75,0.5,0.35,0.25,0.15"
GROUPS = ("downsample", "single", "stack")
PAGE = Path(__file__).parents[2] / "docs/measure/tune.md"
BEGIN, END = "<!-- stacks:begin (benchmarks/experiments/stacks.py --page) -->", "<!-- stacks:end -->"


@dataclass(frozen=True, eq=False)
class Drawn:
    """A question about an image that was drawn now. path: tells images apart, and is no file."""

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
    """Return questions of all kinds about images of `SIDE` x `SIDE`; images: how many to draw, 0: the held-out ones."""
    if not images:
        return [one for one in load_heldout(folder=NATIVE) if one.image.size == (SIDE, SIDE)]
    sys.path.insert(0, str(Path(__file__).parent / "training" / "qwen"))
    from native_scenes import draw_native

    rng, made = np.random.default_rng(seed), []
    for number in range(images):
        scene = draw_native(rng, SIDE, SIDE, float(rng.uniform(1.1, 1.6)))
        image = Image.fromarray(scene.pixels[0])
        for kind in (*KINDS, "thing"):
            pool = [one for one in scene.questions if one.kind == kind]
            if pool:
                one = pool[int(rng.integers(len(pool)))]
                made.append(Drawn(f"drawn {number}", kind, one.text, (one.answer,), image))
    return made


def group_of(trial: Trial) -> str:
    """Return which of the `GROUPS` a setting belongs to."""
    name = trial.candidate.name
    return "stack" if "+" in name else "downsample" if name == "downsample" else "single"


def best_of(group: str, tuner: Tuner, max_drop: float, tries: int) -> tuple[Trial, float, float] | None:
    """Return the setting of a group that spends least and loses at most `max_drop` on all questions, with what it loses
    and the bound that is shown; of those that all lose more, the one that loses least. tries: how many may be asked."""
    panel, everything = tuner.evaluator, [*tuner.search, *tuner.held_out]
    panel.ask(None, tuner.held_out)
    heard = [one for one in tuner.trials if one.search and group_of(one) == group]
    # One answer more may have been lost by ill luck: all questions will tell.
    heard = [one for one in heard if one.drop <= max_drop + 1 / one.search] or heard
    found = None
    for trial in sorted(heard, key=lambda one: one.get_expected_share("work"))[:tries]:
        for part in (tuner.search, tuner.held_out):
            missing = [number for number in part if number not in panel.answered_questions(trial.candidate)]
            if missing:
                panel.ask(trial.candidate, missing)
        drops = panel.scores(None, everything) - panel.scores(trial.candidate, everything)
        result = trial, float(drops.mean()), compute_upper_bound(drops, 1 - tuner.promise.confidence)
        if result[1] <= max_drop:
            return result
        if found is None or result[1] < found[1]:
            found = result
    return found


def record(group: str, found: tuple[Trial, float, float], times: dict[str, Any], asked: int) -> dict[str, Any]:
    trial, drop, bound = found
    return {
        "group": group, "setting": trial.candidate.to_json(), "asked": asked, "drop": drop, "drop_below": bound,
        "work": trial.get_expected_share("work"), **times,
    }  # fmt: skip


def table(path: Path) -> Table:
    """Return the table of a file of results; the times of groups that were timed on a loaded machine are left out."""
    about, lines = read(path)
    groups = [line for line in lines if "group" in line]
    quiet = [one for one in groups if not is_loaded(one, about)]
    rows = []
    for one in groups:
        cells = [one["group"], one["name"], f"{100 * one['drop']:.2f}", f"{100 * one['drop_below']:.1f}"]
        cells.append(f"x{1 / one['work']:.2f}")
        rows.append([*map(Cell, [*cells, *(_times(one) if one in quiet else [""] * len(TIMES) if quiet else [])])])
    columns = ("group", "setting", "points lost", "shown below", "by FLOPs", *(TIMES if quiet else ()))
    note = (
        f"{about['questions']} questions ({about['source']}) on images of {SIDE} x {SIDE} pixels, 784 visual tokens; "
        f"the unpatched model gets {100 * about['unpatched']:.1f} % right. "
        f"Allowed: {format_points(about['max_drop'])}; weights {about['weights']}, {about['date']}."
    )
    if quiet:
        note += (
            f" Time from the image on, processor and tower included: medians of {about['repeats']} pairs of runs, "
            f"{quiet[0].get('threads', about['threads'])} threads, load at most {max(one['load'] for one in quiet):g}."
        )
    return Table("demo_qwen, by group the setting that spends least", columns, rows, (note,))


TIMES = ("to the first token", "processor, ms", "tower, ms", "prefill, ms", "choosing, ms", "what limits")


def _times(one: dict[str, Any]) -> list[str]:
    told = {
        stage: " → ".join(f"{one[side]['stages_ms'][stage]['p50']:.0f}" for side in ("before", "after"))
        for stage in STAGES
    }
    after = {stage: one["after"]["stages_ms"][stage]["p50"] for stage in FIRST_TOKEN}
    slowest = max(after, key=after.get)
    limits = f"{STAGES[slowest]}, {after[slowest] / sum(after.values()):.0%}"
    stages = [told["processor"], told["tower"], told["prefill"]]
    return [f"x{one['speedup']:.2f}", *stages, f"{after['selection']:.0f}", limits]


def timed(subject: Any, asked: list[Any], setting: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return where the time of a setting goes, in turn with the unpatched model, and the load it was taken at."""
    load = Load(args.allow_load)
    profile = profile_call(subject, asked[0].images, asked[0].question, setting, repeats=args.repeats)
    about = load.record() | {"threads": args.threads, "code": code_version()}
    return {"name": format_setting(profile), **profile.as_dict(), **about}


def retime(path: Path, args: argparse.Namespace) -> None:
    """Take the times of the groups of a file anew, one by one; with --resume quiet ones of this code stay."""
    about, lines = read(path)
    subject = load_model("demo_qwen", device=args.device)
    asked = questions(0, args.seed)
    for line in lines:
        known = line.get("code") == code_version() and not is_loaded(line, about)
        if "group" in line and not (args.resume and known):
            line.pop("loaded", None)
            line |= timed(subject, asked, line["setting"], args)
            write(path, [about, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=70, help="to draw, up to nine questions each; 0: held-out ones")
    parser.add_argument("--limit", type=int, help="questions, at most")
    parser.add_argument("--max-drop", type=float, default=0.01)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--keep", default=KEEPS)
    parser.add_argument("--stacks", type=int, default=MAX_STACKS)
    parser.add_argument("--tries", type=int, default=6, help="settings of a group that answer all questions, at most")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser)
    parser.add_argument("--retime", action="store_true", help="take the times of the settings of --json anew")
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
    asked = questions(args.images, args.seed)[: args.limit]
    candidates = build_grid(args.methods.split(","), [float(keep) for keep in args.keep.split(",")])
    panel = Evaluator(subject, asked, batch_size=args.batch_size)
    # With few questions nothing can be promised of one point: the search goes on all the same.
    promise = Promise(args.max_drop)
    while promise.questions_needed > len(asked) // 2:
        promise = Promise(1.25 * promise.max_drop)
    tuner = Tuner(
        panel, candidates, promise, stacks=args.stacks, objective="ttft", repeats=1,
        step=lambda label, done, total: console.print(f"{done}/{total} {label}", end="\r", markup=False),
    )  # fmt: skip
    tuner.search_only()
    lines = [
        header(torch.device(args.device), questions=len(asked), source="drawn" if args.images else "held-out",
               repeats=args.repeats, max_drop=args.max_drop, weights=subject.weights, seed=args.seed)
    ]  # fmt: skip
    lines += [
        {"trial": one.candidate.to_json(), "search": one.search, "drop": one.drop, "state": one.state, **one.predicted}
        for one in tuner.trials
    ]
    for group in GROUPS:
        found = best_of(group, tuner, args.max_drop, args.tries)
        if found is None:
            console.print(f"{group}: nothing was asked", markup=False)
            continue
        lines.append(record(group, found, timed(subject, asked, found[0].candidate, args), len(asked)))
        lines[0]["unpatched"] = float(panel.scores(None, [*tuner.search, *tuner.held_out]).mean())
        write(path, lines)
    shown = table(path)
    console.print(to_rich(shown))
    console.print(shown.notes[0], markup=False)


if __name__ == "__main__":
    main()
