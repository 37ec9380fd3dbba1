# SPDX-License-Identifier: Apache-2.0
"""`tokenprune demo`: a few questions before and after pruning."""

from __future__ import annotations

from tokenprune.cli.common import ModelOption, say
from tokenprune.cli.output import print_table
from tokenprune_bench.cli.common import DeviceOption, ThreadsOption, load_model, show_progress


def demo(model: ModelOption = None, device: DeviceOption = None, threads: ThreadsOption = None) -> None:
    """Ask four held-out questions before and after pruning."""
    from tokenprune_bench.demo import KEEP, run

    subject = load_model(model, device, threads)
    with show_progress(lines=False) as step:
        tables = run(subject, step)
    for table in tables:
        print_table(table)
    say(f"Draw what a method keeps: tokenprune show IMAGE --methods divprune,pool --keep {KEEP}")
