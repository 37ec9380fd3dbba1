# SPDX-License-Identifier: Apache-2.0
"""Stage 1: train the vision tower and its merger to name the content of every cell, at random sizes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import fast
from dense import CellHead, cell_labels
from draws import grid
from native_scenes import draw_crowd, photographs
from qwen_model import CELL, build_model
from running import Batches, Log, rate


def choose_scale(rng: np.random.Generator, height: int, width: int) -> float:
    """Return a random scale of drawn items. Small images have small items more often."""
    side = (height * width) ** 0.5
    return float(np.exp(rng.uniform(np.log(0.6), np.log(np.clip(side / 130, 1.0, 1.6)))))


def draw_cells(seed, tokens: int = 1500, low=7, high=13, large=0.08, max_side=22, pairs=0.2, split="train"):
    """Draw a batch of one size: frames, bytes (B, 1 or 2, H, W, 3), and labels and letters of every cell."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    h, w = grid(rng, low, high, large, max_side)
    frames = 1 + int(rng.random() < pairs)
    scenes = [
        draw_crowd(rng, w * CELL, h * CELL, choose_scale(rng, h * CELL, w * CELL), photos, frames)
        for _ in range(int(np.clip(round(tokens / (h * w)), 2, 24)))
    ]
    labels, letters = zip(*(cell_labels(s) for s in scenes), strict=True)
    return np.stack([s.pixels for s in scenes]), np.stack(labels), np.stack(letters)


def run_batch(model, head, batch):
    pixels, labels, letters = (torch.from_numpy(part) for part in batch)
    h, w = pixels.shape[2] // CELL, pixels.shape[3] // CELL
    patches = fast.to_patches(pixels.expand(-1, 2, -1, -1, -1))
    with torch.autocast("cpu", torch.bfloat16, enabled=fast.HALF):
        tokens = fast.tower(model.model.visual, patches, h, w)
    out = head.logits(tokens, model.model.language_model.embed_tokens.weight)
    return out, labels, letters


@torch.no_grad()
def evaluate(model, head, batches: int = 12) -> dict[str, float]:
    """Return the share of right cells on new images over held-out photographs."""
    tally: dict[str, list[int]] = {}
    for index in range(batches):
        out, labels, _ = run_batch(model, head, draw_cells((987, index), 1000, pairs=0.0, split="heldout"))
        for name, (right, n) in head.accuracy(out, labels).items():
            before = tally.get(name, [0, 0])
            tally[name] = [before[0] + right, before[1] + n]
    return {name: round(right / max(n, 1), 3) for name, (right, n) in tally.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=1800)
    add("--lr", type=float, default=1.5e-3)
    add("--decay", type=float, default=0.5, help="share of the time with a falling rate, at the end")
    add("--tokens", type=int, default=1500, help="visual tokens per step")
    add("--eval-seconds", type=float, default=150)
    add("--run", type=Path, default=Path("runs/demo_qwen"))
    add("--log", type=Path, default=Path("benchmarks/experiments/training/qwen/log.jsonl"))
    add("--stop", type=Path, default=Path("runs/stop"), help="the stage ends when this file exists")
    add("--compile", type=int, default=1)
    add("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, head, log = build_model(args.seed), CellHead(), Log(args.log, args.run)
    visual, table = model.model.visual, model.model.language_model.embed_tokens
    parameters = [*visual.parameters(), *table.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.02, betas=(0.9, 0.98))
    if args.resume:
        optimizer.load_state_dict(log.load(model=model, head=head)["optimizer"])
    if args.compile:
        fast.compile_all()
    start = log.steps.get("tower", 0)
    log.write(event="start", stage="tower", seconds=args.seconds, lr=args.lr, decay=args.decay, tokens=args.tokens)
    batches = Batches(draw_cells, (args.seed, 1), start, tokens=args.tokens)
    begin = last = time.time()
    step, mean, waited = start, None, 0.0
    source = iter(batches)
    while True:
        progress = (time.time() - begin) / args.seconds
        if progress >= 1 or args.stop.exists():
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress, step - start, args.decay, 60)
        before = time.time()
        batch = next(source)
        waited += time.time() - before
        loss = head.loss(*run_batch(model, head, batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        if step - start in (20, 60):
            print(step, round(mean, 3), round(time.time() - begin, 1), "waited", round(waited, 1), flush=True)
        if time.time() - last > args.eval_seconds:
            accuracy = evaluate(model, head)
            log.write(stage="tower", step=step, loss=round(mean, 3), waited=round(waited), accuracy=accuracy)
            log.save("tower", step, optimizer, model=model, head=head)
            last = time.time()
    batches.close()
    log.write(event="end", stage="tower", step=step, loss=round(mean, 3), accuracy=evaluate(model, head))
    log.save("tower", step, optimizer, model=model, head=head)


if __name__ == "__main__":
    main()
