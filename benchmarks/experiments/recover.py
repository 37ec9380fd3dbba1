# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy that tuning under pruning recovers: projector and LoRA on the decoder of demo_qwen.

    python benchmarks/experiments/recover.py --json benchmarks/results/recover.jsonl
    python dev/readme.py

demo_qwen is trained without dropping tokens. It is tuned twice on the same questions in the same order: under
`divprune` and `uniform` at keep 0.25 and 0.11 in turn, and without pruning as a control. Both models then answer the
held-out questions under each of these settings. A training step is as in transformers (labels, loss, backward). The
output of the frozen vision tower is cached per image.

The training images are drawn by `tokenprune_demo.scenes` with a separate seed (`SEED`), over photographs that no
held-out image uses, and resized to 144 to 320 pixels per side. Learning rate and steps were chosen on a third draw. The
held-out file is used for the final answers only. Scenes have no named objects, so nothing trains the kind `thing`.

Expectations before the first run: `divprune` recovers a third of its loss at 25 % and half at 11 %, since the decoder
was not trained on images with gaps; `uniform` recovers a third at both, since the information between its tokens is
lost; `position` and `count` gain most. The control recovers less than 2 points, the unpruned accuracy of the model
tuned under pruning falls by at most 2 points, and `thing` gains nothing. (These expectations assumed a separate tuning
per method and about a thousand questions. Machine time allowed one tuning for both methods, and hundreds of questions.)
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

SEED = 20260311  # unique: held-out sets use 20260101, 20260102 and 20260202, training uses 0
TUNING, VALIDATION = 0, 1  # second part of the seed
PRUNED = [(method, keep) for keep in (0.25, 0.11) for method in ("divprune", "uniform")]
UNPRUNED = [("nothing", 1.0)]
TUNINGS = {"pruning": PRUNED, "nothing": UNPRUNED}  # the second is the control
RANK = 8
WARM_UP = 5


@dataclass(frozen=True, eq=False)
class Drawn:
    """A question about a drawn image."""

    image: Image.Image
    kind: str
    question: str
    answer: str


Drawings = Sequence[Sequence[Drawn]]  # the questions of each image


def draw(part: int, images: int) -> Drawings:
    """Draw images of random sizes with their questions."""
    drawings = []
    for index in range(images):
        rng = np.random.default_rng((SEED, part, index))
        scene = draw_scene(rng, load_photos("train"))
        size = [16 * int(side) for side in rng.integers(9, 21, 2)]
        image = scene.image.resize(size, Image.Resampling.BICUBIC)
        drawings.append([Drawn(image, question.kind, question.text, question.answer) for question in scene.questions])
    return drawings


def batches(drawings: Drawings, size: int, seed: tuple[int, ...]) -> Iterator[list[Drawn]]:
    """Yield endless batches of one question about each of `size` images. The kind is drawn first."""
    rng = np.random.default_rng(seed)
    while True:
        batch = []
        for index in rng.choice(len(drawings), size, replace=len(drawings) < size):
            kinds = sorted({drawing.kind for drawing in drawings[index]})
            kind = kinds[rng.integers(len(kinds))]
            candidates = [drawing for drawing in drawings[index] if drawing.kind == kind]
            batch.append(candidates[rng.integers(len(candidates))])
        yield batch


def lesson(subject: Model, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return inputs of questions with their answers, and labels of the answer and the end token only."""
    inputs = subject.inputs([example.image for example in batch], [example.question for example in batch])
    tokenizer = subject.processor.tokenizer
    answers = [
        [*tokenizer(example.answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for example in batch
    ]
    longest = max(map(len, answers))

    def row(fill: int, values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([[*ids, *[fill] * (longest - len(ids))] for ids in values])

    more = {
        "input_ids": row(tokenizer.pad_token_id, answers),
        "attention_mask": row(0, [[1] * len(ids) for ids in answers]),
        "mm_token_type_ids": row(0, [[0] * len(ids) for ids in answers]),
    }
    labels = torch.cat([torch.full_like(inputs["input_ids"], -100), row(-100, answers)], 1)
    extended = {name: torch.cat([inputs[name], extra], 1) for name, extra in more.items()}
    return inputs | extended | {"labels": labels}


class _Unmerged(nn.Module):
    """Replace the projector and return its input: the patches of each token in a row."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.patches = patches

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.reshape(hidden.shape[0] // self.patches, -1)


class FrozenTower:
    """Forward of a Qwen2.5-VL tower with frozen blocks.

    The blocks run once per image. The projector after them (`merger`) runs each time, with gradients.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, torch.Tensor] = {}

    def put_into(self, tower: nn.Module) -> None:
        plain, self.tower = type(tower).forward, tower

        def forward(pixels: torch.Tensor, grid_thw: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
            images = pixels.split(grid_thw.prod(-1).tolist())
            states = torch.cat([self.state(plain, *image) for image in zip(images, grid_thw, strict=True)])
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
    """Freeze the model except its projector, and add LoRA to all linear layers of the decoder."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    layers = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers, modules_to_save=["merger"])
    return get_peft_model(model, config)


def apply_setting(model: Any, method: str, keep: float) -> Any:
    return nullcontext() if (method, keep) in UNPRUNED else tokenprune.patched(model, method, keep=keep, guard="off")


def tune(
    subject: Model, settings: Sequence[tuple[str, float]], drawings: Drawings, *, steps: int, batch: int, rate: float
) -> dict[str, Any]:
    """Tune `subject` in place, with the settings in turn, and return a record.

    The learning rate rises to `rate` in `WARM_UP` steps and then falls to 0.
    """
    adapted = adapt(subject.model)
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    slope = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP))
    )
    source, losses, begin = batches(drawings, batch, (SEED, TUNING)), [], _clocks()
    adapted.train()
    for step in range(steps):
        with apply_setting(subject.model, *settings[step % len(settings)]):
            loss = subject.model(**lesson(subject, next(source)), use_cache=False).loss
            loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        slope.step()
        losses.append(round(loss.item(), 4))
    adapted.eval()
    return {
        "steps": steps, "batch": batch, "rate": rate, "parameters": sum(parameter.numel() for parameter in learned),
        "losses": losses, **_spent(begin),
    }  # fmt: skip


@torch.no_grad()
def validation_loss(subject: Model, drawings: Drawings, questions: int) -> float:
    """Return the mean loss under `PRUNED` on questions that are not in the tuning set."""
    source, size, losses = batches(drawings, 16, (SEED, VALIDATION)), -(-questions // 16), []
    all_inputs = [lesson(subject, next(source)) for _ in range(size)]
    for setting in PRUNED:
        with apply_setting(subject.model, *setting):
            losses += [subject.model(**inputs, use_cache=False).loss.item() for inputs in all_inputs]
    return round(float(np.mean(losses)), 4)


@torch.inference_mode()
def ask(subject: Model, examples: Sequence[Any], method: str, keep: float, batch: int = 27) -> dict[str, Any]:
    """Ask held-out questions. Return the right answers as a string of 1 and 0, and the visual tokens per image."""
    right, tokens, begin = "", 0, _clocks()
    with apply_setting(subject.model, method, keep):
        for start in range(0, len(examples), batch):
            chunk = examples[start : start + batch]
            inputs = subject.inputs([example.image for example in chunk], [example.question for example in chunk])
            scores = METRICS[subject.metric].score(subject.generate(inputs), [example.answers for example in chunk])
            right += "".join(str(int(score)) for score in scores)
            patched = tokenprune.is_patched(subject.model)
            tokens += tokenprune.stats(subject.model).visual_tokens_out if patched else subject.visual_tokens(inputs)
    return {"right": right, "tokens": round(tokens / len(examples), 1), **_spent(begin)}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _spent(begin: tuple[float, float]) -> dict[str, float]:
    """Return wall and CPU seconds since `begin`, and the machine's load."""
    wall, cpu = (now - then for now, then in zip(_clocks(), begin, strict=True))
    return {"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1), "load": round(os.getloadavg()[0], 2)}


def try_rates(tower: FrozenTower, rates: Sequence[float], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tune for a few steps with each learning rate (0: no tuning), and measure the loss on the validation draw."""
    drawings, others = draw(TUNING, args.images), draw(VALIDATION, args.validation)
    for rate in rates:
        subject = loaded(tower)
        steps = args.try_steps if rate else 0
        tuning = tune(subject, PRUNED, drawings, steps=steps, batch=args.batch, rate=rate)
        yield {"record": "tried", "validation_loss": validation_loss(subject, others, 4 * args.validation), **tuning}


def run(tower: FrozenTower, args: argparse.Namespace, known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the records that `known` lacks: header, tries of learning rates, and answers before and after tuning."""
    subject = loaded(tower)
    examples = load_heldout(limit=args.heldout, folder=subject.heldout)
    if not known:
        yield {
            "record": "header", **subject.environment(), "questions": len(examples), "seed": SEED,
            "kinds": [example.kind for example in examples], "images": args.images, "rank": RANK,
        }  # fmt: skip
    tries = [record for record in known if record["record"] == "tried"]
    for record in try_rates(
        tower, [rate for rate in args.rates if rate not in {record["rate"] for record in tries}], args
    ):
        tries.append(record)
        yield record
    scored = [record for record in tries if record["rate"]]
    rate = min(scored, key=lambda record: record["validation_loss"])["rate"]
    done = {(record["tuned"], record["method"], record["keep"]) for record in known if record["record"] == "result"}
    for tuned in (*TUNINGS, None):
        settings = [setting for setting in (*PRUNED, *UNPRUNED) if (tuned, *setting) not in done]
        if not settings:
            continue
        subject = loaded(tower)
        if tuned is not None:
            tuning = tune(
                subject, TUNINGS[tuned], draw(TUNING, args.images), steps=args.steps, batch=args.batch, rate=rate
            )
            yield {"record": "tuned", "under": tuned, **tuning}
        for method, keep in settings:
            results = ask(subject, examples, method, keep)
            yield {"record": "result", "tuned": tuned, "method": method, "keep": keep, **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=int, default=600, help="number of tuning images, each with about twenty questions")
    add("--validation", type=int, default=16, help="number of validation images, each with four questions")
    add("--heldout", type=int, default=30, help="number of held-out images, each with nine questions; at most 200")
    add("--steps", type=int, default=480)
    add("--batch", type=int, default=16)
    add("--rates", type=float, nargs="+", default=(0.0, 1e-4), help="learning rates; the best one is used")
    add("--try-steps", type=int, default=20, help="steps to try each learning rate")
    add("--json", type=Path, required=True, help="raw file; an existing file is continued")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json.exists() else []
    console, tower = Console(), FrozenTower()
    for record in run(tower, args, known):
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
        summary = {k: v for k, v in record.items() if k not in ("kinds", "losses", "right")}
        share = f", {record['right'].count('1') / len(record['right']):.1%} right" if "right" in record else ""
        console.print(f"{summary}{share}")


if __name__ == "__main__":
    main()
