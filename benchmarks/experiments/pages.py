# SPDX-License-Identifier: Apache-2.0
"""Methods at a half, a third and a quarter of the tokens of drawn pages of a thousand tokens and more.

    python benchmarks/experiments/pages.py
    python dev/readme.py

Letters, tables, receipts and two pages at once, each with four questions, two of which have to be read. The tower runs
once on the pages of a prompt for all methods that act after it and read nothing of it; their answers are those of the
whole model. Methods that read it, or act in it or on pixels, run it once a prompt. What draws answers with seed 0.
The sizes of letters and how full pages are were chosen on drawings of other seeds.

What was expected, before the first run: at a half `divprune`, `prunesid` and `tome` within 5 points of the unpatched
model, or above it, since fewer plain tokens distract it less; at a quarter 5 to 10 behind. `random`, `uniform` and
`pool` 10 behind at a half and 25 at a quarter, in text more; `pixelprune` with the best at every keep; `downsample`
last in text. Methods that read the tower's attention behind `divprune`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import calm_threads  # noqa: F401
import torch
from documents import documents
from rich.console import Console
from tower_blocks import repeated

import tokenprune
from tokenprune.errors import TokenPruneError
from tokenprune.selection.method import Site
from tokenprune_bench.metrics import get_metric
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.drawn_sets import DrawnExample, draw_set

FILE = Path(__file__).parents[1] / "results/pages.jsonl"
KEEPS = (0.5, 0.25, 0.33)
UNPATCHED = "unpatched"
UNIT = 16  # pixels a side of a visual token
AFTER = ("divprune", "random", "prunesid", "pool", "uniform", "cdpruner", "resprune", "otprune", "eadp", "restore")
# At every keep those of the first row, then the next: a run that is cut off should have these. @0: at block 0.
METHODS = (
    ("divprune", "random", "pixelprune", "prunesid", "pool"),
    ("downsample", "tome", "uniform", "cdpruner"),
    ("towerdrop@0", "vispruner", "resprune", "otprune", "towerdrop", "visionzip"),
    ("eadp", "restore", "scope", "hiprune", "docprune", "dynres"),
)


def encode(subject: Model, asked: list[DrawnExample]) -> tuple[dict[str, Any], Any]:
    """Return the arguments for the questions of a prompt, but pixels, and what the tower makes of its pages."""
    inputs = subject.inputs([one.images for one in asked], [one.question for one in asked])
    pixels, grids, pages = inputs.pop("pixel_values"), inputs["image_grid_thw"], len(asked[0].images)
    patches = int(grids[:pages].prod(-1).sum())
    return inputs, subject.adapter.base.get_image_features(pixels[:patches], grids[:pages])


def encode_for_all(subject: Model, asked: list[DrawnExample]) -> tuple[dict[str, Any], Any]:
    """Return the same for every method that acts after the tower."""
    with tokenprune.patched(subject.model, AFTER[0], guard="off"):  # which notes the grids of pages, as all of them do
        return encode(subject, asked)


def answers(subject: Model, asked: list[DrawnExample], inputs: dict[str, Any], encoded: Any) -> str:
    """Return which answers are right, a 1 or 0 each."""
    said = subject.generate(dict(inputs), mm_encoder_outputs={"image": repeated(encoded, len(asked))})
    right = get_metric(subject.metric).score(said, [one.answers for one in asked])
    return "".join(str(int(one)) for one in right)


def run(subject: Model, asked: list[list[DrawnExample]], cases: list[tuple[str, float]], write: Callable) -> None:
    """Ask in every case; write gets the row of each."""
    whole = []
    if any(name in (UNPATCHED, *AFTER) for name, _ in cases):
        whole = [encode_for_all(subject, questions) for questions in asked]
    pixels = (sum(page.width * page.height for page in questions[0].images) for questions in asked)
    sizes = [len(asked[0]) * number / UNIT**2 for number in pixels]  # tokens of all rows of a prompt
    for name, keep in cases:
        row: dict[str, Any] = {"record": "result", "method": name, "keep": keep}
        if name == UNPATCHED:
            right = [answers(subject, questions, *known) for questions, known in zip(asked, whole, strict=True)]
            write(row | {"right": "".join(right)})
            continue
        method, _, block = name.partition("@")
        site = tokenprune.method_info(method).site
        options: dict[str, Any] = {"processor": subject.processor} if site is Site.PRE_ENCODER else {}
        options |= {"layer": int(block)} if block else {}
        try:
            right, left = [], []
            with tokenprune.patched(subject.model, method, keep=keep, guard="off", **options):
                for place, questions in enumerate(asked):
                    shown = whole[place] if name in AFTER else encode(subject, questions)
                    right.append(answers(subject, questions, *shown))
                    left.append(tokenprune.stats(subject.model).visual_tokens_out / sizes[place])
        except TokenPruneError as refusal:
            write({"record": "skipped", "method": name, "keep": keep, "reason": str(refusal)})
            continue
        write(row | {"left": round(fmean(left), 3), "right": "".join(right)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=75, help="how many, 75 at most")
    parser.add_argument("--methods", default=",".join(name for row in METHODS for name in row))
    parser.add_argument("--json", type=Path, default=FILE, help="goes on where this file ends")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    subject, asked, console = load_model("demo_qwen"), documents(args.prompts, "pages"), Console()
    flat = [one for questions in asked for one in questions]
    header = {
        "record": "header", **subject.environment(), "prompts": len(asked), "questions": len(flat),
        "kinds": [one.kind for one in flat], "layouts": [one.ground for one in flat],
        "digest": draw_set("pages", args.prompts).about()["digest"],
    }  # fmt: skip
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    if known and any(known[0][name] != header[name] for name in ("weights", "digest")):
        raise SystemExit("the file holds answers of another model, or to other pages: name another file")
    done = {(one["method"], one["keep"]) for one in known[1:]}
    cases = [
        (UNPATCHED, 1.0),
        *((name, keep) for row in METHODS for keep in KEEPS for name in row if name in args.methods.split(",")),
    ]
    with args.json.open("a") as file:

        def write(record: dict[str, Any]) -> None:
            print(json.dumps(record), file=file, flush=True)
            if "right" in record:
                right = 100 * record["right"].count("1") / len(record["right"])
                console.print(f"{record['method']} at {record['keep']:g}: {right:.1f} % right")

        if not known:
            write(header)
        run(subject, asked, [case for case in cases if case not in done], write)


if __name__ == "__main__":
    main()
