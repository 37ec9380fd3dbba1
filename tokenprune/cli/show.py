# SPDX-License-Identifier: Apache-2.0
"""`tokenprune show` and `demo`: see what a method does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import DeviceOption, ModelOption, ThreadsOption, get_console, load_model, read_keeps
from tokenprune.errors import TokenPruneError


def demo(model: ModelOption = None, device: DeviceOption = None, threads: ThreadsOption = None) -> None:
    """Ask four held-out questions before and after pruning."""
    from rich.text import Text

    from tokenprune.bench.demo import KEEP, run
    from tokenprune.bench.tables import to_rich

    subject = load_model(model, device, threads)
    console = get_console()
    for table in run(subject):
        console.print(to_rich(table))
        for note in table.notes:
            console.print(Text(note, style="dim"))
    console.print(f"Draw what a method keeps: tokenprune show IMAGE --method dart --keep {KEEP}")


def show(
    files: Annotated[
        list[Path],
        typer.Argument(help="An image; or the frames of a video: a GIF, a video (with PyAV), a folder, files."),
    ],
    method: Annotated[str, typer.Option(help="A name out of `tokenprune methods`.")] = "dart",
    keep: Annotated[str, typer.Option(help="Share of the visual tokens, or a whole number of them.")] = "0.25",
    question: Annotated[str, typer.Option(help="Some methods choose by it.")] = "what color is the circle?",
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("tokenprune.png"),
    frames: Annotated[int, typer.Option(min=1, help="Frames of a video to take, evenly chosen.")] = 8,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Draw which patches of an image, or of frames, a method keeps (clear), drops (dark) and merges (one colour)."""
    from tokenprune.bench import contact_sheet
    from tokenprune.bench.media import read_frames
    from tokenprune.registry import method_class

    method_class(method)
    (share,) = read_keeps(keep, one=True)
    read_frames(files, 1)  # a file that cannot be read is said before the model is loaded
    subject = load_model(model, device, threads, suffix="")
    images, left_out = contact_sheet.fitting(subject, partial(read_frames, files), frames, question, method)
    shown = contact_sheet.show(subject, images, question, method, share)
    try:
        shown.image.save(out)
    except (OSError, ValueError) as error:
        raise TokenPruneError(f"cannot write {out}: {error}") from error
    console = get_console()
    if left_out:
        console.print(left_out, markup=False)
    console.print(f"{question}  unpatched: {shown.before!r}  {method} {share:g}: {shown.after!r}", markup=False)
    average = shown.stats.visual_tokens_average
    counts = f"{shown.tokens_in} → {shown.tokens_out}"
    console.print(f"visual tokens: {counts}, {average:.0f} on average over the decoder's layers")
    if len(shown.frames) > 1:
        told = " ".join(f"{kept}/{of}" for kept, of in shown.frames)
        console.print(f"of each frame as the model has it: {told}", markup=False)
    console.print(f"written: {out}", markup=False, soft_wrap=True)
