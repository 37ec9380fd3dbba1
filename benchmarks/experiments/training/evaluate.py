# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy of a saved checkpoint on the held-out set by kind, with its processor and ``generate``."""

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
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoProcessor

from tokenprune_demo.heldout import load_heldout
from tokenprune_demo.scenes import KINDS


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share."""
    p, d = right / n, 1 + z * z / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return round((middle - half) / d, 4), round((middle + half) / d, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("demo/tokenprune_demo/models/demo_vlm"))
    parser.add_argument("--heldout", type=Path, default=Path("demo/tokenprune_demo/heldout"))
    parser.add_argument("--pictures", type=int, help="maximum number of pictures")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/experiments/training/heldout_accuracy.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForImageTextToText.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(args.checkpoint)
    examples = load_heldout(limit=args.pictures, folder=args.heldout)

    tally, behind, wrong = defaultdict(list), defaultdict(list), []
    begin = time.time()
    for start in range(0, len(examples), args.batch):
        part = examples[start : start + args.batch]
        texts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": e.question}]}],
                add_generation_prompt=True,
            )
            for e in part
        ]
        inputs = processor(images=[e.image for e in part], text=texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        answers = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for example, answer in zip(part, answers, strict=True):
            is_right = example.is_right(answer)
            tally[example.kind].append(is_right)
            behind[example.background].append(is_right)
            if not is_right:
                wrong.append([example.index, example.question, example.answer, answer])

    report = {
        "checkpoint": "demo/tokenprune_demo/models/demo_vlm",
        "pictures": len({e.index for e in examples}),
        "seconds": round(time.time() - begin, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "kinds": {},
        "backgrounds": {name: round(sum(v) / len(v), 4) for name, v in sorted(behind.items())},
        "wrong": wrong,
    }
    table = Table("kind", "n", "accuracy", "95 % interval")
    for kind in KINDS:
        marks = tally[kind]
        low, high = wilson(sum(marks), len(marks))
        share = round(sum(marks) / len(marks), 4)
        report["kinds"][kind] = {"n": len(marks), "accuracy": share, "low": low, "high": high}
        table.add_row(kind, str(len(marks)), f"{share:.3f}", f"{low:.3f} - {high:.3f}")
    Console().print(table)
    lines = json.dumps(report, indent=1)
    args.out.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
