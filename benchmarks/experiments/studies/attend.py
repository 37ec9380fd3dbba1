# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy of session answers that read a part of the cache: `ask(attend=)` on demo_smol's questions.

    python benchmarks/experiments/studies/attend.py    # about 10 minutes on one thread; no times are measured

A session sees an image of 576 tokens. It is asked the questions with answers of three or more tokens, once at each
share. `same` compares with the answers from the full cache. `drawn` reads random tokens instead of the most attended.
The first answer token reads the full cache at any share. The raw file is results/attend.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import calm_threads  # noqa: F401
import torch
from common import RESULTS, code_version, header
from rich.table import Table
from rows import write

import tokenprune
from tokenprune.cli.common import get_console
from tokenprune.integrations.hf.sessions.policies.most_attended import MostAttended
from tokenprune_bench.metrics import ending
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.significance import wilson
from tokenprune_bench.suite import Bench, BenchPlan

SHARES = (1.0, 0.25, 0.11, 0.03, 0.01)


@contextmanager
def read_random_entries() -> Iterator[None]:
    """Let answers read random entries instead of the most attended ones."""
    draw = torch.Generator().manual_seed(0)

    def select(policy: Any, view: tokenprune.sessions.PolicyView, keep: int) -> torch.Tensor:
        return torch.randperm(view.count, generator=draw)[:keep].sort().values

    with patch.object(MostAttended, "select", select):
        yield


def bits(flags: list[bool]) -> str:
    """Return a string with one 0 or 1 per answer."""
    return "".join(str(int(flag)) for flag in flags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=36)
    parser.add_argument("--json", type=Path, default=RESULTS / "attend.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    subject = load_model("demo_smol", device="cpu")
    examples = Bench(subject, BenchPlan(("divprune",), images=args.images)).examples
    ways = [(share, mode) for share in SHARES for mode in ("attended", "drawn")[: 1 if share == 1 else 2]]
    right: dict[Any, list[bool]] = {way: [] for way in ways}
    same: dict[Any, list[bool]] = {way: [] for way in ways}
    for _, image_examples in groupby(examples, key=lambda example: example.path):
        questions = list(image_examples)
        session = tokenprune.sessions.session(subject.model, subject.processor, memory=4096).see([questions[0].image])
        for example in questions:
            unpruned = session.ask(example.question, max_new_tokens=32, return_dict=True)
            if len(unpruned.ids) < 4:  # including the end token
                continue
            for way in ways:
                with read_random_entries() if way[1] == "drawn" else nullcontext():
                    answer = session.ask(example.question, attend=way[0], max_new_tokens=32)
                right[way].append(ending(answer.rstrip("."), example.answer) == 1)
                same[way].append(answer == unpruned.text)
    records: list[dict[str, Any]] = []
    table = Table(title=f"{len(right[ways[0]])} questions")
    for column in ("share read", "chosen by", "right", "95 %", "same"):
        table.add_column(column)
    for (share, mode), flags in right.items():
        low, high = wilson(sum(flags), len(flags))
        answers = {"right": bits(flags), "same": bits(same[share, mode])}
        records.append({"record": "attend", "attend": share, "how": mode, **answers})
        same_share = sum(same[share, mode]) / len(flags)
        table.add_row(
            f"{share:g}", mode, f"{sum(flags) / len(flags):.1%}", f"{low:.1%} to {high:.1%}", f"{same_share:.1%}"
        )
    get_console().print(table)
    about = header(torch.device("cpu"), code=code_version(), model="demo_smol", images=args.images)
    write(args.json, [about, *records])


if __name__ == "__main__":
    main()
