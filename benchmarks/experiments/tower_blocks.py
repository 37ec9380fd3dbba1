# SPDX-License-Identifier: Apache-2.0
"""`towerdrop` by score and block, on photographs and documents apart, beside what is chosen after the tower.

    python benchmarks/experiments/tower_blocks.py
    python benchmarks/experiments/tower_blocks.py --model demo_smol --images 20
    python dev/readme.py

demo_qwen has a tower of five blocks, of which three attend to windows. Units leave at the input of the block that
`layer` names; beside that `divprune` and `random` choose after the tower, and `downsample` makes the image smaller,
which saves as much of the tower as units that leave at its first block. All answer the same questions, about the first
of the held-out images that have a photograph for a background, and about drawn documents. What draws answers with seed
0.

demo_smol, a LLaVA in bfloat16, has a CLIP tower of four blocks, which takes scores of hidden states alone; the drawn
documents and charts that it is asked about are of its own held-out set.

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
from tokenprune.integrations.hf.sequence.record import KEY
from tokenprune_bench.metrics import get_metric
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.heldout import Example, load_heldout

SCORES = ("diverse", "change", "norm", "detail", "random")
OTHERS = ("divprune", "random", "downsample")
KEEPS = (0.25, 0.5)
RESULTS = Path(__file__).parents[1] / "results"
FILES = {"demo_qwen": RESULTS / "tower_blocks.jsonl", "demo_smol": RESULTS / "tower_blocks-demo_smol.jsonl"}
BATCH = 16


def heldout(subject: Model, background: str, limit: int) -> list[list[Example]]:
    """The questions of each of the first held-out images with such a background."""
    assert subject.heldout is not None  # a shipped model has a set
    found: dict[int, list[Example]] = {}
    for one in load_heldout(folder=subject.heldout):
        if one.background == background:
            found.setdefault(one.index, []).append(one)
    return list(found.values())[:limit]


def sets_of(subject: Model, limit: int) -> dict[str, list[list[Any]]]:
    """Return by its name each set of images that the model is asked about, as the questions of each image."""
    photographs = {"photographs": heldout(subject, "photo", limit)}
    if packed(subject):
        return {**photographs, "documents": documents(limit)}
    return {**photographs, **{f"{one}s": heldout(subject, one, limit) for one in ("document", "chart")}}


def packed(subject: Model) -> bool:
    """Tell whether the tower takes patches of all images in one sequence, as demo_qwen's does."""
    return subject.adapter.family.tower_rows == "all images"


def repeated(output: Any, times: int) -> Any:
    """Return what a patched or unpatched tower would have made of pages that stand in a batch so many times."""
    many = copy.copy(output)
    many.pooler_output = list(output.pooler_output) * times
    if (record := getattr(output, KEY, None)) is None:
        return many
    lists = {name: getattr(record, name) for name in ("grids", "owners", "kept", "groups")}
    changed: dict[str, Any] = {name: one and one * times for name, one in lists.items()}
    if (encoded := record.encoded) is not None:
        tokens, rounds = encoded.tokens, torch.arange(times)
        cells = tokens.cells.repeat(times, 1)
        cells[:, 0] += torch.where(cells[:, 0] < 0, 0, tokens.tiles * rounds.repeat_interleave(len(tokens.cells)))
        tokens = dataclasses.replace(
            tokens, scores=tokens.scores.repeat(times, 1), cells=cells, tiles=tokens.tiles * times, key=None
        )
        values = {key: one.repeat(times, *[1] * (one.dim() - 1)) for key, one in encoded.values.items()}
        changed["encoded"] = dataclasses.replace(encoded, values=values, tokens=tokens)
    many[KEY] = dataclasses.replace(record, **changed)
    return many


def answers(subject: Model, asked: Sequence[Sequence[Any]]) -> str:
    """Return which answers are right, a 1 or 0 each. Where patches are packed, all questions about an image are one
    batch, and the tower runs on the image once."""
    flat = [one for questions in asked for one in questions]
    batches = asked if packed(subject) else [flat[at : at + BATCH] for at in range(0, len(flat), BATCH)]
    said: list[str] = []
    for questions in batches:
        inputs = subject.inputs([one.images[0] for one in questions], [one.question for one in questions])
        encoded = {}
        if packed(subject):
            pixels, grids = inputs.pop("pixel_values"), inputs["image_grid_thw"]
            alone = subject.adapter.base.get_image_features(pixels[: int(grids[0].prod())], grids[:1])
            encoded = {"mm_encoder_outputs": {"image": repeated(alone, len(questions))}}
        said += subject.generate(inputs, **encoded)
    return "".join(str(int(one)) for one in get_metric(subject.metric).score(said, [one.answers for one in flat]))


def depth_of(subject: Model) -> int:
    """Return how many blocks the tower has."""
    vision = subject.model.config.vision_config
    return vision.depth if packed(subject) else vision.num_hidden_layers


def cases(depth: int, scores: Sequence[str] = SCORES) -> list[dict[str, Any]]:
    """Return the settings that the model is asked under, those first that a run which is cut off should have."""
    found: list[dict[str, Any]] = [{"method": "unpatched", "keep": 1.0}]
    for keep in KEEPS:
        found += [{"method": name, "keep": keep} for name in OTHERS]
    for keep in KEEPS:
        for score in scores:
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
    depth, first = depth_of(subject), case.get("layer")
    if first is None:
        tower = case["keep"] if case["method"] == "downsample" else 1.0
    else:
        tower = (first + case["keep"] * (depth - first)) / depth
    return {"tower": round(tower, 3), **found}


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
    scores = [one for one in SCORES if one != "detail" or packed(subject)]  # which sees pixels
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
        for case in cases(depth_of(subject), scores):
            if any(one.items() >= case.items() for one in known):
                continue
            record = {**case, **measured(subject, case, sets)}
            print(json.dumps(record), file=file, flush=True)
            console.print(case, {name: f"{record[name].count('1') / len(record[name]):.3f}" for name in sets})


if __name__ == "__main__":
    main()
