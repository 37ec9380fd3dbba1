# SPDX-License-Identifier: Apache-2.0
"""Train the small vision-language model that ships with tokenprune, on one CPU core, from drawn pictures.

Four stages: (1) the vision tower with a linear head on per-patch labels; (2) projector and word embeddings, so that
patches are similar to the words for their content; (3) projector and language model on questions, with a frozen tower
and projected tokens averaged 2 x 2 to 64; (4) the same with all 256 tokens, optionally with the tower at a small
learning rate for the last part. benchmarks/experiments/training/README.md describes the run of the shipped checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from alignment import amplify_side_words, prepare, word_loss
from batches import DEFAULT_MIX, Batches, draw_batch, pack, to_pixels
from demo_model import GRID, build_model, export
from targets import PatchHead
from tokenprune_demo.scenes import KINDS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--stages", default="1,2,3,4", help="stages to run, in order")
    add("--seconds", default="1800,120,1400,2000", help="length of each stage")
    add("--batch", default="16,16,16,12", help="pictures per step in each stage")
    add("--lr", default="1.2e-3,2e-3,1e-3,1e-3", help="highest learning rate of each stage")
    add("--decay", default="0.5,0.5,0.05,0.5", help="share of each stage with a falling rate, at the end")
    add("--mix", default="", help="questions per picture, such as position=3,count=1 (others keep their default)")
    add(
        "--thaw",
        type=float,
        default=0.0,
        help="last share of stage 4 that trains the tower, at a tenth of the rate",
    )
    add("--guide", type=float, default=0.4, help="first share of stage 4 that guides attention to the evidence")
    add("--guide-weight", type=float, default=1.0)
    add("--amplify", type=float, default=1.0, help="factor of the side words' first values before stage 4")
    add("--threads", type=int, default=1)
    add("--eval-seconds", type=float, default=200)
    add("--run", type=Path, default=Path("runs/demo_vlm"), help="folder of the resumable state")
    add("--log", type=Path, default=Path("benchmarks/experiments/training/log.jsonl"))
    add("--export", type=Path, default=Path("demo/tokenprune_demo/models/demo_vlm"), help="folder of the checkpoint")
    add("--resume", action="store_true", help="continue from the state in --run")
    return parser.parse_args()


def tower_features(model, pixels: torch.Tensor) -> torch.Tensor:
    return model.model.vision_tower(pixels).last_hidden_state


def answer_logits(model, hidden: torch.Tensor, packed: dict[str, torch.Tensor], pool: bool) -> tuple:
    """Return logits at every labeled position, and attention weights if attention is eager."""
    core = model.model
    image = core.multi_modal_projector(hidden[:, 1:])
    if pool:
        b, _, d = image.shape
        image = image.reshape(b, GRID // 2, 2, GRID // 2, 2, d).mean((2, 4)).flatten(1, 2)
    embeds = core.language_model.embed_tokens(packed["ids"])
    begin = 3
    embeds = torch.cat([embeds[:, :begin], image, embeds[:, begin + image.shape[1] :]], 1)
    mask, guided = packed["mask"], core.language_model.config._attn_implementation == "eager"
    out = core.language_model(
        inputs_embeds=embeds,
        attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e9) if guided else mask,
        position_ids=packed["position"],
        use_cache=False,
        output_attentions=guided,
    )
    logits = model.lm_head(out.last_hidden_state[packed["label"] != -100])
    return logits, out.attentions


def guidance(attentions, packed: dict[str, torch.Tensor], layers=(1, 2, 3), begin: int = 3) -> torch.Tensor:
    """Return a loss that guides the answer token's attention to the evidence, for kinds with evidence.

    For grounding questions, the last head of the first layer is also guided to the side word ("left" in "left star ?
    assistant :", four tokens back). No head learns this without guidance in the available time.
    """
    row, column = packed["asks"].T
    evidence = packed["evidence"]
    if packed["pooled"]:
        evidence = evidence.reshape(-1, GRID // 2, 2, GRID // 2, 2).amax((2, 4)).flatten(1)
    patches = evidence.shape[1]
    masses = [
        (attentions[layer][row, :, column, begin : begin + patches] * evidence[:, None]).sum(-1).mean(1)
        for layer in layers
    ]
    loss = -torch.stack(masses).clamp(min=1e-4).log().mean()
    sided = packed["kind"][row, column] == KINDS.index("grounding")
    if sided.any():
        row, column = row[sided], column[sided]
        loss = loss - 0.5 * attentions[0][row, -1, column, column - 4].clamp(min=1e-12).log().mean()
    return loss


@torch.no_grad()
def evaluate(model, stage: int, head: PatchHead, pictures: int = 96) -> dict[str, float]:
    """Return accuracy on new pictures with held-out photographs: per patch (stages 1 and 2) or per question."""
    model.eval()
    right, total = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    patch = []
    for part in range(pictures // 16):
        batch = draw_batch((987, stage < 3, part), stage, 16, DEFAULT_MIX, "heldout")
        hidden = tower_features(model, to_pixels(batch[0]))
        if stage < 3:
            patch.append((hidden, torch.from_numpy(batch[1]), torch.from_numpy(batch[2])))
            continue
        packed = pack(batch[1], GRID**2 // (4 if stage == 3 else 1))
        logits, _ = answer_logits(model, hidden, packed, stage == 3)
        chosen = packed["label"] != -100
        is_right, kind = logits.argmax(-1) == packed["label"][chosen], packed["kind"][chosen]
        for i, name in enumerate(KINDS):
            right[name] += int(is_right[kind == i].sum())
            total[name] += int((kind == i).sum())
    model.train()
    if stage < 3:
        hidden, labels, present = (torch.cat(column) for column in zip(*patch, strict=True))
        if stage == 1:
            return head.accuracy(hidden, labels, present)
        return {name: round(share, 3) for name, share in word_loss(model, hidden, labels)[1].items()}
    return {name: round(right[name] / total[name], 3) for name in KINDS}


def rate(progress: float, step: int, decay: float, warm: int) -> float:
    """Return a trapezoid: warm-up over ``warm`` steps, flat, then a linear fall to 3 % over the last ``decay``."""
    return min(1.0, (step + 1) / warm) * max(0.03, min(1.0, (1 - progress) / decay))


def train_stage(model, head, stage: int, seconds: float, size: int, top: float, decay: float, args, log) -> None:
    tower = model.model.vision_tower
    mix = DEFAULT_MIX | {k: int(v) for k, v in (pair.split("=") for pair in args.mix.split(",") if pair)}
    model.requires_grad_(stage != 1)
    tower.requires_grad_(stage == 1)
    rest = [p for n, p in model.named_parameters() if not n.startswith("model.vision_tower.")]
    groups = [{"params": [*tower.parameters(), *head.parameters()]}] if stage == 1 else [{"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=top, weight_decay=0.02, betas=(0.9, 0.98))
    start, step, mean, gap, thawed = log.step(stage), 0, None, None, False
    batches = Batches(args.seed, stage, start, size, mix)
    log.write(
        event="start",
        stage=stage,
        seconds=seconds,
        batch=size,
        lr=top,
        decay=decay,
        thaw=args.thaw,
        guide=args.guide,
        seed=args.seed,
        mix=mix,
        first_batch=start,
        threads=torch.get_num_threads(),
    )
    guided = stage == 4 and args.guide > 0
    model.model.language_model.set_attn_implementation("eager" if guided else "sdpa")
    begin = last = time.time()
    for batch in batches:
        progress = (time.time() - begin) / seconds
        if progress >= 1:
            break
        if stage == 4 and not thawed and progress > 1 - args.thaw:
            tower.requires_grad_(True)
            optimizer.add_param_group({"params": list(tower.parameters())})
            log.write(event="thaw", stage=stage, step=start + step)
            thawed = True
        if guided and progress > args.guide:
            guided = False
            model.model.language_model.set_attn_implementation("sdpa")
            log.write(event="guide off", stage=stage, step=start + step)
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = top * rate(progress, step, decay, 30 if start else 100) * (0.1 if i else 1.0)
        with torch.set_grad_enabled(stage == 1 or thawed):
            hidden = tower_features(model, to_pixels(batch[0]))
        if stage == 1:
            loss = plain = head.loss(hidden, *map(torch.from_numpy, batch[1:]))
        elif stage == 2:
            loss = plain = word_loss(model, hidden, torch.from_numpy(batch[1]))[0]
        else:
            pooled = stage == 3 or (guided and step % 4 != 0)
            packed = pack(batch[1], GRID**2 // (4 if pooled else 1)) | {"pooled": pooled}
            logits, attentions = answer_logits(model, hidden, packed, pooled)
            target = packed["label"][packed["label"] != -100]
            loss = plain = F.cross_entropy(logits, target)
            if guided and "asks" in packed:
                led = guidance(attentions, packed)
                loss = loss + args.guide_weight * led
                gap = led.item() if gap is None else 0.97 * gap + 0.03 * led.item()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        step += 1
        mean = plain.item() if mean is None else 0.97 * mean + 0.03 * plain.item()
        if time.time() - last > args.eval_seconds or start + step in (30, 100):
            extra = {} if gap is None else {"guide": round(gap, 4)}
            accuracy = evaluate(model, stage, head)
            log.write(stage=stage, step=start + step, loss=round(mean, 4), **extra, accuracy=accuracy)
            log.save(model, head, stage, start + step)
            last = time.time()
    batches.close()
    log.write(event="end", stage=stage, step=start + step, loss=round(mean, 4), accuracy=evaluate(model, stage, head))
    log.save(model, head, stage, start + step)


class Log:
    """JSON lines of the run, its clock, and the state to continue from."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path, self.state_path, self.begin = args.log, args.run / "state.pt", time.time()
        self.steps: dict[int, int] = {}
        self.before = 0.0
        args.run.mkdir(parents=True, exist_ok=True)

    def step(self, stage: int) -> int:
        return self.steps.get(stage, 0)

    def clock(self) -> float:
        return self.before + time.time() - self.begin

    def write(self, **fields) -> None:
        line = json.dumps({"time": round(self.clock(), 1), **fields})
        with self.path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def save(self, model, head, stage: int, step: int) -> None:
        self.steps[stage] = step
        state = {"model": model.state_dict(), "head": head.state_dict(), "steps": self.steps, "clock": self.clock()}
        torch.save(state, self.state_path.with_suffix(".tmp"))
        os.replace(self.state_path.with_suffix(".tmp"), self.state_path)

    def load(self, model, head) -> None:
        state = torch.load(self.state_path)
        model.load_state_dict(state["model"])
        head.load_state_dict(state["head"], strict=False)
        self.steps, self.before = state["steps"], state["clock"]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model, head, log = build_model(args.seed).train(), PatchHead(), Log(args)
    if args.resume:
        log.load(model, head)
    lists = [text.split(",") for text in (args.stages, args.seconds, args.batch, args.lr, args.decay)]
    for stage, seconds, size, top, decay in zip(*lists, strict=True):
        if int(stage) == 2 and log.step(2) == 0:
            prepare(model, to_pixels(draw_batch((986, 0), 2, 32, DEFAULT_MIX)[0]))
        if int(stage) == 4 and args.amplify != 1:
            amplify_side_words(model, args.amplify)
            log.write(event="amplify", stage=4, factor=args.amplify)
        train_stage(model, head, int(stage), float(seconds), int(size), float(top), float(decay), args, log)
        model.requires_grad_(True)
        export(model, args.export)


if __name__ == "__main__":
    main()
