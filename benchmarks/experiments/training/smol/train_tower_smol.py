# SPDX-License-Identifier: Apache-2.0
"""Stage 1: train the vision tower of demo_smol, starting from demo_vlm's with positions interpolated to 24 x 24."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("qwen", "")]

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, CLIPVisionModel

from running import Batches, Log, rate
from smol_scenes import draw_crowd, photographs
from smol_targets import GRID, PATCH, PatchHead, patch_labels

SIZE = GRID * PATCH


def build_tower() -> CLIPVisionModel:
    """Build demo_vlm's tower for images of 336 pixels, with interpolated position embeddings."""
    import tokenprune_demo

    folder = Path(tokenprune_demo.__file__).parent / "models" / "demo_vlm"
    old = AutoModelForImageTextToText.from_pretrained(folder).model.vision_tower
    config = CLIPVisionConfig(**{**old.config.to_dict(), "image_size": SIZE})
    config._attn_implementation = "sdpa"
    tower = CLIPVisionModel(config)
    state = old.state_dict()
    (name,) = (key for key in state if key.endswith("position_embedding.weight"))
    cls, grid = state[name][:1], state[name][1:]
    side = round(len(grid) ** 0.5)
    grid = F.interpolate(grid.T.reshape(1, -1, side, side), size=(GRID, GRID), mode="bicubic", align_corners=False)
    state[name] = torch.cat([cls, grid[0].flatten(1).T])
    state = {key: value for key, value in state.items() if not key.endswith("position_ids")}
    missing, unexpected = tower.load_state_dict(state, strict=False)
    assert not unexpected and all(key.endswith("position_ids") for key in missing), (missing, unexpected)
    return tower


def draw_batch(seed, size: int = 12, split: str = "train"):
    """Draw a batch: pixels, bytes (B, H, W, 3), labels, present sorts and letters."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    scenes = [draw_crowd(rng, photos) for _ in range(size)]
    return np.stack([s.pixels[0] for s in scenes]), *(np.stack(x) for x in zip(*map(patch_labels, scenes), strict=True))


def to_pixels(pixels: np.ndarray) -> torch.Tensor:
    """Return the values of the image processor: -1 to 1, channels first."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def run_batch(tower: nn.Module, batch):
    hidden = tower(to_pixels(batch[0])).last_hidden_state
    return hidden, *map(torch.from_numpy, batch[1:])


@torch.no_grad()
def evaluate(tower: nn.Module, head: PatchHead, batches: int = 8) -> dict[str, float]:
    """Return the share of right labels on new images over held-out photographs."""
    tally: dict[str, list[int]] = {}
    for index in range(batches):
        hidden, labels, present, _ = run_batch(tower, draw_batch((987, index), split="heldout"))
        for name, pair in head.right(hidden, labels, present).items():
            tally[name] = [a + b for a, b in zip(tally.get(name, [0, 0]), pair, strict=True)]
    return {name: round(right / max(n, 1), 3) for name, (right, n) in tally.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=1800)
    add("--lr", type=float, default=1e-3)
    add("--decay", type=float, default=0.5, help="share of the time with a falling rate, at the end")
    add("--batch", type=int, default=12)
    add("--eval-seconds", type=float, default=240)
    add("--run", type=Path, default=Path("runs/demo_smol_tower"))
    add("--log", type=Path, default=Path("benchmarks/experiments/training/smol/log.jsonl"))
    add("--stop", type=Path, default=Path("runs/stop"), help="the stage ends when this file exists")
    add("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tower, head, log = build_tower().train(), PatchHead(), Log(args.log, args.run)
    parameters = [*tower.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.02, betas=(0.9, 0.98))
    if args.resume:
        state = log.load(tower=tower, head=head)
        if state["optimizer"]:
            optimizer.load_state_dict(state["optimizer"])
    start = step = log.steps.get("tower", 0)
    log.write(event="start", stage="tower", seconds=args.seconds, lr=args.lr, decay=args.decay, batch=args.batch)
    batches = Batches(draw_batch, (args.seed, 1), start, size=args.batch)
    begin = last = time.time()
    mean, waited, source = None, 0.0, iter(batches)
    while (progress := (time.time() - begin) / args.seconds) < 1 and not args.stop.exists():
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(progress, step - start, args.decay, 40)
        before = time.time()
        batch = next(source)
        waited += time.time() - before
        loss = head.loss(*run_batch(tower, batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        if step - start in (3, 20):
            print(step, round(mean, 3), round(time.time() - begin, 1), "waited", round(waited, 1), flush=True)
        if time.time() - last > args.eval_seconds:
            accuracy = evaluate(tower, head)
            log.write(stage="tower", step=step, loss=round(mean, 3), waited=round(waited), accuracy=accuracy)
            log.save("tower", step, optimizer, tower=tower, head=head)
            last = time.time()
    batches.close()
    log.write(event="end", stage="tower", step=step, loss=round(mean, 3), accuracy=evaluate(tower, head))
    log.save("tower", step, optimizer, tower=tower, head=head)


if __name__ == "__main__":
    main()
