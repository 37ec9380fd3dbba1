# SPDX-License-Identifier: Apache-2.0
"""Compare methods at equal visual tokens on drawn pages, screens and charts.

    python benchmarks/experiments/documents.py --json benchmarks/results/documents.jsonl
    python dev/readme.py

`pixelprune` drops exact repetitions only. Every other method keeps, per image, as many tokens as `pixelprune` ("all"),
or half as many ("half", where `pixelprune` has to drop details, too). Methods that resize the image get the same share
of tokens. Methods that cut inside the decoder keep that many tokens after the cut. Random methods use seed 0.

Expectations before the first run: unpatched 75 to 85 %, since the model was not trained on pages, screens or charts.
With "all": `pixelprune` within 3 points of unpatched, also for text; `tome` and `divprune` 3 to 10 points below,
because they merge plain areas but do not recognize letters; `dart`, `fastv`, `vscan` 10 to 30 points below; `uniform`,
`random`, `pool` and `downsample` read at most half of the digits. With "half": every method loses text, and the order
of the first three is open.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from rich.console import Console

import tokenprune
from tokenprune.errors import TokenPruneError
from tokenprune.selection.method import Site
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.drawn_sets import DrawnExample, draw_set

OURS, UNPATCHED = "pixelprune", "unpatched"
METHODS = (
    OURS, "divprune", "tome", "vscan", "dart", "fastv", "downsample", "dynres", "uniform", "random", "pool",
)  # fmt: skip
LEVELS = {"all": 1.0, "half": 0.5}


def documents(limit: int, name: str = "documents") -> list[list[DrawnExample]]:
    """Return the questions of a drawn set, grouped by document."""
    by_document: dict[int, list[DrawnExample]] = {}
    for question in draw_set(name, limit).questions:
        by_document.setdefault(question.index, []).append(question)
    return list(by_document.values())


def ask(subject: Model, questions: list[DrawnExample]) -> tuple[str, Any]:
    """Return the right answers as a string of 1 and 0, and the patch statistics of a patched model."""
    inputs = subject.inputs(
        [question.images[0] for question in questions], [question.question for question in questions]
    )
    answers = subject.generate(inputs)
    right = "".join(
        str(int(a.rstrip(".").strip() in question.answers)) for a, question in zip(answers, questions, strict=True)
    )
    return right, tokenprune.stats(subject.model) if tokenprune.is_patched(subject.model) else None


def units(subject: Model, questions: list[DrawnExample]) -> int:
    """Return the number of visual tokens of a document."""
    return subject.visual_tokens(subject.inputs([questions[0].images[0]], [questions[0].question]))


def patched_answers(
    subject: Model, questions: list[DrawnExample], name: str, keep: int, num_tokens: int
) -> tuple[str, dict[str, float]]:
    """Ask with `keep` of `num_tokens` tokens per image. Return the right answers and the token counts of one image."""
    site = tokenprune.method_info(name).site
    pixels = {"processor": subject.processor} if site is Site.PRE_ENCODER else {}
    budget = min(1.0, keep / num_tokens) if site is Site.PRE_ENCODER else keep
    with tokenprune.patched(subject.model, name, keep=budget, guard="off", **pixels):
        right, stats = ask(subject, questions)
    layers = statistics.fmean(stats.visual_tokens_per_layer) / len(questions)
    tower = num_tokens
    if stats.encoder_tokens_per_layer:
        tower = statistics.fmean(stats.encoder_tokens_per_layer) / len(questions) / 4
    elif pixels:
        tower = layers
    return right, {"decoder": layers, "tower": tower, "end": stats.visual_tokens_out / len(questions)}


def run(subject: Model, limit: int, methods: tuple[str, ...], known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    drawn_documents = documents(limit)
    flat = [question for document in drawn_documents for question in document]
    done = {(question["method"], question["level"]): question for question in known[1:]}
    header = {
        "record": "header", **subject.environment(), "documents": len(drawn_documents), "questions": len(flat),
        "kinds": [question.kind for question in flat], "layouts": [question.ground for question in flat],
        "digest": draw_set("documents", limit).about()["digest"],
    }  # fmt: skip
    if known and {k: known[0].get(k) for k in ("digest", "weights")} != {k: header[k] for k in ("digest", "weights")}:
        raise SystemExit("The file has answers of another model or to other documents. Pass another --json.")
    if not known:
        yield header
    num_tokens = [units(subject, document) for document in drawn_documents]
    if (UNPATCHED, "all") not in done:
        right = "".join(ask(subject, document)[0] for document in drawn_documents)
        mean = statistics.fmean(num_tokens)
        yield {"record": "result", "method": UNPATCHED, "level": "all", "right": right, "tokens": dict.fromkeys(
            ("decoder", "tower", "end"), mean)}  # fmt: skip
    first = done.get((OURS, "all"))
    if first is None:
        pairs = [
            patched_answers(subject, document, OURS, 10**6, n)
            for document, n in zip(drawn_documents, num_tokens, strict=True)
        ]
        first = _result(OURS, "all", pairs)
        yield first
    for level, share in LEVELS.items():
        for name in methods:
            if (name, level) in done or (name, level) == (OURS, "all"):
                continue
            try:
                pairs = [
                    patched_answers(subject, document, name, max(1, round(share * count)), n)
                    for document, n, count in zip(drawn_documents, num_tokens, first["counts"], strict=True)
                ]
            except TokenPruneError as refusal:
                yield {"record": "skipped", "method": name, "level": level, "reason": str(refusal)}
                continue
            yield _result(name, level, pairs)


def _result(name: str, level: str, pairs: list[tuple[str, dict[str, float]]]) -> dict[str, Any]:
    means = {key: round(statistics.fmean(counts[key] for _, counts in pairs), 2) for key in pairs[0][1]}
    counts = {"counts": [round(tokens["end"]) for _, tokens in pairs]} if name == OURS else {}
    right = "".join(right for right, _ in pairs)
    return {"record": "result", "method": name, "level": level, "right": right, "tokens": means, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_qwen")
    parser.add_argument("--documents", type=int, default=24, help="number of documents, at most 96")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path, required=True, help="raw file; an existing file is continued")
    args = parser.parse_args()
    torch.manual_seed(0)
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    console = Console()
    for record in run(load_model(args.model), args.documents, tuple(args.methods.split(",")), known):
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if record["record"] == "result":
            right = 100 * record["right"].count("1") / len(record["right"])
            console.print(f"{record['method']} ({record['level']}): {right:.1f} % right, {record['tokens']}")
        elif record["record"] == "skipped":
            console.print(f"{record['method']} ({record['level']}): skipped, {record['reason']}")


if __name__ == "__main__":
    main()
