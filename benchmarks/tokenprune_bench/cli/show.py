# SPDX-License-Identifier: Apache-2.0
"""`tokenprune show`: draw the tokens that methods keep."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenprune.cli.common import METHODS_HELP, ModelOption, get_console, read_keeps, read_specs, say
from tokenprune.cli.completion import complete_methods
from tokenprune.cli.table import Cell, Table
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.selection.files import check_output
from tokenprune_bench.cli.common import (
    QUESTION,
    DetailsOption,
    DeviceOption,
    MostOption,
    ThreadsOption,
    load_model,
    print_one_table,
    show_progress,
)

if TYPE_CHECKING:
    from tokenprune_bench.show.side_by_side import Shown

MAX_ROWS, MAX_ANSWER = 9, 160  # settings and characters of an answer that are printed without --details


def show(
    files: Annotated[
        list[Path],
        typer.Argument(help="An image; or the frames of a video: a GIF, a video (with PyAV), a folder, files."),
    ],
    methods: Annotated[
        str,
        typer.Option("--methods", "--method", help=f"{METHODS_HELP}.", autocompletion=complete_methods),
    ] = DEFAULT_METHOD,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Share of the visual tokens, or a whole number of them; default: 0.25. With --gif keep: several, with "
            "commas between them."
        ),
    ] = None,
    question: Annotated[str, typer.Option(help="Question about the image. Some methods select by it.")] = QUESTION,
    scores: Annotated[
        bool, typer.Option("--scores", help="Draw a map of scores, too, of methods that rank tokens by one.")
    ] = False,
    gif: Annotated[
        str | None, typer.Option(help="Write a GIF that moves over keep (1.0 to 0.1), or over the frames of a video.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: tokenprune.png, or tokenprune.gif.")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Frames of a video to take, evenly chosen.")] = 8,
    max_visual_tokens: MostOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    details: DetailsOption = False,
) -> None:
    """Draw the patches of an image or a video that methods keep.

    Kept patches are outlined, dropped patches are dark and hatched, and merged patches share one color. The answers are
    printed below.
    """
    from tokenprune_bench.profiling.media import read_frames
    from tokenprune_bench.profiling.patched import has_limit
    from tokenprune_bench.show import animation, contact_sheet, layout, side_by_side

    settings = [replace(setting, max_visual_tokens=max_visual_tokens) for setting in read_specs(methods)]
    if not settings:
        raise OptionError("--methods names none: see `tokenprune methods`")
    keeps = read_keeps(keep or (animation.KEEPS if gif == animation.KEEP else "0.25"), single=gif is None)
    requested = [setting.with_keep(share) for share in keeps for setting in settings]
    for setting in requested:
        setting.validate().steps()
    # With a budget, JPEG files are decoded at the scale that the processor needs.
    find_largest = layout.find_largest if all(map(has_limit, requested)) else None
    read = partial(read_frames, files, find_largest=find_largest)
    num_frames = len(read(min(2, frames)))  # raises for unreadable files before the model is loaded
    if gif is not None:
        animation.check_kind(gif, keeps, num_frames)
    out = out or Path("tokenprune.png" if gif is None else "tokenprune.gif")
    _check_out(out, gif is not None)
    subject = load_model(model, device, threads, suffix="")
    images, left_out = contact_sheet.fit_frames(subject, read, frames, question, requested[0])
    with show_progress(lines=False) as step:
        shown = side_by_side.show(subject, images, question, requested, scores, step)
    if gif is not None:
        animation.save(animation.build_stills(shown, gif, len(settings)), out)
    else:
        try:
            shown.image().save(out)
        except (OSError, ValueError) as error:
            raise TokenPruneError(f"cannot write {out}: {error}") from error
    console = get_console()
    for line in (left_out, *shown.notes, subject.describe_limits(files)):
        if line:
            say(line)
    _print_answers(shown, question, details)
    console.print(f"written: {out}", markup=False, soft_wrap=True)


def _print_answers(shown: Shown, question: str, details: bool) -> None:
    """Print a table of answers and visual tokens, with `details` also of all rows and the counts of each frame."""
    rows = [("unpatched", str(shown.tokens), str(shown.tokens), shown.before)]
    for view, panel in zip(shown.seen, shown.kept_panels, strict=True):
        assert view.stats is not None  # a patched model has some
        counts = f"{shown.tokens} → {int(view.kept.sum())}"
        rows.append((panel.title, counts, f"{view.stats.visual_tokens_average:.0f}", view.answer))
    printed = rows if details else rows[: MAX_ROWS + 1]
    columns = ("setting", "visual\ntokens", "layer\naverage", "answer")
    cells = [[*map(Cell, (*counts, _shorten(answer, details)))] for *counts, answer in printed]
    print_one_table(Table(question, columns, cells, last_left=True))
    if len(rows) > len(printed):
        say(f"{len(rows) - len(printed)} more settings: pass --details.")
    for view, panel in zip(shown.seen, shown.kept_panels, strict=True):
        if details and len(view.frames) > 1:
            counts = " ".join(f"{kept}/{total}" for kept, total in view.count_kept())
            say(f"{panel.title}, of each frame as the model has it: {counts}")


def _shorten(answer: str, details: bool) -> str:
    text = " ".join(answer.split())
    return text if details or len(text) <= MAX_ANSWER else f"{text[:MAX_ANSWER]} …"


def _check_out(out: Path, animated: bool) -> None:
    """Raise OptionError if the file cannot be written or its name has no image extension."""
    from PIL import Image

    Image.init()
    if animated and out.suffix.lower() != ".gif":
        raise OptionError(f"--gif writes a GIF: give --out {out} a name that ends in .gif")
    if Image.EXTENSION.get(out.suffix.lower()) not in Image.SAVE:
        raise OptionError(f"--out {out} is called like no image: give it a name that ends in .png, for example")
    check_output(out)
