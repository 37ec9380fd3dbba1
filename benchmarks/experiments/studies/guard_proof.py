# SPDX-License-Identifier: Apache-2.0
"""Measure the benefit and cost of guard="auto" on held-out images that its floors were not fitted to.

python experiments/studies/guard_proof.py           # rewrites results/guard_proof.jsonl (about ten minutes on one core)
python benchmarks/experiments/studies/guard_proof.py --table   # print the table of the committed file

The floors come from the first 50 images of the set. This script uses the next 100, with all eight kinds of questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import calm_threads  # noqa: F401

import tokenprune
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.significance import wilson
from tokenprune_demo.heldout import load_heldout
from tokenprune_demo.scenes import KINDS

RESULTS = Path(__file__).parents[2] / "results/guard_proof.jsonl"
METHODS, KEEP, MODES = ("random", "dart", "pool"), 0.11, ("off", "auto")
FIRST, LAST, BATCH = 50, 150, 25


def ask(subject: Model, kind: str) -> dict[str, object]:
    """Ask all questions of one kind and return a record."""
    examples = [example for example in load_heldout([kind], limit=LAST) if example.index >= FIRST]
    right, tokens, raised = "", 0.0, 0
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        images, questions = [example.images for example in batch], [example.question for example in batch]
        inputs = subject.inputs(images, questions)
        answers = subject.generate(inputs)
        pairs = zip(batch, answers, strict=True)
        right += "".join(str(int(example.is_right(answer))) for example, answer in pairs)
        if tokenprune.is_patched(subject.model):
            stats = tokenprune.stats(subject.model)
            tokens += stats.visual_tokens_average
            raised += sum(row.raised for row in stats.guard or ())
        else:
            tokens += subject.visual_tokens(inputs)
    return {"kind": kind, "right": right, "tokens": round(tokens / len(examples), 2), "raised": raised}


def records(subject: Model) -> Iterator[dict[str, object]]:
    yield {"record": "header", "keep": KEEP, "pictures": [FIRST, LAST], "environment": subject.environment()}
    for kind in KINDS:
        yield {"method": "unpatched", "guard": "off"} | ask(subject, kind)
    for method in METHODS:
        for mode in MODES:
            # Only the guard needs the processor.
            options = {} if mode == "off" else {"processor": subject.processor}
            with tokenprune.patched(subject.model, method, keep=KEEP, guard=mode, **options):
                for kind in KINDS:
                    yield {"method": method, "guard": mode} | ask(subject, kind)


def read() -> tuple[dict, list[dict]]:
    header, *rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return header, rows


def table(rows: list[dict]) -> str:
    """Return the percentage of right answers and, in parentheses, the layer-averaged tokens, by kind and in total."""
    lines = ["| method | guard | " + " | ".join(KINDS) + " | all (95 % interval) |", "|---" * (3 + len(KINDS)) + "|"]
    for method, mode in dict.fromkeys((row["method"], row["guard"]) for row in rows):
        part = {row["kind"]: row for row in rows if (row["method"], row["guard"]) == (method, mode)}
        cells = [f"{100 * _share(part[kind]['right']):.0f} ({part[kind]['tokens']:.0f})" for kind in KINDS]
        right = "".join(part[kind]["right"] for kind in KINDS)
        low, high = wilson(right.count("1"), len(right))
        tokens = sum(part[kind]["tokens"] * len(part[kind]["right"]) for kind in KINDS) / len(right)
        cells.append(f"{100 * _share(right):.1f} ({100 * low:.1f} to {100 * high:.1f}) @{tokens:.0f}")
        lines.append(f"| `{method}` | {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _share(right: str) -> float:
    return right.count("1") / len(right)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records(load_model())), encoding="utf-8")
    sys.stdout.write(f"{table(read()[1])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
