# SPDX-License-Identifier: Apache-2.0
"""Stage 2: train the language model (optionally with the tower) on questions about images and videos."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fast
from dense import CellHead
from draws import KINDS, draw_any, draw_moving, draw_questions, draw_several
from moments import said_loss
from packing import Head, pack
from questions import MIX
from qwen_model import CELL, build_model
from qwen_vocabulary import ID
from running import Batches, Log, rate

SHIPPED = Path(__file__).parents[4] / "demo/tokenprune_demo/models/demo_qwen"
PADS = (ID["<|image_pad|>"], ID["<|video_pad|>"])
SAID_WEIGHT = 5.0  # loss weight of direction and time labels on visual tokens, relative to `PlaceHead`
ROOM = 4096  # maximum positions of a batch; larger batches would recompile the functions


class PlaceHead(nn.Module):
    """Predict positions from the decoder's middle layer, for training only; the head is not exported.

    From each visual token: its row, its column, and the index of its image or pair of frames. From the end mark of an
    image: its number of rows and columns.
    """

    LAYER, MOST = 2, 32

    def __init__(self) -> None:
        super().__init__()
        self.place, self.size = nn.Linear(192, 2 * self.MOST), nn.Linear(192, 2 * self.MOST)
        self.number = nn.Linear(192, self.MOST)

    def loss(self, state: torch.Tensor, visuals, visual: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of all five. `state` is (B, L, d) after `LAYER`, `visual` are visual positions."""
        rows, columns, numbers, num_tokens, ends, total, times = [], [], [], 0, [], 0.0, 0
        for part in visuals:
            t, h, w = part.grid
            numbers.append(torch.arange(times, times + t).repeat_interleave(h * w))
            times += t
            rows.append(torch.arange(h).repeat_interleave(w).repeat(t))
            columns.append(torch.arange(w).repeat(t * h))
            num_tokens += t * h * w
            ends.append(int(visual[num_tokens - 1]) + 1)
        size = torch.tensor([part.grid[1:] for part in visuals]).repeat(len(state), 1)
        for head, positions, target in (
            (self.place, visual, torch.stack([torch.cat(rows), torch.cat(columns)], 1).repeat(len(state), 1)),
            (self.size, torch.tensor(ends), size),
        ):
            logits = head(F.rms_norm(state[:, positions], (state.shape[-1],))).flatten(0, 1).view(-1, 2, self.MOST)
            total = total + F.cross_entropy(logits.flatten(0, 1), target.flatten())
        if times > 1:
            logits = self.number(F.rms_norm(state[:, visual], (state.shape[-1],))).flatten(0, 1)
            total = total + F.cross_entropy(logits, torch.cat(numbers).repeat(len(state)))
        return total


def see(model, pixels: np.ndarray, learn: bool) -> torch.Tensor:
    """Return visual tokens, (B, n, 192), of frames, bytes (B, images or pairs of frames, 1 or 2, H, W, 3)."""
    pixels = torch.from_numpy(pixels)
    b, height, width = len(pixels), *pixels.shape[-3:-1]
    h, w = height // CELL, width // CELL
    patches = fast.to_patches(pixels.reshape(-1, pixels.shape[-4], height, width, 3).expand(-1, 2, -1, -1, -1))
    with (
        torch.set_grad_enabled(learn and torch.is_grad_enabled()),
        torch.autocast("cpu", torch.bfloat16, enabled=fast.HALF),
    ):
        tokens = fast.tower(model.model.visual, patches, h, w)
    return tokens.reshape(b, -1, tokens.shape[-1])


def answer(model, tokens: torch.Tensor, packed: dict[str, torch.Tensor], states: list | None = None) -> torch.Tensor:
    """Return logits at every labeled position."""
    language = model.model.language_model
    embeds = F.embedding(packed["ids"], language.embed_tokens.weight)
    visual = packed["visual"]
    embeds = embeds.index_copy(1, visual, tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=fast.HALF):
        hidden = fast.decode(language, embeds, packed["position"], packed["mask"], states)
    return hidden[packed["label"] != -100] @ language.embed_tokens.weight.T


def prepared(visuals, rows) -> dict[str, torch.Tensor]:
    head = Head.from_shown(visuals)
    packed = pack(head, rows, KINDS)
    packed["visual"] = torch.tensor([i for i, token in enumerate(head.ids) if token in PADS])
    return packed


def losses(model, batch, learn_tower: bool, place_head: PlaceHead | None = None):
    pixels, visuals, rows, *moment_labels = batch
    packed = prepared(visuals, rows)
    while packed["ids"].numel() > ROOM:
        rows = rows[: min(len(rows) - 1, ROOM // packed["ids"].shape[1])]
        packed = prepared(visuals, rows)
    pixels = pixels[: len(rows)]
    states: list[torch.Tensor] = []
    logits = answer(model, see(model, pixels, learn_tower), packed, states)
    is_label = packed["label"] != -100
    token_losses = F.cross_entropy(logits, packed["label"][is_label], reduction="none")
    weight = packed["weight"][is_label]
    loss = (token_losses * weight).sum() / weight.sum()
    if place_head is None:
        return (loss, 0.0), logits, packed
    state = states[place_head.LAYER - 1]
    extra = place_head.loss(state, visuals, packed["visual"])
    if moment_labels:
        extra = extra + SAID_WEIGHT * said_loss(
            model.model.language_model, state[:, packed["visual"]], moment_labels[0][: len(rows)]
        )
    return (loss, extra), logits, packed


@torch.no_grad()
def evaluate(model, draws) -> dict[str, float]:
    """Return the share of right first words by kind, on new drawings over held-out photographs."""
    right, total = np.zeros(len(KINDS)), np.zeros(len(KINDS))
    for batch in draws:
        _, logits, packed = losses(model, batch, False)
        is_label = packed["label"] != -100
        is_right = (logits.argmax(-1) == packed["label"][is_label]).numpy()
        kind = packed["kind"][is_label].numpy()
        for i in range(len(KINDS)):
            right[i] += is_right[kind == i].sum()
            total[i] += (kind == i).sum()
    return {name: round(float(right[i] / total[i]), 3) for i, name in enumerate(KINDS) if total[i]}


@torch.no_grad()
def prepare(model) -> None:
    """Scale down the decoder's block outputs, and scale visual tokens to the size of word embeddings, once."""
    language, merger = model.model.language_model, model.model.visual.merger
    for layer in language.layers:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3
    batch = draw_questions((986, 0))
    size = see(model, batch[0], False).pow(2).mean().sqrt()
    factor = 2 * language.embed_tokens.weight.pow(2).mean().sqrt() / size
    print("visual tokens", float(size), "scaled by", float(factor), flush=True)
    merger.mlp[2].weight *= factor
    merger.mlp[2].bias *= factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=2400)
    add("--lr", type=float, default=1e-3)
    add("--tower-lr", type=float, default=0.0, help="learning rate of the tower as a share of --lr; 0: frozen")
    add("--decay", type=float, default=0.1, help="share of the time with a falling rate, at the end")
    add("--tokens", type=int, default=1200, help="visual tokens per step")
    add("--low", type=int, default=7, help="minimum height and width in tokens")
    add("--high", type=int, default=10, help="maximum height and width of most images")
    add("--large", type=float, default=0.05, help="share of batches with larger images")
    add("--most", type=int, default=14, help="maximum height and width of larger images")
    add("--level", type=float, default=0.0, help="minimum fullness of a scene; 1: as full as the benchmark's")
    add("--square", type=float, default=0.0, help="share of image batches with 128 x 128 pixels")
    add("--videos", type=float, default=0.0, help="share of video batches")
    add("--moments", type=float, default=0.0, help="share of video batches with many motions and short appearances")
    add("--several", type=float, default=0.0, help="share of batches with several images per prompt")
    add("--mix", default="", help="questions per image, such as position=3,count=1 (others keep their default)")
    add("--eval-seconds", type=float, default=240)
    add("--run", type=Path, default=Path("runs/demo_qwen"))
    add("--log", type=Path, default=Path("benchmarks/experiments/training/qwen/log.jsonl"))
    add("--stop", type=Path, default=Path("runs/stop"), help="the stage ends when this file exists")
    add("--compile", type=int, default=1)
    add("--shipped", action="store_true", help="start from the shipped checkpoint and the clock of the log")
    add("--fresh", action="store_true", help="restart the language model from the tower's state")
    add("--place", type=float, default=0.1, help="weight of the loss of PlaceHead")
    add("--note", default="", help="reason for this run, for the log")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, head, place_head, log = build_model(args.seed), CellHead(), PlaceHead(), Log(args.log, args.run)
    state = log.start_from(SHIPPED, model) if args.shipped else log.load(model=model, head=head, place=place_head)
    if args.fresh:
        prepare(model)
    visual, language = model.model.visual, model.model.language_model
    groups = [{"params": [*language.parameters(), *place_head.parameters()], "share": 1.0}]
    if args.tower_lr:
        groups.append({"params": list(visual.parameters()), "share": args.tower_lr})
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.02, betas=(0.9, 0.98))
    before = [len(g["params"]) for g in state["optimizer"]["param_groups"]] if state.get("optimizer") else None
    if not args.fresh and before == [len(g["params"]) for g in groups]:
        optimizer.load_state_dict(state["optimizer"])
    if args.compile:
        fast.compile_all()
    mix = MIX | {k: int(v) for k, v in (pair.split("=") for pair in args.mix.split(",") if pair)}
    sizes = {"low": args.low, "high": args.high, "large": args.large, "max_side": args.most}
    start = log.steps.get("questions", 0)
    settings = {k: v for k, v in vars(args).items() if k not in ("run", "log", "stop")}
    log.write(event="start", stage="questions", **settings)
    key = (args.seed, 2, int(log.clock()))
    shares = {"square": args.square, "videos": args.videos, "several": args.several, "moments": args.moments}
    batches = Batches(draw_any, key, 0, tokens=args.tokens, mix=mix, level=args.level, **sizes, **shares)
    heldout_batches = [draw_questions((987, 2, i), 1200, **sizes, mix=MIX, split="heldout") for i in range(8)]
    if args.videos or args.moments:
        heldout_batches += [draw_moving((987, 3, i), split="heldout") for i in range(8)]
    if args.several:
        heldout_batches += [draw_several((987, 4, i), split="heldout") for i in range(8)]
    parameters = [p for group in groups for p in group["params"]]
    begin = last = time.time()
    step, mean, place_loss, waited = start, None, None, 0.0
    source = iter(batches)
    while True:
        progress = (time.time() - begin) / args.seconds
        if progress >= 1 or args.stop.exists():
            break
        for group in optimizer.param_groups:
            group["lr"] = group["share"] * args.lr * rate(progress, step - start, args.decay, 60)
        before = time.time()
        batch = next(source)
        waited += time.time() - before
        (loss, extra), _, _ = losses(model, batch, bool(args.tower_lr), place_head)
        optimizer.zero_grad(set_to_none=True)
        (loss + args.place * extra).backward()
        place_loss = extra.item() if place_loss is None else 0.97 * place_loss + 0.03 * extra.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        if step - start in (20, 60, 120):
            print(
                step,
                round(mean, 3),
                round(place_loss, 3),
                round(time.time() - begin, 1),
                "waited",
                round(waited, 1),
                flush=True,
            )
        if time.time() - last > args.eval_seconds:
            accuracy = evaluate(model, heldout_batches)
            losses_now = {"loss": round(mean, 4), "place": round(place_loss, 3), "waited": round(waited)}
            log.write(stage="questions", step=step, **losses_now, accuracy=accuracy)
            log.save("questions", step, optimizer, model=model, head=head, place=place_head)
            last = time.time()
    batches.close()
    log.write(event="end", stage="questions", step=step, loss=round(mean, 4), accuracy=evaluate(model, heldout_batches))
    log.save("questions", step, optimizer, model=model, head=head, place=place_head)


if __name__ == "__main__":
    main()
