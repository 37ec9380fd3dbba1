# SPDX-License-Identifier: Apache-2.0
"""Stage 3: train the tower to encode the motion of each cell as the decoder's words.

After stage 1, both frames of a pair have nearly equal weights in the patch embedding, so tokens do not encode their
order. A random part is added to the first frame's weights and subtracted from the second's. Images, whose two frames
are equal, have unchanged tokens. A second loss keeps the tokens close to the original tower's.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from draws import draw_questions
from moments import GROUPS, SAID, draw_moments
from qwen_model import build_model
from running import Batches, Log, rate
from train_questions import SHIPPED, see

ALWAYS = ("direction", "direction", "direction", "when")
NEAR = 1.5  # weight of the distance to the original tower, relative to the variance of its tokens
IMAGES = 0.25  # share of image batches
MOVES = GROUPS[SAID.index("direction")]


def draw(seed, split: str = "train"):
    """Draw a batch of videos with labels of their tokens, or of images with None."""
    if np.random.default_rng(seed).random() < IMAGES:
        return *draw_questions(seed, split=split), None
    return draw_moments(seed, 2, always=ALWAYS, split=split)


def look(model, before, batch) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
    """Return the distance to the original tower, the motion loss (None without video), and right and all cells."""
    pixels, _, _, moment_labels = batch
    new = see(model, pixels, True)
    visual, model.model.visual = model.model.visual, before
    old = see(model, pixels, False)
    model.model.visual = visual
    distance = (new - old).pow(2).mean() / old.var()
    if moment_labels is None:
        return distance, None, 0, 0
    target = torch.from_numpy(moment_labels[:, SAID.index("direction")])
    labeled = target >= 0
    table = model.model.language_model.embed_tokens.weight.detach()[MOVES]
    logits = F.rms_norm(new[labeled], new.shape[-1:]) @ table.T
    right = int((logits.argmax(-1) == target[labeled]).sum())
    return distance, F.cross_entropy(logits, target[labeled]), right, int(labeled.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1000)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--apart", type=float, default=1.0, help="difference of the frames' weights, in deviations")
    parser.add_argument("--run", type=Path, default=Path("runs/demo_qwen"))
    parser.add_argument("--log", type=Path, default=Path("benchmarks/experiments/training/qwen/log.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model, log = build_model(0), Log(args.log, args.run)
    log.start_from(SHIPPED, model)
    visual, before = model.model.visual, copy.deepcopy(model.model.visual)
    with torch.no_grad():
        weight = visual.patch_embed.proj.weight
        part = torch.randn(weight[:, :, 0].shape) * weight[:, :, 0].std() * args.apart
        weight[:, :, 0] += part
        weight[:, :, 1] -= part
    optimizer = torch.optim.AdamW(visual.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))
    settings = {k: v for k, v in vars(args).items() if k not in ("run", "log")}
    log.write(event="start", stage="motion", **settings)
    batches = Batches(draw, (args.seed,), 0)
    begin, step, source, mean = time.time(), 0, iter(batches), {"near": 0.0, "loss": 0.0, "seen": 0.0}
    while (progress := (time.time() - begin) / args.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress, step, 0.4, 50)
        distance, moves, right, cells = look(model, before, next(source))
        optimizer.zero_grad(set_to_none=True)
        (NEAR * distance + (0.0 if moves is None else moves)).backward()
        torch.nn.utils.clip_grad_norm_(visual.parameters(), 1.0)
        optimizer.step()
        step += 1
        now = {"near": distance.item()} | (
            {} if moves is None else {"loss": moves.item(), "seen": right / max(cells, 1)}
        )
        mean |= {name: 0.97 * mean[name] + 0.03 * value for name, value in now.items()}
        if step % 50 == 0:
            summary = {name: round(value, 4) for name, value in mean.items()}
            log.write(stage="motion", step=step, accuracy={"cells in training": summary.pop("seen")}, **summary)
    batches.close()
    with torch.no_grad():
        heldout = [look(model, before, draw((991, i), "heldout")) for i in range(10)]
    mean_distance = sum(float(result[0]) for result in heldout) / len(heldout)
    moves = sum(result[2] for result in heldout) / sum(result[3] for result in heldout)
    log.write(event="end", stage="motion", step=step, near=round(mean_distance, 3), accuracy={"cells": round(moves, 3)})
    log.save("motion", step, None, model=model)


if __name__ == "__main__":
    main()
