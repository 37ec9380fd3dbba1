# SPDX-License-Identifier: Apache-2.0
"""`tokenprune profile`: where the time of one call goes, and what each site can save at most."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenprune.cli.common import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    SuffixOption,
    ThreadsOption,
    get_console,
    load_config,
    load_model,
    read_keeps,
    read_stack,
    show_progress,
)
from tokenprune.cli.completion import complete_methods
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.startup import defer_torch

if TYPE_CHECKING:
    from tokenprune.bench.table import Table

_QUESTION = "what is shown?"


def profile(
    image: Annotated[
        list[Path] | None, typer.Option(help="An image; repeat it for several. Default: the largest held-out one.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="What is asked of it; some methods choose by it.")] = None,
    method: Annotated[
        str,
        typer.Option(
            "--methods",
            "--method",
            autocompletion=complete_methods,
            help="A name out of `tokenprune methods`, or a stack: divprune+fastv:layer=3. Default: none.",
        ),
    ] = "",
    keep: Annotated[
        str, typer.Option(help="Share of the visual tokens, or a whole number of them; one, or one for each method.")
    ] = "0.25",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each side.")] = 7,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each run makes.")] = 9,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Load no weights: closed forms from the model's config alone.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(help="With --config-only: visual tokens of an image of any size; default: 1024.")
    ] = None,
    tiles: Annotated[
        int | None, typer.Option(help="With --config-only: views that an image is cut into; default: 1.")
    ] = None,
    text: Annotated[int, typer.Option(min=0, help="With --config-only: tokens of text.")] = 64,
    html: Annotated[Path | None, typer.Option(help="Write a page with the bars, which loads nothing else.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all runs as JSON.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    suffix: SuffixOption = None,
) -> None:
    """Show where the time of one call goes (processor, tower, choosing, prefill, decoding), before and after a method,
    and the most that each site can save."""
    if config_only:
        defer_torch()
    keeps, setting = read_keeps(keep), read_stack(method, keep)
    if not all(isinstance(one, int) or 0 < one <= 1 for one in keeps):
        raise OptionError(f"--keep {keep!r}: a share lies in (0, 1]")
    if not config_only and (tokens is not None or tiles is not None):
        raise OptionError("--tokens and --tiles go with --config-only: without it the image tells")
    for path in filter(None, (html, json_file)):
        if not path.parent.is_dir():
            raise TokenPruneError(f"cannot write {path}: there is no folder {path.parent}")
    if config_only:
        if html is not None or json_file is not None:
            raise OptionError("--html and --json write measured times, and --config-only measures none")
        _from_config(model, setting, keeps, tokens, tiles, text)
        return
    from PIL import Image

    from tokenprune.bench.profile_tables import limit_table, stage_table
    from tokenprune.bench.profiling import profile_call
    from tokenprune.calibration.images import read_image

    images: list[Image.Image] = [read_image(path) for path in image or ()]
    subject = load_model(model, device, threads, dtype, suffix)
    if not images:
        from tokenprune.bench.heldout import load_heldout

        largest = max(load_heldout(folder=subject.heldout), key=lambda one: one.image.width * one.image.height)
        images, question = [largest.image], question or largest.question
    with show_progress(lines=False) as step:
        made = profile_call(
            subject, images, question or _QUESTION, setting, repeats=repeats, new_tokens=max_new_tokens, step=step
        )
    share = _share(keeps, _number(setting), made.load.visual)
    for table in (stage_table(made), limit_table(made.model, made.load, share)):
        _print(table)
    if html is not None:
        from tokenprune.bench.report.flame import profile_page

        _write(html, profile_page(made, share))
    if json_file is not None:
        _write(json_file, json.dumps(made.as_dict(), indent=1, ensure_ascii=False) + "\n")


def _from_config(
    model: str | None,
    setting: dict[str, Any] | None,
    keeps: Sequence[float | int],
    tokens: int | None,
    tiles: int | None,
    text: int,
) -> None:
    from tokenprune.bench.profile_tables import limit_table
    from tokenprune.config import Config
    from tokenprune.cost_model import CostModel, Load

    config = load_config(model)
    closed = CostModel.from_config(config)
    load = Load.of_config(config, tokens=tokens, tiles=tiles, text=text)
    title = f"What each site can save at most: {model or 'demo_vlm'}"
    methods, budgets = ([], []) if setting is None else Config(setting).steps()
    _print(limit_table(closed, load, _share(keeps, len(methods), load.visual), title))
    if setting is not None:
        ratio = closed.cost(load).flops / closed.predict(load, methods, budgets).flops
        names = " + ".join(one.name for one in methods)
        get_console().print(f"{names}: x{ratio:.2f} by FLOPs of tower and decoder", markup=False, soft_wrap=True)


def _number(setting: dict[str, Any] | None) -> int:
    """Return how many methods a setting has."""
    return len(setting["method"]) if setting and isinstance(setting["method"], list) else int(setting is not None)


def _share(keeps: Sequence[float | int], methods: int, visual: int) -> float:
    """Return what `methods` methods with these keeps leave together, as a share of an image's tokens."""
    shares = [min(1.0, keep / max(1, visual)) if isinstance(keep, int) else keep for keep in keeps]
    return math.prod(shares) if shares[1:] else shares[0] ** max(1, methods)


def _print(table: Table) -> None:
    from rich.text import Text

    from tokenprune.bench.table import to_rich

    shown = to_rich(table)
    if table.columns[0] == "site":
        shown.columns[-1].justify = "left"
    get_console().print(shown)
    for note in table.notes:
        get_console().print(Text(note, style="dim"), soft_wrap=True)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
    get_console(error=True).print(f"written: {path}", markup=False, soft_wrap=True)
