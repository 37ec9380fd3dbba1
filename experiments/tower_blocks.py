# SPDX-License-Identifier: Apache-2.0
"""`towerdrop` by score and block, on photographs and documents apart, beside what is chosen after the tower.

    python experiments/tower_blocks.py --json experiments/results/tower_blocks.jsonl
    python dev/readme.py

demo_qwen has a tower of five blocks, of which three attend to windows. Units leave at the input of the block that
`layer` names; beside that `divprune` and `random` choose after the tower, and `downsample` makes the image smaller,
which saves as much of the tower as units that leave at its first block. All answer the same questions, about the first
of the held-out images that have a photograph for a background, and about drawn documents. What draws answers with seed
0.

What was expected, from a first look at fewer questions: "diverse" at any block within 5 points of `divprune` after the
tower; "norm", "change" and "detail" behind it, "random" by 30 points; `downsample` behind all on documents.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from documents import documents
from rich.console import Console

import tokenprune
from tokenprune.integrations.hf.encoded.record import KEY
from tokenprune_bench.profiling.model import Model, load
from tokenprune_demo.heldout import Example, load_heldout

SCORES = ("diverse", "change", "norm", "detail", "random")
OTHERS = ("divprune", "random", "downsample")
KEEPS = (0.25, 0.5)
SETS = ("photographs", "documents")


def photographs(subject: Model, limit: int) -> list[list[Example]]:
    """The questions of each of the first held-out images with a photograph for a background."""
    assert subject.heldout is not None  # a shipped model has a set
    found: dict[int, list[Example]] = {}
    for one in load_heldout(folder=subject.heldout):
        if one.background == "photo":
            found.setdefault(one.number, []).append(one)
    return list(found.values())[:limit]


def repeated(output: Any, times: int) -> Any:
    """Return what a patched or unpatched model would have made of an image that stands in a batch so many times."""
    many = copy.copy(output)
    many.pooler_output = list(output.pooler_output) * times
    if (record := getattr(output, KEY, None)) is not None:
        lists = {name: getattr(record, name) for name in ("grids", "kept")}
        many[KEY] = dataclasses.replace(record, **{name: one and one * times for name, one in lists.items()})
    return many


def answers(subject: Model, asked: Sequence[Sequence[Any]]) -> str:
    """Return which answers are right, a 1 or 0 each. All questions about an image are one batch, and the tower runs on
    the image once."""
    right = ""
    for questions in asked:
        inputs = subject.inputs([one.images[0] for one in questions], [one.question for one in questions])
        pixels, grids = inputs.pop("pixel_values"), inputs["image_grid_thw"]
        alone = subject.adapter.base.get_image_features(pixels[: int(grids[0].prod())], grids[:1])
        encoded = {"image": repeated(alone, len(questions))}
        said = [a.rstrip(".").strip().lower() for a in subject.generate(inputs, mm_encoder_outputs=encoded)]
        right += "".join(str(int(a in one.answers)) for a, one in zip(said, questions, strict=True))
    return right


def cases(depth: int) -> list[dict[str, Any]]:
    """Return the settings that the model is asked under, those first that a run which is cut off should have."""
    found: list[dict[str, Any]] = [{"method": "unpatched", "keep": 1.0}]
    for keep in KEEPS:
        found += [{"method": name, "keep": keep} for name in OTHERS]
    for keep in KEEPS:
        for score in SCORES:
            layers = range(score == "change", depth - 1)
            found += [{"method": "towerdrop", "keep": keep, "score": score, "layer": at} for at in layers]
    return sorted(found, key=lambda one: one.get("score", SCORES[0]) != SCORES[0])


def measured(subject: Model, case: dict[str, Any], sets: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """Return the answers of a case, and the share of patches in a block of the tower, mean over the blocks."""
    options = {name: case[name] for name in ("score", "layer") if name in case}
    if case["method"] == "unpatched":
        return {"tower": 1.0, **{name: answers(subject, asked) for name, asked in sets.items()}}
    how = {"keep": case["keep"], "guard": "off", "processor": subject.processor}
    with tokenprune.patched(subject.model, case["method"], **how, **options):
        found = {name: answers(subject, asked) for name, asked in sets.items()}
    depth, first = subject.model.config.vision_config.depth, case.get("layer")
    if first is None:
        tower = case["keep"] if case["method"] == "downsample" else 1.0
    else:
        tower = (first + case["keep"] * (depth - first)) / depth
    return {"tower": round(tower, 3), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24, help="of each set")
    parser.add_argument("--json", type=Path, required=True, help="goes on where this file ends")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    subject, console = load("demo_qwen"), Console()
    sets: dict[str, list[list[Any]]] = {
        "photographs": photographs(subject, args.images), "documents": documents(args.images)
    }  # fmt: skip
    header = {
        "record": "header", **subject.environment(), "images": args.images,
        "questions": {name: sum(map(len, asked)) for name, asked in sets.items()},
    }  # fmt: skip
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    if known and any(known[0][name] != header[name] for name in ("weights", "questions")):
        raise SystemExit("the file holds answers of another model, or to other questions: name another file")
    with args.json.open("a") as file:
        if not known:
            print(json.dumps(header), file=file, flush=True)
        for case in cases(subject.model.config.vision_config.depth):
            if any(one.items() >= case.items() for one in known):
                continue
            record = {**case, **measured(subject, case, sets)}
            print(json.dumps(record), file=file, flush=True)
            console.print(case, {name: f"{record[name].count('1') / len(record[name]):.3f}" for name in sets})


if __name__ == "__main__":
    main()
