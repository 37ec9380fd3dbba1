# SPDX-License-Identifier: Apache-2.0
"""Methods at equal visual tokens on drawn pages, screens and charts, where `pixelprune` drops exact repetitions alone.

    python benchmarks/experiments/documents.py --json benchmarks/results/documents.jsonl
    python dev/readme.py

Every other method keeps of each image exactly as many tokens as `pixelprune` found no repetition for ("all"), or half
as many ("half", where `pixelprune` has to drop details, too). Those that resize get that share of the tokens; those
that cut inside the decoder keep that many at their cut, and more of them before it. Methods that draw at random answer
with seed 0.

What was expected, before the first run: unpatched 75 to 85 %, since the model never saw a page, a screen or a chart;
with "all", `pixelprune` within 3 points of that, and of text within 3; `tome` and `divprune` 3 to 10 points behind, for
what is plain is alike to them, too, but they do not know which of the details are letters; `dart`, `fastv`, `vscan` 10
to 30 behind; `uniform`, `random`, `pool` and `downsample` to be able to read half of the digits or fewer. With "half"
no method holds its text, and the order of the first three is open.
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
    """The questions of each document, or prompt, of a drawn set."""
    found: dict[int, list[DrawnExample]] = {}
    for question in draw_set(name, limit).questions:
        found.setdefault(question.index, []).append(question)
    return list(found.values())


def ask(subject: Model, asked: list[DrawnExample]) -> tuple[str, Any]:
    """Return which answers are right, a 1 or 0 each, and the statistics of the patch, if there is one."""
    inputs = subject.inputs([one.images[0] for one in asked], [one.question for one in asked])
    said = subject.generate(inputs)
    right = "".join(str(int(a.rstrip(".").strip() in one.answers)) for a, one in zip(said, asked, strict=True))
    return right, tokenprune.stats(subject.model) if tokenprune.is_patched(subject.model) else None


def units(subject: Model, asked: list[DrawnExample]) -> int:
    """How many visual tokens the document has."""
    return subject.visual_tokens(subject.inputs([asked[0].images[0]], [asked[0].question]))


def patched_answers(
    subject: Model, asked: list[DrawnExample], name: str, keep: int, whole: int
) -> tuple[str, dict[str, float]]:
    """Ask with `keep` of `whole` tokens of each image; returns what is right, and tokens of one image."""
    site = tokenprune.method_info(name).site
    pixels = {"processor": subject.processor} if site is Site.PRE_ENCODER else {}
    budget = min(1.0, keep / whole) if site is Site.PRE_ENCODER else keep
    with tokenprune.patched(subject.model, name, keep=budget, guard="off", **pixels):
        right, stats = ask(subject, asked)
    layers = statistics.fmean(stats.visual_tokens_per_layer) / len(asked)
    tower = whole
    if stats.encoder_tokens_per_layer:
        tower = statistics.fmean(stats.encoder_tokens_per_layer) / len(asked) / 4
    elif pixels:
        tower = layers
    return right, {"decoder": layers, "tower": tower, "end": stats.visual_tokens_out / len(asked)}


def run(subject: Model, limit: int, methods: tuple[str, ...], known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    asked = documents(limit)
    flat = [one for document in asked for one in document]
    done = {(one["method"], one["level"]): one for one in known[1:]}
    header = {
        "record": "header", **subject.environment(), "documents": len(asked), "questions": len(flat),
        "kinds": [one.kind for one in flat], "layouts": [one.ground for one in flat],
        "digest": draw_set("documents", limit).about()["digest"],
    }  # fmt: skip
    if known and {k: known[0].get(k) for k in ("digest", "weights")} != {k: header[k] for k in ("digest", "weights")}:
        raise SystemExit("the file holds answers of another model, or to other documents: name another file")
    if not known:
        yield header
    whole = [units(subject, document) for document in asked]
    if (UNPATCHED, "all") not in done:
        right = "".join(ask(subject, document)[0] for document in asked)
        mean = statistics.fmean(whole)
        yield {"record": "result", "method": UNPATCHED, "level": "all", "right": right, "tokens": dict.fromkeys(
            ("decoder", "tower", "end"), mean)}  # fmt: skip
    first = done.get((OURS, "all"))
    if first is None:
        pairs = [patched_answers(subject, document, OURS, 10**6, n) for document, n in zip(asked, whole, strict=True)]
        first = _result(OURS, "all", pairs)
        yield first
    for level, share in LEVELS.items():
        for name in methods:
            if (name, level) in done or (name, level) == (OURS, "all"):
                continue
            try:
                pairs = [
                    patched_answers(subject, document, name, max(1, round(share * count)), n)
                    for document, n, count in zip(asked, whole, first["counts"], strict=True)
                ]
            except TokenPruneError as refusal:
                yield {"record": "skipped", "method": name, "level": level, "reason": str(refusal)}
                continue
            yield _result(name, level, pairs)


def _result(name: str, level: str, pairs: list[tuple[str, dict[str, float]]]) -> dict[str, Any]:
    tokens = {key: round(statistics.fmean(one[key] for _, one in pairs), 2) for key in pairs[0][1]}
    counts = {"counts": [round(one["end"]) for _, one in pairs]} if name == OURS else {}
    right = "".join(right for right, _ in pairs)
    return {"record": "result", "method": name, "level": level, "right": right, "tokens": tokens, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_qwen")
    parser.add_argument("--documents", type=int, default=24, help="how many, 96 at most")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path, required=True, help="goes on where this file ends")
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
