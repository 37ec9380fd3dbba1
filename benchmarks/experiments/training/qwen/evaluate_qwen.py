# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy of the exported checkpoint on the held-out set, by kind of question and size of image.

All questions about an image share one sequence with a block mask, on the processor's pixels. A test shows that the
results equal the results of separate prompts. An answer is right if its word is right and followed by the end token.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForImageTextToText, AutoProcessor

import fast
from packing import Asked, Head, Shown, pack
from questions import MAIN
from qwen_model import MERGE
from qwen_vocabulary import ID, VOCAB
from tokenprune_demo.heldout import load_heldout

SIZES = ((0, 100), (100, 196), (196, 400), (400, 2000))  # visual tokens of an image


def wilson(right: int, n: int, z: float = 1.96) -> dict[str, float]:
    """Return a share with its 95 % confidence interval."""
    p, d = right / n, 1 + z * z / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return {
        "n": n,
        "accuracy": round(p, 4),
        "low": round((middle - half) / d, 4),
        "high": round((middle + half) / d, 4),
    }


@torch.no_grad()
def answers(model, processor, image, examples) -> tuple[list[str], int]:
    """Return the answers to all questions about an image ("..." after a word without end token) and its token count."""
    processed = processor.image_processor(images=[image], return_tensors="pt")
    _, h, w = (int(v) for v in processed["image_grid_thw"][0])
    h, w = h // MERGE, w // MERGE
    tokens = fast.tower(model.model.visual, processed["pixel_values"][None], h, w)
    questions = [Asked(e.kind, e.question, e.answer) for e in examples]
    head = Head.from_shown((Shown((1, h, w)),))
    packed = pack(head, [questions], MAIN)
    language = model.model.language_model
    embeds = language.embed_tokens(packed["ids"])
    positions = torch.tensor([i for i, token in enumerate(head.ids) if token == ID["<|image_pad|>"]])
    hidden = fast.decode(language, embeds.index_copy(1, positions, tokens), packed["position"], packed["mask"])
    predicted = model.lm_head(hidden[0]).argmax(-1)
    answer_positions = (packed["kind"][0] >= 0).nonzero().flatten()
    ends = [predicted[i + 1] == ID["<eos>"] for i in answer_positions]
    return [VOCAB[predicted[i]] + ("" if end else " ...") for i, end in zip(answer_positions, ends, strict=True)], h * w


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/tokenprune_demo/models/demo_qwen"))
    parser.add_argument("--heldout", type=Path, default=Path("demo/tokenprune_demo/heldout_native"))
    parser.add_argument("--images", type=int, help="maximum number of images")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/experiments/training/qwen/heldout_accuracy.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(args.checkpoint)
    by_image = defaultdict(list)
    for example in load_heldout(limit=args.images, folder=args.heldout):
        by_image[example.index].append(example)
    tally = {name: defaultdict(list) for name in ("kinds", "sizes", "backgrounds")}
    by_size, wrong, begin = defaultdict(lambda: defaultdict(list)), [], time.time()
    for index, examples in by_image.items():
        predictions, tokens = answers(model, processor, examples[0].image, examples)
        size = next(f"{low} to {high - 1} tokens" for low, high in SIZES if low <= tokens < high)
        for example, answer in zip(examples, predictions, strict=True):
            is_right = example.is_right(answer)
            tally["kinds"][example.kind].append(is_right)
            tally["sizes"][size].append(is_right)
            tally["backgrounds"][example.background].append(is_right)
            by_size[size][example.kind].append(is_right)
            if not is_right:
                wrong.append([index, example.question, example.answer, answer])
    report = {
        "checkpoint": args.checkpoint.name,
        "heldout": args.heldout.name,
        "images": len(by_image),
        "seconds": round(time.time() - begin, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }
    for name, groups in tally.items():
        report[name] = {key: wilson(sum(v), len(v)) for key, v in sorted(groups.items())}
    report["kinds by size"] = {
        size: {kind: round(sum(v) / len(v), 3) for kind, v in kinds.items()} for size, kinds in sorted(by_size.items())
    }
    for name in ("kinds", "sizes"):
        for key, share in report[name].items():
            print(f"{key:22} {share['n']:5} {share['accuracy']:.3f}  {share['low']:.3f} - {share['high']:.3f}")
    args.out.write_text(json.dumps(report | {"wrong": wrong}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
