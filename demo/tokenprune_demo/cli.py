# SPDX-License-Identifier: Apache-2.0
"""`tokenprune demo`: a few questions before and after pruning."""

from __future__ import annotations

from tokenprune.cli.common import DeviceOption, ModelOption, ThreadsOption, get_console, load_model, show_progress


def demo(model: ModelOption = None, device: DeviceOption = None, threads: ThreadsOption = None) -> None:
    """Ask four held-out questions before and after pruning."""
    from rich.text import Text

    from tokenprune.profiling.table import to_rich
    from tokenprune_demo.demo import KEEP, run

    subject = load_model(model, device, threads)
    console = get_console()
    with show_progress(lines=False) as step:
        tables = run(subject, step)
    for table in tables:
        console.print(to_rich(table))
        for note in table.notes:
            console.print(Text(note, style="dim"))
    console.print(f"Draw what a method keeps: tokenprune show IMAGE --methods dart,divprune --keep {KEEP}")
