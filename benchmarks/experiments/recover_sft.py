# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning under pruning with TRL's SFTTrainer: LoRA on demo_smol's decoder, accuracy before and after.

    python benchmarks/experiments/training/qwen/emoji.py NotoColorEmoji.ttf runs/emoji.npz
    python benchmarks/experiments/recover_sft.py --json benchmarks/results/recover_sft.jsonl
    python dev/readme.py

Prompts and answers are drawn by `experiments/training/smol/smol_scenes.py`, of all kinds that are asked, by a seed of
its own and over photographs that no held-out image has. The held-out questions are those of
`all_methods.py --every 4`; the file is read for the answers before and after alone. The recipe was fixed before the
first run: `divprune` at keep 0.25 and 0.11 from step to step, learning rate 1e-4, no try of others.

What was expected: a gain within the intervals at both keeps, since demo_smol learned from these drawings for days and
some hundred lessons are few; and a loss on whole images below two points, since LoRA changes little in so few steps.

A first run gave lessons as chats, and changed no answer: most of its loss was the line break that the chat template
puts after an answer. This is the second, whose prompts and completions are text; nothing else differs. No gain either:
most lessons are known before the first step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
from datasets import Dataset
from PIL import Image
from recover import RANK, WHOLE, _clocks, _spent, ask
from rich.console import Console
from transformers import TrainerCallback

import tokenprune
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.heldout import load_heldout

sys.path.append(str(Path(__file__).parent / "training/smol"))

SEED = 20261127
SETTINGS = [("divprune", 0.25), ("divprune", 0.11)]
LAYERS = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def lessons(subject: Model, size: int) -> Dataset:
    """Draw questions with their answers, as TRL wants them: prompt, completion and image.

    Both are text: a chat template puts a line break after the answer, which would be most of what is learned.
    """
    from smol_scenes import draw, photographs, sentence

    rows = []
    for number in range(size):
        rng = np.random.default_rng((SEED, number))
        while not (scene := draw(rng, photographs("train"))).questions:
            pass
        kinds = sorted({one.kind for one in scene.questions})
        kind = kinds[rng.integers(len(kinds))]
        asked = [one for one in scene.questions if one.kind == kind]
        question = asked[rng.integers(len(asked))]
        image = Image.fromarray(scene.pixels[0])
        answer = f"{sentence(scene, question)}{subject.processor.tokenizer.eos_token}"
        rows.append({"image": image, "prompt": subject.prompt([image], question.text), "completion": answer})
    return Dataset.from_list(rows)


class InTurn(TrainerCallback):
    """Patches anew at each step, so that a model learns under several settings."""

    def __init__(self, model: Any, settings: Sequence[tuple[str, float]]) -> None:
        self.model, self.settings = model, settings

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        method, keep = self.settings[state.global_step % len(self.settings)]
        tokenprune.patch(self.model, method, keep=keep, guard="off", replace=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tokenprune.unpatch(self.model)


def tune(subject: Model, *, steps: int, batch: int, rate: float) -> dict[str, Any]:
    """Tune `subject` in place under `SETTINGS` in turn; returns how it went."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    begin = _clocks()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=rate, warmup_steps=5,
            max_length=None, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
            seed=SEED, bf16=False, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            subject.model,
            config,
            train_dataset=lessons(subject, steps * batch),
            processing_class=subject.processor,
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LAYERS),
            callbacks=[InTurn(subject.model, SETTINGS)],
        )
        trainer.train()
    subject.model.eval()
    learned = sum(one.numel() for one in subject.model.parameters() if one.requires_grad)
    losses = [float(one["loss"]) for one in trainer.state.log_history if "loss" in one]
    return {"steps": steps, "batch": batch, "rate": rate, "parameters": learned, "losses": losses, **_spent(begin)}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    subject = load_model(args.model, device="cpu")
    asked = [one for one in load_heldout(folder=subject.heldout) if one.index % args.every == 0][: args.heldout]
    yield {
        "record": "header", **subject.environment(), "questions": len(asked), "seed": SEED, "rank": RANK,
        "every": args.every, "kinds": [one.kind for one in asked],
    }  # fmt: skip
    whole = WHOLE if args.whole else []
    for setting in SETTINGS:
        yield {"record": "result", "tuned": None, **_said(setting), **ask(subject, asked, *setting, batch=args.asked)}
    yield {"record": "tuned", **tune(subject, steps=args.steps, batch=args.batch, rate=args.rate)}
    for setting in (*SETTINGS, *whole):
        yield {"record": "result", "tuned": "sft", **_said(setting), **ask(subject, asked, *setting, batch=args.asked)}
    subject = load_model(args.model, device="cpu")
    for setting in whole:
        yield {"record": "result", "tuned": None, **_said(setting), **ask(subject, asked, *setting, batch=args.asked)}


def _said(setting: tuple[str, float]) -> dict[str, Any]:
    return dict(zip(("method", "keep"), setting, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo_smol")
    add("--heldout", type=int, default=1000, help="held-out questions at most")
    add("--every", type=int, default=4, help="of the held-out images each n-th one")
    add("--asked", type=int, default=8, help="questions at once")
    add("--steps", type=int, default=48)
    add("--batch", type=int, default=4)
    add("--rate", type=float, default=1e-4)
    add("--whole", action="store_true", help="ask without pruning, too")
    add("--json", type=Path, required=True)
    args = parser.parse_args()
    console = Console()
    with args.json.open("w") as file:
        for record in run(args):
            print(json.dumps(record), file=file, flush=True)
            console.print({k: v for k, v in record.items() if k not in ("kinds", "losses", "right")})


if __name__ == "__main__":
    main()
