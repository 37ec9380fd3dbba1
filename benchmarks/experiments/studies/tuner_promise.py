# SPDX-License-Identifier: Apache-2.0
"""Test the tuner's promise: tune the shipped model on scenes of ten seeds, and measure each choice on new scenes.

python experiments/studies/tuner_promise.py --workers 2  # two processes of one thread; continues existing files
python experiments/studies/tuner_promise.py --page       # write the table of results into docs/measure/tune.md

The scenes have the distribution of the shipped held-out set: one question of each kind per image, balanced answers, and
JPEG compression (experiments/training/make_heldout.py). Textures replace photographs that are not installed. The raw
file is results/cpu/tuner_promise.jsonl.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import fill_page, header
from PIL import Image
from transformers.modeling_outputs import BaseModelOutputWithPooling

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from make_heldout import ANSWERS, one_of_each
from tokenprune.settings import Setting
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.tuning import Evaluator, Promise, Tuner, build_grid
from tokenprune_bench.tuning.betting import compute_upper_bound
from tokenprune_demo.scenes import draw_scene, load_photos

RESULTS = Path(__file__).parents[2] / "results/cpu/tuner_promise.jsonl"
PAGE = Path(__file__).parents[3] / "docs/measure/tune.md"
BEGIN, END = "<!-- promise:begin (benchmarks/experiments/studies/tuner_promise.py --page) -->", "<!-- promise:end -->"
FRESH_SEED = 990_000  # for the questions that measure the choices; tuning seeds start at TUNING_SEED
TUNING_SEED = 880_000
CHUNK = 256


@dataclass(frozen=True)
class Asked:
    """A question about a drawn image."""

    path: str
    image: Image.Image
    kind: str
    question: str
    answers: tuple[str, ...]
    is_video: bool = False

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return (self.image,)


def draw(images: int, seed: int) -> list[Asked]:
    """Return questions about newly drawn images, one of each kind per image."""
    rng, photos, counts = np.random.default_rng(seed), load_photos("heldout"), Counter()
    limit = {kind: math.ceil(1.1 * images / n) for kind, n in ANSWERS.items()}
    questions: list[Asked] = []
    while len(questions) < len(ANSWERS) * images:
        scene = draw_scene(rng, photos)
        chosen = one_of_each(rng, scene, counts, limit)
        if chosen is None:
            continue
        counts.update((question.kind, question.answer) for question in chosen)
        image = _saved(scene.image)
        questions += [
            Asked(f"{seed}-{len(questions)}", image, question.kind, question.text, (question.answer,))
            for question in chosen
        ]
    return questions


def _saved(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, subsampling=0)
    return Image.open(file).convert("RGB")


class RememberedTower(torch.nn.Module):
    """Vision tower that caches its output per image, because many candidates answer eight questions about each."""

    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.tower, self.seen = tower, {}

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> BaseModelOutputWithPooling:
        keys = [hash(image.numpy().tobytes()) for image in pixel_values]
        new = {key: index for index, key in enumerate(keys) if key not in self.seen}
        if new:
            states = self.tower(pixel_values[list(new.values())], **options).hidden_states[-1]
            self.seen |= dict(zip(new, states, strict=True))
        last = torch.stack([self.seen[key] for key in keys])
        return BaseModelOutputWithPooling(last_hidden_state=last, hidden_states=(last,))


def tune(args: argparse.Namespace, subject: Any, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    candidates = build_grid(args.methods.split(","), [float(keep) for keep in args.keep.split(",")])
    panel = Evaluator(subject, draw(args.images, TUNING_SEED + seed))
    # Candidates are ranked by FLOPs, because times with a caching tower are meaningless.
    promise = Promise(args.max_drop, args.confidence)
    result = Tuner(panel, candidates, promise, seed=seed, objective="flops", repeats=1).run()
    choice = result.choice
    tested = [trial for trial in result.trials if trial.held_out]
    return {
        "record": "tuning",
        "seed": seed,
        "setting": choice and choice.candidate.to_json(),
        "prefill_flops_ratio": choice and choice.cost["prefill_flops_ratio"],
        "held_out": {"questions": result.held_out, "drop": choice and choice.drop, "below": choice and choice.bound},
        "search": result.search,
        "tested": [[str(trial.candidate), trial.drop, trial.bound, trial.state] for trial in tested],
        "seconds": round(time.perf_counter() - start, 1),
    }


def measure(args: argparse.Namespace, subject: Any, setting: dict[str, Any] | None) -> dict[str, Any]:
    """Ask the new questions, unpatched or under a setting, and return one 0 or 1 per question."""
    panel, indices = Evaluator(subject, draw(args.fresh, FRESH_SEED)), range(len(ANSWERS) * args.fresh)
    candidate = None if setting is None else Setting.from_json(setting)
    for first in range(0, len(indices), CHUNK):
        panel.ask(candidate, indices[first : first + CHUNK])
    right = "".join(str(int(score)) for score in panel.scores(candidate, indices))
    return {"record": "fresh", "setting": setting, "right": right}


def work(args: argparse.Namespace, part: Path, seeds: list[int]) -> None:
    """Run one process: tune with its seeds, then measure choices that no process has measured yet."""
    torch.set_num_threads(args.threads)
    read = read_lines(part)
    records = [record for record, _ in read]
    done = {record["seed"] for record in records if record["record"] == "tuning"}
    subject = load_model(device="cpu")
    subject.model.model.vision_tower = RememberedTower(subject.model.model.vision_tower)
    with JsonLinesWriter(part, read[-1][1] if read else 0) as file:

        def write(record: dict[str, Any]) -> None:
            records.append(record)
            file.write(record)

        def measure_once(setting: dict[str, Any] | None) -> None:
            if setting not in [record["setting"] for record in _everywhere(part) if record["record"] == "fresh"]:
                write(measure(args, subject, setting))

        if 0 in seeds:
            measure_once(None)
        for seed in seeds:
            if seed not in done:
                write(tune(args, subject, seed))
            (tuning,) = (record for record in records if record["record"] == "tuning" and record["seed"] == seed)
            if tuning["setting"]:
                measure_once(tuning["setting"])


def _everywhere(part: Path) -> list[dict[str, Any]]:
    parts = part.parent.glob(f"{part.name.rsplit('.part', 1)[0]}.part*.jsonl")
    return [record for path in parts for record, _ in read_lines(path)]


def collect(args: argparse.Namespace) -> None:
    """Join the files of all processes, and compare the promises with the measurements."""
    records = _everywhere(_part(args.out, 0))
    fresh = {json.dumps(record["setting"]): record["right"] for record in records if record["record"] == "fresh"}
    base = np.array(list(map(int, fresh["null"])))
    tunings = [record for record in records if record["record"] == "tuning"]
    tunings = [
        tuning for tuning in tunings if tuning["setting"] is None or json.dumps(tuning["setting"]) in fresh
    ]  # the choices of an interrupted run may not be measured yet
    tunings.sort(key=lambda tuning: tuning["seed"])
    for tuning in tunings:
        if tuning["setting"] is not None:
            drops = base - np.array(list(map(int, fresh[json.dumps(tuning["setting"])])))
            spread = float(drops.std() / math.sqrt(len(drops)))
            tuning["fresh"] = {
                "drop": float(drops.mean()),
                "standard_error": spread,
                "below": compute_upper_bound(drops, 0.05),
            }
            tuning["kept"] = bool(drops.mean() < args.max_drop)
    first = header(
        torch.device("cpu"), max_drop=args.max_drop, confidence=args.confidence, methods=args.methods, keep=args.keep,
        pictures=args.images, fresh=args.fresh, photos=len(load_photos("heldout")), unpatched=float(base.mean()),
    )  # fmt: skip
    measured = [record for record in records if record["record"] == "fresh"]
    args.out.write_text("".join(json.dumps(record) + "\n" for record in [first, *tunings, *measured]))


def table(path: Path) -> str:
    """Return the results in Markdown."""
    head, *records = (json.loads(line) for line in path.read_text().splitlines())
    tunings = [record for record in records if record["record"] == "tuning"]
    chosen = [tuning for tuning in tunings if tuning["setting"]]
    held_out = tunings[0]["held_out"]["questions"]
    lost = sorted(100 * tuning["fresh"]["drop"] for tuning in chosen)
    return (
        f"Promise: less than {100 * head['max_drop']:g} points lost, confidence {100 * head['confidence']:g} %. Tuned "
        f"on {8 * head['pictures']} questions of each seed ({held_out} held out), measured again "
        f"on {8 * head['fresh']} new questions (unpatched accuracy {100 * head['unpatched']:.1f} %). Kept in "
        f"{sum(tuning['kept'] for tuning in chosen)} of {len(chosen)} choices, of {len(tunings)} seeds. The choices "
        f"lost {lost[0]:.2f} to {lost[-1]:.2f} points ([raw data](../../benchmarks/results/cpu/tuner_promise.jsonl))."
    )


def _part(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.part{rank}.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--max-drop", type=float, default=0.03)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--methods", default="dart,divprune,fastv,pool")
    parser.add_argument("--keep", default="0.75,0.5,0.25")
    parser.add_argument("--images", type=int, default=125, help="tuning images per seed, with 8 questions each")
    parser.add_argument("--fresh", type=int, default=300, help="images to measure on, with 8 questions each")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per worker")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="write the table of --out into docs/measure/tune.md")
    parser.add_argument("--collect", action="store_true", help="join the files of an interrupted run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.page:
        fill_page(PAGE, BEGIN, END, table(args.out))
        return
    if args.collect:
        collect(args)
        return
    if args.rank is not None:
        work(args, _part(args.out, args.rank), list(range(args.seeds))[args.rank :: args.workers])
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    workers = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)]) for rank in range(args.workers)]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit("A worker failed. Run the same command to continue.")
    collect(args)
    print(table(args.out))


if __name__ == "__main__":
    main()
