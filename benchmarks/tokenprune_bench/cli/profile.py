# SPDX-License-Identifier: Apache-2.0
"""`tokenprune profile`: where the time of one call goes, and what each site can save at most."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenprune.cli.common import METHODS_HELP, ModelOption, load_config, read_keeps, read_settings, say
from tokenprune.cli.completion import complete_methods
from tokenprune.cli.output import print_table, write_file
from tokenprune.errors import OptionError, require
from tokenprune.models.torch_import import defer_torch
from tokenprune.selection.files import check_output
from tokenprune_bench.cli.common import (
    QUESTION,
    DeviceOption,
    DtypeOption,
    MostOption,
    SuffixOption,
    ThreadsOption,
    load_model,
    show_progress,
)

if TYPE_CHECKING:
    from tokenprune.cli.table import Table
    from tokenprune.settings import Setting


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
            help=f"{METHODS_HELP}; each has a table. Default: none.",
        ),
    ] = "",
    keep: Annotated[
        str,
        typer.Option(
            help="Comma-separated: shares of the visual tokens, or whole numbers of them; 0.5+0.25: one for each "
            "method of a stack."
        ),
    ] = "0.25",
    max_visual_tokens: MostOption = None,
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
    settings = read_settings(method, keep, max_visual_tokens)
    stacked = "+" in keep and not settings
    keeps = read_keeps(keep.replace("+", ","))
    if stacked or not all(isinstance(one, int) or 0 < one <= 1 for one in keeps):
        hint = "keeps with plus signs between them are of a stack" if stacked else "a share lies in (0, 1]"
        raise OptionError(f"--keep {keep!r}: {hint}")
    if len(settings) > 1 and (html is not None or json_file is not None):
        raise OptionError(f"--html and --json write one setting, and these are {len(settings)}: name one")
    if not config_only and (tokens is not None or tiles is not None):
        raise OptionError("--tokens and --tiles go with --config-only: without it the image tells")
    check_output(html, json_file)
    if config_only:
        if html is not None or json_file is not None:
            raise OptionError("--html and --json write measured times, and --config-only measures none")
        _from_config(model, settings, keeps, tokens, tiles, text)
        return
    from PIL import Image

    from tokenprune_bench.calibration.images import read_image
    from tokenprune_bench.profiling.media import Source, is_animated
    from tokenprune_bench.profiling.profile import profile_call
    from tokenprune_bench.profiling.profile_tables import build_limit_table, build_stage_table

    images: list[Image.Image] = [read_image(path) for path in image or ()]
    for path in image or ():
        if is_animated(Source(str(path), 0, lambda path=path: path)):
            say(f"note: {path} is animated and is read as its first frame", error=True)
    subject = load_model(model, device, threads, dtype, suffix)
    if not images:
        load_heldout = require("tokenprune_demo.heldout", "name an --image, or install held-out ones").load_heldout
        largest = max(load_heldout(folder=subject.heldout), key=lambda one: one.image.width * one.image.height)
        images, question = [largest.image], question or largest.question
    printed: set[str] = set()
    with show_progress(lines=False) as step:
        for place, setting in enumerate(settings or [None]):
            made = profile_call(
                subject,
                images,
                question or QUESTION,
                setting,
                repeats=repeats,
                new_tokens=max_new_tokens,
                step=partial(_of_several, step, place, max(1, len(settings))),
            )
            print_table(build_stage_table(made))
            shares = _shares(setting, keeps, made.visual_tokens_per_image)
            for share in shares:
                _once(printed, build_limit_table(made.model, made.load, share))
    if image and (said := subject.describe_limits(image)):
        say(said)
    if html is not None:
        profile_page = require("tokenprune_bench.report.flame", "--html needs another package").profile_page

        write_file(html, profile_page(made, shares[0]))
    if json_file is not None:
        write_file(json_file, json.dumps(made.as_dict(), indent=1, ensure_ascii=False) + "\n")


def _of_several(step: Callable[[str, int, int], None], place: int, number: int, label: str, done: int, of: int) -> None:
    """Say how far all profiles are. place: of the one that is made, of `number`."""
    step(label, place * of + done, number * of)


def _from_config(
    model: str | None,
    settings: Sequence[Setting],
    keeps: Sequence[float | int],
    tokens: int | None,
    tiles: int | None,
    text: int,
) -> None:
    from tokenprune.settings.cost import CostModel, Load
    from tokenprune_bench.profiling.kept_tokens import describe_cuts
    from tokenprune_bench.profiling.profile_tables import build_limit_table

    config = load_config(model)
    closed = CostModel.from_config(config)
    load = Load.from_config(config, tokens=tokens, tiles=tiles, text=text)
    title = f"Maximum saving per site: {model or 'demo_vlm'}"
    printed: set[str] = set()
    for setting in settings or (None,):
        for share in _shares(setting, keeps, load.visual):
            _once(printed, build_limit_table(closed, load, share, title))
        if setting is not None:
            methods, budgets = setting.steps()
            ratio = closed.compute_cost(load).flops / closed.predict(load, methods, budgets).flops
            names = " + ".join(one.name for one in methods)
            said = (
                f"{names}: x{ratio:.2f} by FLOPs of tower and decoder; {describe_cuts(methods, budgets, load.visual)}"
            )
            say(said)


def _shares(setting: Setting | None, keeps: Sequence[float | int], visual: float) -> list[float]:
    """Return what a setting leaves of an image's tokens; without one, what each keep alone would leave."""
    from tokenprune.budgets import Budget
    from tokenprune_bench.profiling.kept_tokens import compute_kept_share

    if setting is not None:
        return [compute_kept_share(setting.budgets, visual)]
    return [compute_kept_share([Budget.from_keep(keep)], visual) for keep in keeps]


def _once(printed: set[str], table: Table) -> None:
    """Print a table unless one with the same heads was printed."""
    if table.columns[1] not in printed:
        printed.add(table.columns[1])
        print_table(table)
