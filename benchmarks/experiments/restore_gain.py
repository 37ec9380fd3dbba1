# SPDX-License-Identifier: Apache-2.0
"""`restore` around several choosers beside the plain chooser, at the same number of tokens.

    python benchmarks/experiments/restore_gain.py
    python benchmarks/experiments/restore_gain.py --model demo_smol --images 10
    python dev/readme.py

Ways: the chooser by itself; half of the budget as anchors that what it drops is merged into; and with these the
authors' bias on attention (`calibrate=True`). All answer the same questions, about the first of the held-out images
that have a photograph for a background, and about drawn documents; demo_smol about charts, too. Choosers are those
that read no attention of the tower. What draws answers with seed 0.

What was expected, from the authors' numbers and since positions are kept here in any case: one point or less at a
quarter of the tokens, more at a twentieth, and a loss on documents, whose letters a mean blurs. Before demo_smol was
asked: the same as demo_qwen, so a gain for `uniform` and `random` alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from rich.console import Console
from tower_blocks import answers, sets_of

import tokenprune
from tokenprune_bench.profiling.model import load_model

RESULTS = Path(__file__).parents[1] / "results"
FILES = {"demo_qwen": RESULTS / "restore_gain.jsonl", "demo_smol": RESULTS / "restore_gain-demo_smol.jsonl"}
CHOOSERS = ("divprune", "cdpruner", "prunesid", "otprune", "uniform", "random", "eadp", "resprune")
KEEPS = (0.25, 0.11, 0.05, 0.33)
WAYS: dict[str, dict[str, Any] | None] = {"plain": None, "merged": {}, "weighed": {"calibrate": True}}


def cases() -> list[dict[str, Any]]:
    """Return the settings, those first that a run which is cut off should have."""
    found = [{"chooser": chooser, "keep": keep, "way": way} for keep in KEEPS for chooser in CHOOSERS for way in WAYS]
    return [{"chooser": "", "keep": 1.0, "way": "unpatched"}, *found]


def method_of(case: dict[str, Any]) -> Any:
    """Return what a case patches the model with."""
    options = WAYS[case["way"]]
    if options is None:
        return tokenprune.method(case["chooser"])
    return tokenprune.method("restore", chooser=case["chooser"], **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FILES, default="demo_qwen")
    parser.add_argument("--images", type=int, default=24, help="of each set")
    parser.add_argument("--json", type=Path, help="goes on where this file ends; default: the model's in results/")
    args = parser.parse_args()
    path = args.json or FILES[args.model]
    torch.set_grad_enabled(False)
    subject, console = load_model(args.model, dtype="bfloat16" if args.model == "demo_smol" else "auto"), Console()
    sets = sets_of(subject, args.images)
    header = {
        "record": "header", **subject.environment(), "images": args.images,
        "questions": {name: sum(map(len, asked)) for name, asked in sets.items()},
    }  # fmt: skip
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if known and any(known[0][name] != header[name] for name in ("weights", "questions")):
        raise SystemExit("the file holds answers of another model, or to other questions: name another file")
    with path.open("a") as file:
        if not known:
            print(json.dumps(header), file=file, flush=True)
        for case in cases():
            if any(one.items() >= case.items() for one in known):
                continue
            if case["way"] == "unpatched":
                found = {name: answers(subject, asked) for name, asked in sets.items()}
            else:
                with tokenprune.patched(subject.model, method_of(case), keep=case["keep"], guard="off"):
                    found = {name: answers(subject, asked) for name, asked in sets.items()}
            print(json.dumps({**case, **found}), file=file, flush=True)
            console.print(case, {name: f"{right.count('1') / len(right):.3f}" for name, right in found.items()})


if __name__ == "__main__":
    main()
