# SPDX-License-Identifier: Apache-2.0
"""Calibrate `dymu` for the demo model on newly drawn pictures over the photographs of the training split.

    python benchmarks/experiments/training/calibrate_demo_vlm.py

Writes methods/encoder/data/demo_vlm.safetensors. Neither training nor the held-out set uses this seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tokenprune_bench.calibration import calibrate
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.scenes import draw_scene, load_photos


def pictures(seed: int, count: int) -> Iterator[Image.Image]:
    rng, photos = np.random.default_rng(seed), load_photos("train")
    if len(photos) != 10:
        raise SystemExit("Training photographs are missing. Install the dev extra (scikit-image and scikit-learn).")
    for _ in range(count):
        yield draw_scene(rng, photos).image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20260202)
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--keeps", type=float, nargs="+", default=[0.5, 0.25, 0.11])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("tokenprune/methods/encoder/data/demo_vlm.safetensors"))
    args = parser.parse_args()
    subject = load_model(device="cpu")
    thresholds = calibrate(
        subject.model,
        pictures(args.seed, args.pictures),
        processor=subject.processor,
        keep=args.keeps,
        batch_size=args.batch_size,
        out=args.out,
    )
    for keep in thresholds.keeps:
        print(keep, [round(value, 4) for value in thresholds.values[keep].tolist()])


if __name__ == "__main__":
    main()
