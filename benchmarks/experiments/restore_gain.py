# SPDX-License-Identifier: Apache-2.0
"""Compare `restore` around several choosers with the plain choosers, at the same number of tokens.

    python benchmarks/experiments/restore_gain.py
    python benchmarks/experiments/restore_gain.py --model demo_smol --images 10
    python dev/readme.py

Variants: the plain chooser; half of the budget as anchors into which dropped tokens are merged; and the same with the
authors' bias on attention (`calibrate=True`). All answer the same questions about the first held-out images with a
photograph as background, and about drawn documents (demo_smol also about charts). The choosers read no attention of the
tower. Random methods use seed 0. The raw file is results/restore_gain.jsonl (or restore_gain-demo_smol.jsonl).

Expectations, from the authors' numbers and since positions are kept here in any case: at most one point at a quarter of
the tokens, more at a twentieth, and a loss on documents, because means blur letters. Before the run with demo_smol: as
with demo_qwen, a gain for `uniform` and `random` only.
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
    """Return the settings, most important first, so that an interrupted run has them."""
    patched_cases = [
        {"chooser": chooser, "keep": keep, "way": way} for keep in KEEPS for chooser in CHOOSERS for way in WAYS
    ]
    return [{"chooser": "", "keep": 1.0, "way": "unpatched"}, *patched_cases]


def method_of(case: dict[str, Any]) -> Any:
    """Return the method that a case patches the model with."""
    options = WAYS[case["way"]]
    if options is None:
        return tokenprune.method(case["chooser"])
    return tokenprune.method("restore", chooser=case["chooser"], **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FILES, default="demo_qwen")
    parser.add_argument("--images", type=int, default=24, help="number of images per set")
    parser.add_argument("--json", type=Path, help="raw file, continued if it exists; default: the model's in results/")
    args = parser.parse_args()
    path = args.json or FILES[args.model]
    torch.set_grad_enabled(False)
    subject, console = load_model(args.model, dtype="bfloat16" if args.model == "demo_smol" else "auto"), Console()
    sets = sets_of(subject, args.images)
    header = {
        "record": "header", **subject.environment(), "images": args.images,
        "questions": {name: sum(map(len, groups)) for name, groups in sets.items()},
    }  # fmt: skip
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if known and any(known[0][name] != header[name] for name in ("weights", "questions")):
        raise SystemExit("The file has answers of another model or to other questions. Pass another --json.")
    with path.open("a") as file:
        if not known:
            print(json.dumps(header), file=file, flush=True)
        for case in cases():
            if any(record.items() >= case.items() for record in known):
                continue
            if case["way"] == "unpatched":
                right_of = {name: answers(subject, groups) for name, groups in sets.items()}
            else:
                with tokenprune.patched(subject.model, method_of(case), keep=case["keep"], guard="off"):
                    right_of = {name: answers(subject, groups) for name, groups in sets.items()}
            print(json.dumps({**case, **right_of}), file=file, flush=True)
            console.print(case, {name: f"{right.count('1') / len(right):.3f}" for name, right in right_of.items()})


if __name__ == "__main__":
    main()
