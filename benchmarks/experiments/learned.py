# SPDX-License-Identifier: Apache-2.0
"""Fit selectors with `tokenprune fit learned` and compare them with training-free methods at equal cost.

    python benchmarks/experiments/learned.py fit --model demo_qwen --out runs/learned
    python benchmarks/experiments/learned.py ask --model demo_qwen --out runs/learned
    python benchmarks/experiments/learned.py page

Training pairs are drawn with seeds and photographs that the held-out sets do not use. The targets come from the
model's own answers, without labels. Training asks only some kinds of questions (`TRAINED`), about scenes without pages
and charts. `ask` appends one line for each setting to benchmarks/results/learned.jsonl. Both commands continue an
interrupted run.

Expectations before the first run, on images of the same kind: at 11 % a learned selector gains at least 4 points over
divprune; on pages it does not gain.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import RESULTS
from rich.console import Console

import tokenprune
from tokenprune.selection.method import Site
from tokenprune_bench.calibration import fit_learned
from tokenprune_bench.calibration.selector_observations import ObservedPrompts
from tokenprune_bench.calibration.selector_targets import ObservedPrompt
from tokenprune_bench.metrics import get_metric
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.drawn_sets import draw_set
from tokenprune_demo.heldout import load_heldout

TRAINING = Path(__file__).parent / "training"
sys.path[:0] = [str(TRAINING / "qwen"), str(TRAINING / "smol"), str(TRAINING.parent / "selector")]

# Files of earlier runs name the class of their samples by this module.
sys.modules["selector_targets"] = SimpleNamespace(Observation=ObservedPrompt)  # type: ignore[assignment]
RAW = RESULTS / "learned.jsonl"
KEEPS = (0.11, 0.05, 0.25)
TARGETS = ("attention", "gradient", "topk")
DIVERSITIES = (0.0, 1.0, 3.0)
TRAINED = {
    "demo_qwen": ("colour", "presence", "count", "position", "digits", "grounding"),
    "demo_smol": ("colour", "presence", "count", "position"),
}
PAGES = ("document", "chart")  # kinds of demo_smol's held-out set about other images
PAIRS = {"demo_qwen": 800, "demo_smol": 160}
EPOCHS = {
    "demo_qwen": {"attention": 12, "gradient": 12, "topk": 3},
    "demo_smol": {"attention": 30, "gradient": 30, "topk": 1},
}
IMAGES = {"demo_qwen": 64, "demo_smol": 60}  # held-out images, 0 for all
DOCUMENTS = 32
FREE = {
    "demo_qwen": ("divprune", "cdpruner", "mmtok", "scope", "random", "downsample"),
    "demo_smol": ("divprune", "cdpruner", "mmtok", "otprune", "random", "downsample"),
}


def find_set(name: str, example: Any) -> str:
    """Return the set of a held-out question: its kind was asked in training, or not, or its image is a page."""
    if example.kind in PAGES or not hasattr(example, "background"):
        return "pages"
    return "trained kinds" if example.kind in TRAINED[name] else "other kinds"


def load_images(name: str, subject: Model) -> list[list[Any]]:
    """Return the held-out questions, grouped by image."""
    examples = load_heldout(limit=IMAGES[name] or None, folder=subject.heldout)
    if name == "demo_qwen":
        examples = [*examples, *draw_set("documents", DOCUMENTS).questions]
    by_image: dict[Any, list[Any]] = {}
    for example in examples:
        by_image.setdefault((find_set(name, example) == "pages", example.index), []).append(example)
    return list(by_image.values())


class Asker:
    """Ask the questions of an image in one batch. Inputs and outputs of the vision tower are kept for later settings.

    Args:
        subject: The model.
    """

    def __init__(self, subject: Model) -> None:
        self.subject, self.metric = subject, get_metric(subject.metric)
        self.inputs: dict[int, dict[str, Any]] = {}
        self.encoded: dict[bytes, Any] = {}

    def answer(self, name: str, images: list[list[Any]], changes_pixels: bool) -> dict[str, str]:
        """Return right answers as 1 and wrong answers as 0, in order, for each set."""
        right = {"trained kinds": "", "other kinds": "", "pages": ""}
        for examples in images:
            inputs = None if changes_pixels else self.inputs.get(id(examples[0]))
            if inputs is None:
                inputs = self.subject.inputs([e.images[0] for e in examples], [e.question for e in examples])
            if not changes_pixels:
                self.inputs[id(examples[0])] = inputs
            scores = self.metric.score(self.subject.generate(inputs), [e.answers for e in examples])
            for example, score in zip(examples, scores, strict=True):
                right[find_set(name, example)] += str(int(score >= 0.5))
        return right

    @contextmanager
    def keep_encoded(self, reads_tower: bool) -> Iterator[None]:
        """Encode each batch of images once, unless the method reads the tower or changes the pixels."""
        model = self.subject.model.model
        tower = model.visual if hasattr(model, "visual") else model.vision_tower
        encode = tower.forward

        def forward(pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            key = hashlib.sha256(pixels.contiguous().numpy().tobytes()).digest()
            if key not in self.encoded:
                self.encoded[key] = _encode_once(encode, pixels, *args, **kwargs)
            return copy.copy(self.encoded[key])  # transformers replaces fields of the output

        if not reads_tower:
            tower.forward = forward
        try:
            yield
        finally:
            tower.__dict__.pop("forward", None)


def _encode_once(encode: Any, pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Encode the first of several equal images that a Qwen tower packs, and repeat its output."""
    grid = kwargs.get("grid_thw")
    count = 1 if grid is None else len(grid)
    first = pixels[: len(pixels) // count]
    if count == 1 or not torch.equal(first.repeat(count, 1), pixels):
        return encode(pixels, *args, **kwargs)
    output = encode(first, *args, **kwargs | {"grid_thw": grid[:1]})
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            output[name] = value.repeat(count, *[1] * (value.ndim - 1))
    return output


def settings(name: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return a label and the arguments of `patch` for each setting. Selectors that were not fitted are left out."""
    for method in FREE[name]:
        yield method, {"method": method}
    for target in TARGETS:
        for question in (False, True):
            path = selector_path(folder, name, target, question)
            if path.exists():
                for diversity in DIVERSITIES:
                    label = f"learned {target}{' question' * question}, diversity {diversity:g}"
                    yield label, {"method": "learned", "selector": str(path), "diversity": diversity}


def selector_path(folder: Path, name: str, target: str, question: bool) -> Path:
    return folder / f"{name}-{target}{'-question' * question}.safetensors"


def append(record: dict[str, Any]) -> None:
    """Append a record to the raw file."""
    with RAW.open("a") as file:
        file.write(json.dumps(record) + "\n")


def fit(args: argparse.Namespace, subject: Model, console: Console) -> None:
    """Fit all requested selectors to the same observations, which are stored beside them."""
    from selector_pairs import Pairs

    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    pairs = Pairs(subject, args.model, TRAINED[args.model], args.pairs or PAIRS[args.model])
    observed = ObservedPrompts(subject.model, pairs, subject.max_new_tokens)
    store = args.out / f"{args.model}-observed.pt"
    if store.exists():
        observed.samples = torch.load(store, weights_only=False)
    targets, start = [target for target in args.targets if target != "topk"] or ["topk"], time.process_time()
    for index in range(len(pairs)):
        if time.monotonic() > end - (0.2 * 60 * args.minutes if args.enough else 0):
            break
        for target in targets:
            observed.get(index, target)
    torch.save(observed.samples, store)
    num_ready = sum(sample is None or all(target in (*sample.targets, "topk") for target in targets)
                    for sample in observed.samples.values())  # fmt: skip
    console.print(f"{num_ready} of {len(pairs)} pairs observed, {time.process_time() - start:.0f} s of CPU")
    if num_ready < len(pairs) and not args.enough:
        return
    pairs.count = num_ready
    for target, question in itertools.product(args.targets, (False, True)):
        path, start = selector_path(args.out, args.model, target, question), time.process_time()
        partial = path.with_name(f"{path.name}.partial")
        left = (end - time.monotonic()) / 60
        if (path.exists() and not partial.exists()) or left < 0.2 or (question and args.agnostic):
            continue
        epochs = args.epochs or EPOCHS[args.model][target]
        fitted = fit_learned(subject.model, observed, path, keep=KEEPS, target=target, use_question=question,
                             minutes=left, epochs=epochs)  # fmt: skip
        weights = sum(weight.numel() for weight in fitted.selector.weights.values())
        seconds, finished = time.process_time() - start, not partial.exists()
        console.print(f"{path.name}: {weights} weights, {seconds:.0f} s of CPU, finished: {finished}")
        append({"record": "fit", "model": args.model, "target": target, "question": question, "pairs": len(observed),
                "epochs": epochs, "finished": finished, "weights": weights, "seconds": round(seconds)})  # fmt: skip


def ask(args: argparse.Namespace, subject: Model, console: Console) -> None:
    """Ask the held-out questions under each setting, and append the answers to the raw file."""
    known = [json.loads(line) for line in RAW.read_text().splitlines()] if RAW.exists() else []
    done = {(row["model"], row["setting"], row["keep"]) for row in known if row["record"] == "result"}
    images, end, asker = load_images(args.model, subject), time.monotonic() + 60 * args.minutes, Asker(subject)

    if not any(row["record"] == "header" and row["model"] == args.model for row in known):
        kinds = [[find_set(args.model, e), e.kind] for examples in images for e in examples]
        append({"record": "header", "model": args.model, "trained": TRAINED[args.model], "kinds": kinds,
               "environment": subject.environment()})  # fmt: skip
    for keep in args.keep:
        for label, patch in [("unpatched", {}), *settings(args.model, args.out)]:
            share = keep if patch else 1.0
            if args.only and not label.startswith(tuple(args.only)):
                continue
            if (args.model, label, share) in done:
                continue
            if time.monotonic() > end:
                console.print("time is up")
                return
            torch.manual_seed(0)
            options = dict(patch)
            method = tokenprune.method(options.pop("method"), **options) if patch else None
            changes_pixels = method is not None and method.site is Site.PRE_ENCODER
            pruned = nullcontext() if method is None else tokenprune.patched(
                subject.model, method, keep=keep, guard="off", processor=subject.processor if changes_pixels else None
            )  # fmt: skip
            with asker.keep_encoded(changes_pixels or bool(method and method.needs)), pruned:
                right = asker.answer(args.model, images, changes_pixels)
            done.add((args.model, label, share))
            append({"record": "result", "model": args.model, "setting": label, "keep": share, "right": right})
            shown = ", ".join(f"{part} {100 * text.count('1') / len(text):.1f}" for part, text in right.items())
            console.print(f"{label} at {share:g}: {shown}")


def measure_time(args: argparse.Namespace, subject: Model, console: Console) -> None:
    """Measure the time of the choice of one image, in turn with divprune, and append the median ratios."""
    example = load_heldout(folder=subject.heldout)[0]
    image = example.image.resize((448, 448)) if args.model == "demo_qwen" else example.image
    inputs = subject.inputs([image], [example.question])
    methods: dict[str, Any] = {"divprune": tokenprune.method("divprune"), "cdpruner": tokenprune.method("cdpruner")}
    for question, diversity in itertools.product((False, True), DIVERSITIES[:2]):
        path = selector_path(args.out, args.model, "attention", question)
        if path.exists():
            method = tokenprune.method("learned", selector=str(path), diversity=diversity)
            methods[f"learned{' question' * question}, diversity {diversity:g}"] = method
    tokens: list[Any] = []

    @tokenprune.register("catcher", site="PRE_LLM")
    @dataclass(frozen=True)
    class Catcher(tokenprune.Pruner):
        """Catch the visual tokens of a call."""

        def select(self, view: Any) -> tokenprune.Selection:
            tokens.append(view)
            return tokenprune.Selection.top(view.hidden[..., 0], view)

    with tokenprune.patched(subject.model, Catcher(), keep=0.11), torch.inference_mode():
        subject.model(**inputs)
        caught, times = tokens[0], {name: [] for name in methods}
        for _ in range(200):
            for name, method in methods.items():
                start = time.process_time()
                method.select(caught)
                times[name].append(time.process_time() - start)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    ratios = {name: round(value / medians["divprune"], 2) for name, value in medians.items()}
    record = {"record": "time", "model": args.model, "tokens": caught.counts[0], "keep": 0.11, "ratios": ratios,
              "milliseconds": round(1000 * medians["divprune"], 3), "load": round(os.getloadavg()[0], 2)}  # fmt: skip
    append(record)
    console.print(record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fit", "ask", "time", "page"))
    parser.add_argument("--model", choices=tuple(TRAINED), default="demo_qwen")
    parser.add_argument("--targets", choices=TARGETS, nargs="*", default=TARGETS)
    parser.add_argument("--agnostic", action="store_true", help="fit without the question only")
    parser.add_argument("--enough", action="store_true", help="fit to the pairs that were observed so far")
    parser.add_argument("--only", nargs="*", help="ask settings with one of these prefixes")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--keep", type=float, nargs="*", default=KEEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/learned"))
    args = parser.parse_args()
    if args.command == "page":
        from selector_page import write_page

        write_page(RAW)
        return
    run = {"fit": fit, "ask": ask, "time": measure_time}[args.command]
    run(args, load_model(args.model, device="cpu"), Console(width=160))


if __name__ == "__main__":
    main()
