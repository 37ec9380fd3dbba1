# SPDX-License-Identifier: Apache-2.0
"""What tuning under pruning gives back of what pruning costs: projector and LoRA on the decoder of demo_qwen.

    python benchmarks/experiments/recover.py --json benchmarks/results/recover.jsonl
    python dev/readme.py

demo_qwen is the fair one of the shipped models: no token was dropped in its training, and no attention led. It is
tuned twice on the same questions in the same order: under `divprune` and `uniform` at keep 0.25 and 0.11 in turn, and,
as a control, without pruning. Both are then asked the held-out questions under each of these. An optimizer's
step is the plain one of transformers: labels, loss, backward; only what the frozen tower makes of an image is kept, so
that each is encoded once.

Learned from is what `tokenprune_demo.scenes` draws by seeds of its own (`SEED`), over photographs that no held-out
image has, resized to 144 to 320 pixels a side; learning rate and steps were chosen on a third draw. The held-out file
is read for the last answers alone. Scenes have no named things, so `thing` is a kind that nothing here teaches.

What was expected, before the first run: `divprune` gets back a third of what it loses at 25 % and half at 11 %, since
the decoder never saw an image with holes; `uniform` a third at both: what lies between its tokens is gone, and only
the rest of its loss is strangeness; `position` and `count` gain most. The control gives back less than 2 points, whole
accuracy of what was tuned under pruning falls by 2 points or fewer, and `thing` gains nothing. (Written for a tuning
of its own under each method, and some thousand questions; a busy machine had time for one under both, and hundreds.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tokenprune
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.backgrounds import load_photos
from tokenprune_demo.heldout import load_heldout
from tokenprune_demo.scenes import draw_scene

SEED = 20260311  # of no other set: the held-out ones are of 20260101, 20260102 and 20260202, training of 0
TUNING, VALIDATION = 0, 1  # parts of the seed
PRUNED = [(method, keep) for keep in (0.25, 0.11) for method in ("divprune", "uniform")]
WHOLE = [("nothing", 1.0)]
TUNINGS = {"pruning": PRUNED, "nothing": WHOLE}  # the second is the control
RANK = 8
WARM_UP = 5


@dataclass(frozen=True, eq=False)
class Drawn:
    """A question about a drawn image."""

    image: Image.Image
    kind: str
    question: str
    answer: str


Drawings = Sequence[Sequence[Drawn]]  # for each image all questions about it


def draw(part: int, images: int) -> Drawings:
    """Draw images of any size."""
    drawn = []
    for number in range(images):
        rng = np.random.default_rng((SEED, part, number))
        scene = draw_scene(rng, load_photos("train"))
        size = [16 * int(side) for side in rng.integers(9, 21, 2)]
        image = scene.image.resize(size, Image.Resampling.BICUBIC)
        drawn.append([Drawn(image, one.kind, one.text, one.answer) for one in scene.questions])
    return drawn


def batches(drawn: Drawings, size: int, seed: tuple[int, ...]) -> Iterator[list[Drawn]]:
    """Draw batches for ever: a question each about `size` images, of a kind drawn first."""
    rng = np.random.default_rng(seed)
    while True:
        batch = []
        for number in rng.choice(len(drawn), size, replace=len(drawn) < size):
            kinds = sorted({one.kind for one in drawn[number]})
            kind = kinds[rng.integers(len(kinds))]
            asked = [one for one in drawn[number] if one.kind == kind]
            batch.append(asked[rng.integers(len(asked))])
        yield batch


def lesson(subject: Model, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the model's arguments for questions with their answers, and labels: the answer and the end alone."""
    inputs = subject.inputs([one.image for one in batch], [one.question for one in batch])
    tokenizer = subject.processor.tokenizer
    told = [[*tokenizer(one.answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for one in batch]
    longest = max(map(len, told))

    def row(fill: int, values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([[*one, *[fill] * (longest - len(one))] for one in values])

    more = {
        "input_ids": row(tokenizer.pad_token_id, told),
        "attention_mask": row(0, [[1] * len(one) for one in told]),
        "mm_token_type_ids": row(0, [[0] * len(one) for one in told]),
    }
    labels = torch.cat([torch.full_like(inputs["input_ids"], -100), row(-100, told)], 1)
    return inputs | {name: torch.cat([inputs[name], one], 1) for name, one in more.items()} | {"labels": labels}


class _Unmerged(nn.Module):
    """Stands where the projector does, and hands on what that would read: the patches of each token in a row."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.patches = patches

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.reshape(hidden.shape[0] // self.patches, -1)


class FrozenTower:
    """The forward of a Qwen2.5-VL tower whose blocks are frozen: they run once for each image. The projector behind
    them (`merger`) runs each time, with gradients."""

    def __init__(self) -> None:
        self.known: dict[bytes, torch.Tensor] = {}

    def put_into(self, tower: nn.Module) -> None:
        plain, self.tower = type(tower).forward, tower

        def forward(pixels: torch.Tensor, grid_thw: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
            images = pixels.split(grid_thw.prod(-1).tolist())
            states = torch.cat([self.state(plain, *one) for one in zip(images, grid_thw, strict=True)])
            width = states.shape[1] // tower.spatial_merge_unit
            return BaseModelOutputWithPooling(pooler_output=tower.merger(states.view(-1, width)))

        tower.forward = forward

    @torch.no_grad()
    def state(self, plain: Any, image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        key = hashlib.sha256(image.numpy().tobytes() + bytes(grid.tolist())).digest()
        if key not in self.known:
            projector = self.tower.merger
            self.tower.merger = _Unmerged(self.tower.spatial_merge_unit)
            try:
                self.known[key] = plain(self.tower, image, grid_thw=grid[None]).pooler_output.clone()
            finally:
                self.tower.merger = projector
        return self.known[key]


def loaded(tower: FrozenTower) -> Model:
    subject = load_model("demo_qwen", device="cpu")
    tower.put_into(subject.model.model.visual)
    return subject


def adapt(model: Any) -> Any:
    """Freeze a model but for its projector, and for LoRA on all linear layers of its decoder."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    layers = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers, modules_to_save=["merger"])
    return get_peft_model(model, config)


def under(model: Any, method: str, keep: float) -> Any:
    return nullcontext() if (method, keep) in WHOLE else tokenprune.patched(model, method, keep=keep, guard="off")


def tune(
    subject: Model, settings: Sequence[tuple[str, float]], drawn: Drawings, *, steps: int, batch: int, rate: float
) -> dict[str, Any]:
    """Tune `subject` in place under methods and keeps in turn; returns how it went. rate: the highest, reached after
    `WARM_UP` steps and falling to 0."""
    adapted = adapt(subject.model)
    learned = [one for one in adapted.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    slope = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP))
    )
    source, losses, begin = batches(drawn, batch, (SEED, TUNING)), [], _clocks()
    adapted.train()
    for step in range(steps):
        with under(subject.model, *settings[step % len(settings)]):
            loss = subject.model(**lesson(subject, next(source)), use_cache=False).loss
            loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        slope.step()
        losses.append(round(loss.item(), 4))
    adapted.eval()
    return {
        "steps": steps, "batch": batch, "rate": rate, "parameters": sum(one.numel() for one in learned),
        "losses": losses, **_spent(begin),
    }  # fmt: skip


@torch.no_grad()
def validation_loss(subject: Model, drawn: Drawings, questions: int) -> float:
    """The mean loss under `PRUNED`, of questions that tuning has not seen."""
    source, size, losses = batches(drawn, 16, (SEED, VALIDATION)), -(-questions // 16), []
    asked = [lesson(subject, next(source)) for _ in range(size)]
    for setting in PRUNED:
        with under(subject.model, *setting):
            losses += [subject.model(**one, use_cache=False).loss.item() for one in asked]
    return round(float(np.mean(losses)), 4)


@torch.inference_mode()
def ask(subject: Model, examples: Sequence[Any], method: str, keep: float, batch: int = 27) -> dict[str, Any]:
    """Ask held-out questions; returns which are right, a 1 or 0 each, and the visual tokens of an image."""
    right, tokens, begin = "", 0, _clocks()
    with under(subject.model, method, keep):
        for start in range(0, len(examples), batch):
            asked = examples[start : start + batch]
            inputs = subject.inputs([one.image for one in asked], [one.question for one in asked])
            scores = METRICS[subject.metric].score(subject.generate(inputs), [one.answers for one in asked])
            right += "".join(str(int(score)) for score in scores)
            patched = tokenprune.is_patched(subject.model)
            tokens += tokenprune.stats(subject.model).visual_tokens_out if patched else subject.visual_tokens(inputs)
    return {"right": right, "tokens": round(tokens / len(examples), 1), **_spent(begin)}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _spent(begin: tuple[float, float]) -> dict[str, float]:
    """Seconds since `begin`, of the clock and of this process; the machine's load tells the two apart."""
    wall, cpu = (now - then for now, then in zip(_clocks(), begin, strict=True))
    return {"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1), "load": round(os.getloadavg()[0], 2)}


def tried(tower: FrozenTower, rates: Sequence[float], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tune for a few steps with each learning rate (0: as shipped), and measure on the validation draw."""
    drawn, others = draw(TUNING, args.images), draw(VALIDATION, args.validation)
    for rate in rates:
        subject = loaded(tower)
        steps = args.try_steps if rate else 0
        told = tune(subject, PRUNED, drawn, steps=steps, batch=args.batch, rate=rate)
        yield {"record": "tried", "validation_loss": validation_loss(subject, others, 4 * args.validation), **told}


def run(tower: FrozenTower, args: argparse.Namespace, known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what `known` lacks: a header, tries of learning rates, then the answers before and after each tuning."""
    subject = loaded(tower)
    examples = load_heldout(limit=args.heldout, folder=subject.heldout)
    if not known:
        yield {
            "record": "header", **subject.environment(), "questions": len(examples), "seed": SEED,
            "kinds": [one.kind for one in examples], "images": args.images, "rank": RANK,
        }  # fmt: skip
    tries = [one for one in known if one["record"] == "tried"]
    for record in tried(tower, [rate for rate in args.rates if rate not in {one["rate"] for one in tries}], args):
        tries.append(record)
        yield record
    rate = min((one for one in tries if one["rate"]), key=lambda one: one["validation_loss"])["rate"]
    done = {(one["tuned"], one["method"], one["keep"]) for one in known if one["record"] == "result"}
    for tuned in (*TUNINGS, None):
        settings = [one for one in (*PRUNED, *WHOLE) if (tuned, *one) not in done]
        if not settings:
            continue
        subject = loaded(tower)
        if tuned is not None:
            told = tune(
                subject, TUNINGS[tuned], draw(TUNING, args.images), steps=args.steps, batch=args.batch, rate=rate
            )
            yield {"record": "tuned", "under": tuned, **told}
        for method, keep in settings:
            said = ask(subject, examples, method, keep)
            yield {"record": "result", "tuned": tuned, "method": method, "keep": keep, **said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=int, default=600, help="to tune on, each with some twenty questions")
    add("--validation", type=int, default=16, help="images of the validation draw, each asked four questions")
    add("--heldout", type=int, default=30, help="held-out images, each with nine questions; 200 at most")
    add("--steps", type=int, default=480)
    add("--batch", type=int, default=16)
    add("--rates", type=float, nargs="+", default=(0.0, 1e-4), help="learning rates; the best is taken")
    add("--try-steps", type=int, default=20, help="steps with each rate before that is decided")
    add("--json", type=Path, required=True, help="goes on where this file ends")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    console, tower = Console(), FrozenTower()
    for record in run(tower, args, known):
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
        said = {k: v for k, v in record.items() if k not in ("kinds", "losses", "right")}
        share = f", {record['right'].count('1') / len(record['right']):.1%} right" if "right" in record else ""
        console.print(f"{said}{share}")


if __name__ == "__main__":
    main()
