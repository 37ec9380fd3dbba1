# SPDX-License-Identifier: Apache-2.0
"""Compare methods at a half, a third and a quarter of the tokens of drawn pages with 1,000 tokens and more.

    python benchmarks/experiments/pages.py
    python dev/readme.py

The prompts show letters, tables, receipts and pairs of pages, each with four questions; two of the questions require
reading. For methods that act after the tower and read nothing from it, the tower runs once per prompt and its output is
shared; this does not change their answers. Other methods run the tower once per prompt. Random methods use seed 0.
Letter sizes and text density were chosen on drawings of other seeds. The raw file is results/pages.jsonl.

Expectations before the first run: at a half, `divprune`, `prunesid` and `tome` within 5 points of the unpatched model,
or above it, since fewer plain tokens distract the model; at a quarter, 5 to 10 below. `random`, `uniform` and `pool` 10
below at a half and 25 at a quarter, more in text; `pixelprune` among the best at every keep; `downsample` worst in
text. Methods that read the tower's attention below `divprune`.
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
UNIT = 16  # pixels per side of a visual token
AFTER = ("divprune", "random", "prunesid", "pool", "uniform", "cdpruner", "resprune", "otprune", "eadp", "restore")
# The first row runs at every keep, then the next, so that an interrupted run has the main methods. @0: at block 0.
METHODS = (
    ("divprune", "random", "pixelprune", "prunesid", "pool"),
    ("downsample", "tome", "uniform", "cdpruner"),
    ("towerdrop@0", "vispruner", "resprune", "otprune", "towerdrop", "visionzip"),
    ("eadp", "restore", "scope", "hiprune", "docprune", "dynres"),
)


def encode(subject: Model, questions: list[DrawnExample]) -> tuple[dict[str, Any], Any]:
    """Return the inputs of a prompt's questions without pixels, and the tower's output for its pages."""
    inputs = subject.inputs([question.images for question in questions], [question.question for question in questions])
    pixels, grids, pages = inputs.pop("pixel_values"), inputs["image_grid_thw"], len(questions[0].images)
    patches = int(grids[:pages].prod(-1).sum())
    return inputs, subject.adapter.base.get_image_features(pixels[:patches], grids[:pages])


def encode_for_all(subject: Model, questions: list[DrawnExample]) -> tuple[dict[str, Any], Any]:
    """Return the same for all methods that act after the tower."""
    with tokenprune.patched(subject.model, AFTER[0], guard="off"):  # the patch records the grids of the pages
        return encode(subject, questions)


def answers(subject: Model, questions: list[DrawnExample], inputs: dict[str, Any], encoded: Any) -> str:
    """Return the right answers as a string of 1 and 0."""
    texts = subject.generate(dict(inputs), mm_encoder_outputs={"image": repeated(encoded, len(questions))})
    right = get_metric(subject.metric).score(texts, [question.answers for question in questions])
    return "".join(str(int(score)) for score in right)


def run(subject: Model, prompts: list[list[DrawnExample]], cases: list[tuple[str, float]], write: Callable) -> None:
    """Ask all questions in every case and write a row for each case."""
    encoded = []
    if any(name in (UNPATCHED, *AFTER) for name, _ in cases):
        encoded = [encode_for_all(subject, questions) for questions in prompts]
    pixels = (sum(page.width * page.height for page in questions[0].images) for questions in prompts)
    sizes = [len(prompts[0]) * num_pixels / UNIT**2 for num_pixels in pixels]  # tokens in all rows of a prompt
    for name, keep in cases:
        row: dict[str, Any] = {"record": "result", "method": name, "keep": keep}
        if name == UNPATCHED:
            right = [answers(subject, questions, *known) for questions, known in zip(prompts, encoded, strict=True)]
            write(row | {"right": "".join(right)})
            continue
        method, _, block = name.partition("@")
        site = tokenprune.method_info(method).site
        options: dict[str, Any] = {"processor": subject.processor} if site is Site.PRE_ENCODER else {}
        options |= {"layer": int(block)} if block else {}
        try:
            right, shares = [], []
            with tokenprune.patched(subject.model, method, keep=keep, guard="off", **options):
                for index, questions in enumerate(prompts):
                    encoded_prompt = encoded[index] if name in AFTER else encode(subject, questions)
                    right.append(answers(subject, questions, *encoded_prompt))
                    shares.append(tokenprune.stats(subject.model).visual_tokens_out / sizes[index])
        except TokenPruneError as refusal:
            write({"record": "skipped", "method": name, "keep": keep, "reason": str(refusal)})
            continue
        write(row | {"left": round(fmean(shares), 3), "right": "".join(right)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=75, help="number of prompts, at most 75")
    parser.add_argument("--methods", default=",".join(name for row in METHODS for name in row))
    parser.add_argument("--json", type=Path, default=FILE, help="raw file; an existing file is continued")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    subject, prompts, console = load_model("demo_qwen"), documents(args.prompts, "pages"), Console()
    flat = [question for questions in prompts for question in questions]
    header = {
        "record": "header", **subject.environment(), "prompts": len(prompts), "questions": len(flat),
        "kinds": [question.kind for question in flat], "layouts": [question.ground for question in flat],
        "digest": draw_set("pages", args.prompts).about()["digest"],
    }  # fmt: skip
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    if known and any(known[0][name] != header[name] for name in ("weights", "digest")):
        raise SystemExit("The file has answers of another model or to other pages. Pass another --json.")
    done = {(record["method"], record["keep"]) for record in known[1:]}
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
        run(subject, prompts, [case for case in cases if case not in done], write)


if __name__ == "__main__":
    main()
