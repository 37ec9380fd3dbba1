# SPDX-License-Identifier: Apache-2.0
"""Stage 3: the tower learns to say, in the decoder's words, which way what lies in a cell moves.

The two frames of a pair weigh nearly the same in the patch embedding that stage 1 left, so that no token could tell
which frame came first. A random part is added to the first frame's weights and taken from the second's: an image, whose
two frames are equal, is seen as before. Tokens stay near those of the tower as it was, by a second loss.
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
NEAR = 1.5  # weight of the distance to the tower as it was, as a share of its tokens' variance
IMAGES = 0.25  # share of batches of images
MOVES = GROUPS[SAID.index("direction")]


def draw(seed, split: str = "train"):
    """Draw a batch of videos with what their tokens should say, or of images with None."""
    if np.random.default_rng(seed).random() < IMAGES:
        return *draw_questions(seed, split=split), None
    return draw_moments(seed, 2, always=ALWAYS, split=split)


def look(model, before, batch) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
    """Return the distance to the tower before, the loss of the moves (None: no video), and right and all cells."""
    pixels, _, _, said = batch
    new = see(model, pixels, True)
    visual, model.model.visual = model.model.visual, before
    old = see(model, pixels, False)
    model.model.visual = visual
    near = (new - old).pow(2).mean() / old.var()
    if said is None:
        return near, None, 0, 0
    target = torch.from_numpy(said[:, SAID.index("direction")])
    here = target >= 0
    table = model.model.language_model.embed_tokens.weight.detach()[MOVES]
    logits = F.rms_norm(new[here], new.shape[-1:]) @ table.T
    right = int((logits.argmax(-1) == target[here]).sum())
    return near, F.cross_entropy(logits, target[here]), right, int(here.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1000)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--apart", type=float, default=1.0, help="added to one frame's weights, in their deviations")
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
        near, moves, right, cells = look(model, before, next(source))
        optimizer.zero_grad(set_to_none=True)
        (NEAR * near + (0.0 if moves is None else moves)).backward()
        torch.nn.utils.clip_grad_norm_(visual.parameters(), 1.0)
        optimizer.step()
        step += 1
        now = {"near": near.item()} | ({} if moves is None else {"loss": moves.item(), "seen": right / max(cells, 1)})
        mean |= {name: 0.97 * mean[name] + 0.03 * value for name, value in now.items()}
        if step % 50 == 0:
            shown = {name: round(value, 4) for name, value in mean.items()}
            log.write(stage="motion", step=step, accuracy={"cells in training": shown.pop("seen")}, **shown)
    batches.close()
    with torch.no_grad():
        held = [look(model, before, draw((991, i), "heldout")) for i in range(10)]
    near = sum(float(one[0]) for one in held) / len(held)
    moves = sum(one[2] for one in held) / sum(one[3] for one in held)
    log.write(event="end", stage="motion", step=step, near=round(near, 3), accuracy={"cells": round(moves, 3)})
    log.save("motion", step, None, model=model)


if __name__ == "__main__":
    main()
