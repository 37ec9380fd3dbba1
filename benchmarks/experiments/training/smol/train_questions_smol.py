# SPDX-License-Identifier: Apache-2.0
"""Stages 2 and 3: align the projector, then train it and low-rank adapters of the pretrained decoder on questions.

python experiments/training/smol/train_questions_smol.py --tower runs/demo_smol_tower/state.pt --seconds 3600 --pool 3
python experiments/training/smol/train_questions_smol.py --resume --seconds 1200 --pool 1      # all 576 visual tokens
"""

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
from transformers import PreTrainedTokenizerBase
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from running import Batches, Log, rate
from smol_align import Goals, align
from smol_decoder import Packer, Words, adapt, adapters, answer_logits
from smol_scenes import UNLIKE_PHOTOS, draw, photographs, sentence
from smol_targets import GRID
from tokenprune_demo.scenes import LARGE, SceneQuestion
from tokenprune_demo.smol import assemble, load_decoder
from train_tower_smol import build_tower, draw_batch, to_pixels

# Questions of each kind per image (others: one), and the share of each sort of scene.
MIX = {"presence": 2, "colour": 1, "position": 1, "count": 6, "thing": 3, "chart": 2, "document": 2}
SORTS = {
    "shapes": 0.14, "crowds": 0.4, "photo": 0.26, "sparse": 0.04, "sign": 0.04, "document": 0.05, "chart": 0.07
}  # fmt: skip


def choose(rng: np.random.Generator, scene, questions, mix: dict[str, int]) -> list[tuple[str, str, str]]:
    """Choose up to `mix[kind]` questions of each kind, with as many "yes" as "no" for presence."""
    kinds: dict[str, list] = {}
    for question in questions:
        kinds.setdefault(question.kind, []).append(question)
    chosen = []
    for kind, group in kinds.items():
        max_questions = mix.get(kind, 1)
        first = {"presence": ("yes",), "count": tuple("234")}.get(kind, ())  # balanced with the other answers
        parts = (
            [[q for q in group if (q.answer in first) == in_first] for in_first in (True, False)] if first else [group]
        )
        for part in parts:
            chosen += [part[i] for i in rng.permutation(len(part))[: max(1, max_questions // len(parts))]]
    order = [chosen[i] for i in rng.permutation(len(chosen))]
    return [(q.kind, q.text, sentence(scene, q)) for q in order]


def counts(rng: np.random.Generator, scene) -> list[SceneQuestion]:
    """Return two count questions that the scene does not have yet. The shapes may be absent."""
    fair = UNLIKE_PHOTOS if scene.background == "photo" else tuple(LARGE)
    texts = {question.text for question in scene.questions}
    num_items = {sort: sum(item.what == sort for item in scene.items) for sort in fair}
    questions = [SceneQuestion("count", f"how many {sort}s?", str(n), ()) for sort, n in num_items.items()]
    fresh = [question for question in questions if question.text not in texts]
    return [fresh[i] for i in rng.permutation(len(fresh))[:2]]


def draw_questions(seed, size: int = 6, split: str = "train", mix: dict[str, int] | None = None):
    """Draw pixels, bytes (B, H, W, 3), and the questions about each image."""
    rng, photos = np.random.default_rng(seed), photographs(split)
    pixels, rows = [], []
    while len(rows) < size:
        sort = str(rng.choice(tuple(SORTS), p=tuple(SORTS.values()))) if split == "train" else None
        scene = draw(rng, photos, sort)
        more = counts(rng, scene) if sort == "shapes" else []
        if questions := choose(rng, scene, [*scene.questions, *more], MIX if mix is None else mix):
            pixels.append(scene.pixels[0])
            rows.append(questions)
    return np.stack(pixels), rows


class Subject:
    """The parts of the model in training: a frozen tower, the projector, and the decoder with its adapters."""

    def __init__(self, rank: int, decoder=None, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if decoder is None:
            decoder, tokenizer = load_decoder()
        self.decoder, self.tokenizer = decoder, tokenizer
        self.tower, self.packer = build_tower().eval().requires_grad_(False), Packer(tokenizer)
        shape, _ = assemble(decoder, tokenizer, self.tower.config)
        self.projector: LlavaMultiModalProjector = shape.model.multi_modal_projector.requires_grad_(True)
        self.words = Words(decoder, tokenizer)
        self.low_rank = adapt(decoder, rank)

    def features(self, pixels: np.ndarray) -> torch.Tensor:
        """Return the tower's output of images, shape (B, patches, width)."""
        with torch.no_grad():
            return self.tower(to_pixels(pixels)).last_hidden_state[:, 1:]

    def visual(self, features: torch.Tensor, pool: int) -> torch.Tensor:
        """Return visual tokens, (B, n, decoder width). `pool` is the side of the squares that are averaged."""
        visual = self.projector(features)
        if pool == 1:
            return visual
        b, _, d = visual.shape
        side = GRID // pool
        return visual.reshape(b, side, pool, side, pool, d).mean((2, 4)).flatten(1, 2)

    def logits(self, pixels: np.ndarray, rows, pool: int):
        """Return logits at labeled positions, and the packed questions."""
        packed = self.packer.pack(rows, (GRID // pool) ** 2)
        visual = self.visual(self.features(pixels), pool)
        return answer_logits(self.decoder, visual, packed, len(self.packer.before)), packed

    def align(self, images: int, steps: int) -> float:
        features, labels = [], []
        for index in range(images // 16):
            pixels, label, _, _ = draw_batch((5, index), 16)
            features.append(self.features(pixels))
            labels.append(torch.from_numpy(label))
        return align(self.projector, Goals(self.words), torch.cat(features), torch.cat(labels), steps)


@torch.no_grad()
def evaluate(subject: Subject, pool: int, batches: int = 8, size: int = 8) -> dict[str, float]:
    """Return the share of answers with all tokens right, on new images over held-out photographs."""
    right: dict[str, list[bool]] = {}
    for index in range(batches):
        pixels, rows = draw_questions((987, index), size, "heldout")
        logits, packed = subject.logits(pixels, rows, pool)
        is_label = packed["label"] != -100
        is_right, number_of = logits.argmax(-1) == packed["label"][is_label], packed["number"][is_label]
        row_of = torch.arange(len(rows))[:, None].expand_as(is_label)[is_label]
        for i, row in enumerate(rows):
            for k, (kind, _, answer) in enumerate(row, 1):
                name = f"{kind} {answer.split()[-1]}" if kind == "presence" else kind
                right.setdefault(name, []).append(bool(is_right[(row_of == i) & (number_of == k)].all()))
    return {name: round(float(np.mean(values)), 3) for name, values in sorted(right.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=3600)
    add("--rank", type=int, default=16)
    add("--lr", type=float, default=1e-3)
    add("--projector-lr", type=float, default=2e-4)
    add("--decay", type=float, default=0.3, help="share of the time with falling rates, at the end")
    add("--batch", type=int, default=6, help="images per step")
    add("--pool", type=int, default=3, help="side of the squares of averaged patches: 1, 2, 3 or 4")
    add("--tower", type=Path, default=Path("runs/demo_smol_tower/state.pt"))
    add("--begin", type=Path, help="adapters to start from")
    add("--eval-seconds", type=float, default=240)
    add("--threads", type=int, default=1)
    add("--run", type=Path, default=Path("runs/demo_smol"))
    add("--log", type=Path, default=Path("benchmarks/experiments/training/smol/log.jsonl"))
    add("--stop", type=Path, default=Path("runs/stop"), help="the stage ends when this file exists")
    add("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    subject, log = Subject(args.rank), Log(args.log, args.run)
    subject.tower.load_state_dict(torch.load(args.tower)["tower"])
    groups = [{"params": subject.low_rank}, {"params": list(subject.projector.parameters())}]
    top = (args.lr, args.projector_lr)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))
    if args.resume:
        state = log.load(projector=subject.projector)
        subject.decoder.load_state_dict(state["adapters"]["weights"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
    else:
        log.write(event="align", unexplained=round(subject.align(320, 800), 4))
        if args.begin:
            subject.decoder.load_state_dict(torch.load(args.begin), strict=False)
    start = step = log.steps.get("questions", 0)
    settings = {
        name: getattr(args, name) for name in ("seconds", "rank", "lr", "projector_lr", "decay", "batch", "pool")
    }
    log.write(event="start", stage="questions", step=step, **settings)
    batches = Batches(draw_questions, (args.seed, 3), start, size=args.batch)
    source, begin, last, mean, num_questions = iter(batches), time.time(), time.time(), None, 0

    def save() -> None:
        kept = {"weights": adapters(subject.decoder)}
        log.save("questions", step, optimizer, projector=subject.projector, adapters=Holder(kept))

    while (progress := (time.time() - begin) / args.seconds) < 1 and not args.stop.exists():
        for group, highest in zip(optimizer.param_groups, top, strict=True):
            group["lr"] = highest * rate(progress, step - start, args.decay, 20)
        pixels, rows = next(source)
        logits, packed = subject.logits(pixels, rows, args.pool)
        loss = F.cross_entropy(logits, packed["label"][packed["label"] != -100])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        optimizer.step()
        step, num_questions = step + 1, num_questions + sum(map(len, rows))
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step - start in (2, 10):
            print(step, round(mean, 3), tuple(packed["ids"].shape), round(time.time() - begin, 1), flush=True)
        if time.time() - last > args.eval_seconds:
            accuracy = evaluate(subject, args.pool)
            log.write(
                stage="questions",
                step=step,
                asked=num_questions,
                loss=round(mean, 3),
                pool=args.pool,
                accuracy=accuracy,
            )
            save()
            last = time.time()
    batches.close()
    log.write(event="end", stage="questions", step=step, asked=num_questions, accuracy=evaluate(subject, args.pool, 16))
    save()


class Holder:
    """A dictionary with the interface of a module, for `Log.save`."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state


if __name__ == "__main__":
    main()
