# SPDX-License-Identifier: Apache-2.0
"""Does the tuner keep its promise? Tune the shipped model on scenes drawn with ten seeds, and measure every choice
again on fresh scenes of yet another seed.

python experiments/studies/tuner_promise.py --workers 2  # two processes of one thread; goes on where it stopped
python experiments/studies/tuner_promise.py --page       # write the table of results into docs/measure/tune.md

Scenes come from the distribution of the held-out set that ships: one question of each kind an image, answers evened
out, saved as JPEG (experiments/training/make_heldout.py). Photographs that are not installed are replaced by textures.
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
FRESH_SEED = 990_000  # of the questions on which choices are measured again; tuning seeds begin at TUNING_SEED
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
    """Return questions on freshly drawn images, one of each kind an image."""
    rng, photos, seen = np.random.default_rng(seed), load_photos("heldout"), Counter()
    limit = {kind: math.ceil(1.1 * images / n) for kind, n in ANSWERS.items()}
    made: list[Asked] = []
    while len(made) < len(ANSWERS) * images:
        scene = draw_scene(rng, photos)
        chosen = one_of_each(rng, scene, seen, limit)
        if chosen is None:
            continue
        seen.update((one.kind, one.answer) for one in chosen)
        image = _saved(scene.image)
        made += [Asked(f"{seed}-{len(made)}", image, one.kind, one.text, (one.answer,)) for one in chosen]
    return made


def _saved(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, subsampling=0)
    return Image.open(file).convert("RGB")


class RememberedTower(torch.nn.Module):
    """A vision tower that sees no image twice: here eight questions are asked about each, by many candidates."""

    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.tower, self.seen = tower, {}

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> BaseModelOutputWithPooling:
        keys = [hash(image.numpy().tobytes()) for image in pixel_values]
        new = {key: place for place, key in enumerate(keys) if key not in self.seen}
        if new:
            states = self.tower(pixel_values[list(new.values())], **options).hidden_states[-1]
            self.seen |= dict(zip(new, states, strict=True))
        last = torch.stack([self.seen[key] for key in keys])
        return BaseModelOutputWithPooling(last_hidden_state=last, hidden_states=(last,))


def tune(args: argparse.Namespace, subject: Any, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    candidates = build_grid(args.methods.split(","), [float(keep) for keep in args.keep.split(",")])
    panel = Evaluator(subject, draw(args.images, TUNING_SEED + seed))
    # Ranked by FLOPs: with a tower that remembers what it saw, times mean nothing.
    promise = Promise(args.max_drop, args.confidence)
    found = Tuner(panel, candidates, promise, seed=seed, objective="flops", repeats=1).run()
    choice = found.choice
    tested = [one for one in found.trials if one.held_out]
    return {
        "record": "tuning",
        "seed": seed,
        "setting": choice and choice.candidate.to_json(),
        "prefill_flops_ratio": choice and choice.cost["prefill_flops_ratio"],
        "held_out": {"questions": found.held_out, "drop": choice and choice.drop, "below": choice and choice.bound},
        "search": found.search,
        "tested": [[str(one.candidate), one.drop, one.bound, one.state] for one in tested],
        "seconds": round(time.perf_counter() - start, 1),
    }


def measure(args: argparse.Namespace, subject: Any, setting: dict[str, Any] | None) -> dict[str, Any]:
    """The fresh questions, unpatched or under a setting: one 0 or 1 a question."""
    panel, numbers = Evaluator(subject, draw(args.fresh, FRESH_SEED)), range(len(ANSWERS) * args.fresh)
    candidate = None if setting is None else Setting.from_json(setting)
    for first in range(0, len(numbers), CHUNK):
        panel.ask(candidate, numbers[first : first + CHUNK])
    right = "".join(str(int(score)) for score in panel.scores(candidate, numbers))
    return {"record": "fresh", "setting": setting, "right": right}


def work(args: argparse.Namespace, part: Path, seeds: list[int]) -> None:
    """One process: tune with its seeds, then measure what no process has measured yet."""
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
            if setting not in [one["setting"] for one in _everywhere(part) if one["record"] == "fresh"]:
                write(measure(args, subject, setting))

        if 0 in seeds:
            measure_once(None)
        for seed in seeds:
            if seed not in done:
                write(tune(args, subject, seed))
            (found,) = (one for one in records if one["record"] == "tuning" and one["seed"] == seed)
            if found["setting"]:
                measure_once(found["setting"])


def _everywhere(part: Path) -> list[dict[str, Any]]:
    parts = part.parent.glob(f"{part.name.rsplit('.part', 1)[0]}.part*.jsonl")
    return [record for path in parts for record, _ in read_lines(path)]


def collect(args: argparse.Namespace) -> None:
    """Put the parts together: what was promised, what was measured, whether it was kept."""
    records = _everywhere(_part(args.out, 0))
    fresh = {json.dumps(one["setting"]): one["right"] for one in records if one["record"] == "fresh"}
    base = np.array(list(map(int, fresh["null"])))
    found = [one for one in records if one["record"] == "tuning"]
    found = [one for one in found if one["setting"] is None or json.dumps(one["setting"]) in fresh]  # of a run so far
    found.sort(key=lambda one: one["seed"])
    for one in found:
        if one["setting"] is not None:
            drops = base - np.array(list(map(int, fresh[json.dumps(one["setting"])])))
            spread = float(drops.std() / math.sqrt(len(drops)))
            one["fresh"] = {
                "drop": float(drops.mean()),
                "standard_error": spread,
                "below": compute_upper_bound(drops, 0.05),
            }
            one["kept"] = bool(drops.mean() < args.max_drop)
    told = header(
        torch.device("cpu"), max_drop=args.max_drop, confidence=args.confidence, methods=args.methods, keep=args.keep,
        pictures=args.images, fresh=args.fresh, photos=len(load_photos("heldout")), unpatched=float(base.mean()),
    )  # fmt: skip
    measured = [one for one in records if one["record"] == "fresh"]
    args.out.write_text("".join(json.dumps(one) + "\n" for one in [told, *found, *measured]))


def table(path: Path) -> str:
    """Return the results in Markdown."""
    head, *records = (json.loads(line) for line in path.read_text().splitlines())
    found = [one for one in records if one["record"] == "tuning"]
    chosen = [one for one in found if one["setting"]]
    held = found[0]["held_out"]["questions"]
    lost = sorted(100 * one["fresh"]["drop"] for one in chosen)
    return (
        f"Promise: less than {100 * head['max_drop']:g} points lost, confidence {100 * head['confidence']:g} %. Tuned "
        f"on {8 * head['pictures']} questions of each seed ({held} held out), measured again on {8 * head['fresh']} "
        f"fresh ones, of which the unpatched model gets {100 * head['unpatched']:.1f} % right. Kept in "
        f"{sum(one['kept'] for one in chosen)} of {len(chosen)} choices, of {len(found)} seeds. The choices lost "
        f"{lost[0]:.2f} to {lost[-1]:.2f} points ([raw data](../../benchmarks/results/cpu/tuner_promise.jsonl))."
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
    parser.add_argument("--images", type=int, default=125, help="to tune on, of each seed; 8 questions each")
    parser.add_argument("--fresh", type=int, default=300, help="images to measure on; 8 questions each")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="write the table of --out into docs/measure/tune.md")
    parser.add_argument("--collect", action="store_true", help="put together what a run that was stopped has so far")
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
        raise SystemExit("a worker failed; the same command goes on")
    collect(args)
    print(table(args.out))


if __name__ == "__main__":
    main()
