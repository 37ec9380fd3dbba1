# SPDX-License-Identifier: Apache-2.0
"""Find the layer until which demo_smol's decoder reads the image: drop all visual tokens at one layer (`vtw`).

    python benchmarks/experiments/studies/late_layers.py    # 15 minutes on one core; continues an existing file

Methods that keep few tokens in late layers rank lower here than in papers. If this decoder still reads the image there,
dropping it late changes answers. If answers stay right, there is another reason. The raw file is
results/late_layers.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import calm_threads  # noqa: F401
import torch
from rich.table import Table

from tokenprune.cli.common import get_console
from tokenprune.settings import Setting
from tokenprune_bench.backend import get_backend
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines
from tokenprune_bench.metrics import get_metric
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.significance import wilson
from tokenprune_demo.heldout import load_heldout

OUT = Path(__file__).parents[2] / "results/late_layers.jsonl"
LAYERS = (30, 28, 26, 23, 20, 15)  # the image is dropped at the input of these layers; 30: never
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--every", type=int, default=8, help="use every n-th held-out image only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    subject = load_model("demo_smol", device="cpu", dtype="bfloat16")
    backend, metric = get_backend(subject), get_metric(subject.metric)
    examples = [example for example in load_heldout(folder=subject.heldout) if example.index % args.every == 0]
    stored = read_lines(args.out)
    known = {(record["layer"], record["every"]) for record, _ in stored}
    table = Table("visual tokens dropped at layer", "questions", "right, %")
    with JsonLinesWriter(args.out, stored[-1][1] if stored else 0) as lines:
        for layer in LAYERS:
            if (layer, args.every) in known:
                continue
            setting = None if layer == LAYERS[0] else Setting.from_json({"method": "vtw", "keep": layer / LAYERS[0]})
            answers: list[str] = []
            with backend.answering(setting) as answer:
                for first in range(0, len(examples), BATCH):
                    answers += answer(first, examples[first : first + BATCH])[0]
            scores = metric.score(answers, [example.answers for example in examples])
            right = "".join(str(int(score >= 1)) for score in scores)
            lines.write(
                {"record": "result", "layer": layer, "every": args.every, "weights": subject.weights, "right": right}
            )
    for record in (record for record, _ in read_lines(args.out) if record["every"] == args.every):
        right = record["right"]
        share, (low, high) = right.count("1") / len(right), wilson(right.count("1"), len(right))
        table.add_row(f"{record['layer']}", f"{len(right)}", f"{100 * share:.1f} [{100 * low:.0f}, {100 * high:.0f}]")
    get_console().print(table)


if __name__ == "__main__":
    main()
