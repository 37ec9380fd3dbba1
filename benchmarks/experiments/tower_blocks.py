# SPDX-License-Identifier: Apache-2.0
"""Compare `towerdrop` by score and block with selection after the tower, on photographs and documents.

    python benchmarks/experiments/tower_blocks.py
    python benchmarks/experiments/tower_blocks.py --model demo_smol --images 20
    python dev/readme.py

demo_qwen has a tower of five blocks, three with window attention. `towerdrop` drops units at the input of block
`layer`. For comparison, `divprune` and `random` select after the tower, and `downsample` shrinks the image, which saves
as much of the tower as dropping at its first block. All answer the same questions about the first held-out images with
a photograph as background, and about drawn documents. Random methods use seed 0.

demo_smol, a LLaVA in bfloat16, has a CLIP tower of four blocks, which supports scores of hidden states only. Its drawn
documents and charts come from its held-out set. The raw file is results/tower_blocks.jsonl (or
tower_blocks-demo_smol.jsonl).

Expectations, after a first look at fewer questions: "diverse" at any block within 5 points of `divprune` after the
tower; "norm", "change" and "detail" below it, "random" by 30 points; `downsample` last on documents.
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
    """Return the questions of each of the first held-out images with a background."""
    assert subject.heldout is not None  # shipped models have a held-out set
    by_image: dict[int, list[Example]] = {}
    for example in load_heldout(folder=subject.heldout):
        if example.background == background:
            by_image.setdefault(example.index, []).append(example)
    return list(by_image.values())[:limit]


def sets_of(subject: Model, limit: int) -> dict[str, list[list[Any]]]:
    """Return the questions of each image, by the name of the image set."""
    photographs = {"photographs": heldout(subject, "photo", limit)}
    if is_packed(subject):
        return {**photographs, "documents": documents(limit)}
    return {**photographs, **{f"{kind}s": heldout(subject, kind, limit) for kind in ("document", "chart")}}


def is_packed(subject: Model) -> bool:
    """Return whether the tower takes patches of all images in one sequence, as demo_qwen's does."""
    return subject.adapter.family.tower_rows == "all images"


def repeated(output: Any, times: int) -> Any:
    """Repeat the tower's output as for a batch that has its images `times` times."""
    batch_output = copy.copy(output)
    batch_output.pooler_output = list(output.pooler_output) * times
    if (record := getattr(output, KEY, None)) is None:
        return batch_output
    lists = {name: getattr(record, name) for name in ("grids", "owners", "kept", "groups")}
    changed: dict[str, Any] = {name: items and items * times for name, items in lists.items()}
    if (encoded := record.encoded) is not None:
        tokens, rounds = encoded.tokens, torch.arange(times)
        cells = tokens.cells.repeat(times, 1)
        cells[:, 0] += torch.where(cells[:, 0] < 0, 0, tokens.tiles * rounds.repeat_interleave(len(tokens.cells)))
        tokens = dataclasses.replace(
            tokens, scores=tokens.scores.repeat(times, 1), cells=cells, tiles=tokens.tiles * times, key=None
        )
        values = {key: value.repeat(times, *[1] * (value.dim() - 1)) for key, value in encoded.values.items()}
        changed["encoded"] = dataclasses.replace(encoded, values=values, tokens=tokens)
    batch_output[KEY] = dataclasses.replace(record, **changed)
    return batch_output


def answers(subject: Model, groups: Sequence[Sequence[Any]]) -> str:
    """Return the right answers as a string of 1 and 0.

    If patches are packed, all questions about an image are one batch, and the tower runs once per image.
    """
    flat = [example for questions in groups for example in questions]
    batches = groups if is_packed(subject) else [flat[start : start + BATCH] for start in range(0, len(flat), BATCH)]
    texts: list[str] = []
    for questions in batches:
        inputs = subject.inputs(
            [example.images[0] for example in questions], [example.question for example in questions]
        )
        encoded = {}
        if is_packed(subject):
            pixels, grids = inputs.pop("pixel_values"), inputs["image_grid_thw"]
            encoded_image = subject.adapter.base.get_image_features(pixels[: int(grids[0].prod())], grids[:1])
            encoded = {"mm_encoder_outputs": {"image": repeated(encoded_image, len(questions))}}
        texts += subject.generate(inputs, **encoded)
    scores = get_metric(subject.metric).score(texts, [example.answers for example in flat])
    return "".join(str(int(score)) for score in scores)


def depth_of(subject: Model) -> int:
    """Return the number of blocks of the tower."""
    vision = subject.model.config.vision_config
    return vision.depth if is_packed(subject) else vision.num_hidden_layers


def cases(depth: int, scores: Sequence[str] = SCORES) -> list[dict[str, Any]]:
    """Return the settings, most important first, so that an interrupted run has them."""
    settings: list[dict[str, Any]] = [{"method": "unpatched", "keep": 1.0}]
    for keep in KEEPS:
        settings += [{"method": name, "keep": keep} for name in OTHERS]
    for keep in KEEPS:
        for score in scores:
            layers = range(score == "change", depth - 1)
            settings += [{"method": "towerdrop", "keep": keep, "score": score, "layer": layer} for layer in layers]
    return sorted(settings, key=lambda setting: setting.get("score", SCORES[0]) != SCORES[0])


def measure_case(subject: Model, case: dict[str, Any], sets: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """Return the answers of a case, and the mean share of patches over the tower's blocks."""
    options = {name: case[name] for name in ("score", "layer") if name in case}
    if case["method"] == "unpatched":
        return {"tower": 1.0, **{name: answers(subject, groups) for name, groups in sets.items()}}
    patch_options = {"keep": case["keep"], "guard": "off", "processor": subject.processor}
    with tokenprune.patched(subject.model, case["method"], **patch_options, **options):
        right = {name: answers(subject, groups) for name, groups in sets.items()}
    depth, first = depth_of(subject), case.get("layer")
    if first is None:
        tower = case["keep"] if case["method"] == "downsample" else 1.0
    else:
        tower = (first + case["keep"] * (depth - first)) / depth
    return {"tower": round(tower, 3), **right}


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
    scores = [score for score in SCORES if score != "detail" or is_packed(subject)]  # "detail" needs pixels
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
        for case in cases(depth_of(subject), scores):
            if any(row.items() >= case.items() for row in known):
                continue
            record = {**case, **measure_case(subject, case, sets)}
            print(json.dumps(record), file=file, flush=True)
            console.print(case, {name: f"{record[name].count('1') / len(record[name]):.3f}" for name in sets})


if __name__ == "__main__":
    main()
