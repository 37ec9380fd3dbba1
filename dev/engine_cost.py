# SPDX-License-Identifier: Apache-2.0
"""Compare the cost of patching in two commits: CPU time of a prefill of the shipped model, and Python calls in it.

python dev/engine_cost.py --old CHECKOUT [--new CHECKOUT]    # default of --new: the checkout of this file

Each checkout runs in a separate process with one thread. The processes alternate (A B B A ...). A round is a few
prefills of one question, patched and unpatched. The script prints the median ratio of patched to unpatched rounds,
the shortest patched round and the number of calls, which depends on neither load nor machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

METHODS = ("divprune", "dart", "fastv")
KEEP = 0.25
PREFILLS = 4  # of each kind in a round


class Worker:
    """A process that imports tokenprune from one checkout and measures on request."""

    def __init__(self, checkout: Path, model: str) -> None:
        self.checkout = checkout
        paths = [str(path) for path in (checkout, checkout / "demo", checkout / "benchmarks") if path.is_dir()]
        settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--worker", str(checkout), "--model", model],
            env={**os.environ, **settings, "PYTHONHASHSEED": "0"},  # sets in one order: as many calls each time
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **question: str) -> dict[str, float]:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"the process of {self.checkout} ended with {self.process.wait()}; its words are above")
        return json.loads(answer)


def work(checkout: Path, name: str) -> None:
    """Answer the questions on stdin, a line each, until it is closed."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch
    import transformers
    from PIL import Image

    import tokenprune

    if not Path(tokenprune.__file__).is_relative_to(checkout):
        sys.exit(f"tokenprune comes from {tokenprune.__file__}, not from {checkout}")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    folder = sorted(checkout.glob(f"[!.]*/**/{name}/model.safetensors"))[-1].parent
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    drawn = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(0)).mul(255).byte()
    image = {"type": "image", "image": Image.fromarray(drawn.permute(1, 2, 0).numpy())}
    chat = [{"role": "user", "content": [image, {"type": "text", "text": "what color is the circle?"}]}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, **options)

    @torch.no_grad()
    def prefill() -> None:
        model(**inputs, use_cache=True, logits_to_keep=1)

    def timed() -> float:
        """Return the CPU milliseconds of a prefill, the median of a few."""
        gc.collect()
        times = []
        for _ in range(PREFILLS):
            begin = time.process_time()
            prefill()
            times.append(1000 * (time.process_time() - begin))
        return statistics.median(times)

    def calls() -> int:
        """Return the number of calls of Python functions in a prefill."""
        count = 0

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        gc.collect()  # calls of finalizers come when they will
        gc.disable()
        sys.setprofile(note)
        prefill()
        sys.setprofile(None)
        gc.enable()
        return count

    for question in map(json.loads, sys.stdin):
        measure = calls if question["what"] == "calls" else timed
        prefill()  # warms up
        before = measure()
        with tokenprune.patched(model, question["method"], keep=KEEP):
            prefill()
            patched = measure()
        print(json.dumps({"unpatched": before, "patched": patched}), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--model", default="demo_vlm", help="folder of a shipped model: demo_vlm or demo_qwen")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker or not asked.old:
        return work(asked.worker, asked.model) if asked.worker else parser.error("--old CHECKOUT is missing")
    old, new = workers = [Worker(checkout.resolve(), asked.model) for checkout in (asked.old, asked.new)]
    print(f"{asked.model}, keep={KEEP}, batch of 1, {asked.rounds} rounds; CPU ms, ratios with p20 to p80")
    print(f"{'':15}{'unpatched':>10}{'patched':>9}{'least':>8}{'ratio':>8}{'':16}{'calls':>7}{'unpatched':>11}")
    for method in METHODS:
        rounds_by_worker: dict[Worker, list[dict[str, float]]] = {old: [], new: []}
        for round_index in range(asked.rounds):
            for worker in workers if round_index % 2 == 0 else workers[::-1]:
                rounds_by_worker[worker].append(worker.ask(what="time", method=method))
        figures = []
        for worker, rounds in rounds_by_worker.items():
            calls = worker.ask(what="calls", method=method)
            before, patched = ([values[kind] for values in rounds] for kind in calls)
            ratios = [b / a for a, b in zip(before, patched, strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=5)
            middle, least = statistics.median, min(patched)
            figures.append((middle(before), middle(patched), least, middle(ratios), *list(calls.values())[::-1]))
            row = "{:10.2f}{:9.2f}{:8.2f}{:8.3f}" + f" ({low:.3f}-{high:.3f}) " + "{:7}{:11}"
            print(f"{method:10}{'old' if worker is old else 'new':5}" + row.format(*figures[-1]), flush=True)
        last = "{:10.3f}{:9.3f}{:8.3f}{:8.3f}" + " " * 16 + "{:7.3f}{:11.3f}"
        print(f"{'':5}new / old " + last.format(*(b / a for a, b in zip(*figures, strict=True))), flush=True)
    for worker in workers:
        worker.process.communicate()  # closes stdin, which ends it


if __name__ == "__main__":
    main()
