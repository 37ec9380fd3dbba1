# SPDX-License-Identifier: Apache-2.0
"""`tokenprune profile`: time per stage of one call, and the maximum saving of each site."""

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
    DetailsOption,
    DeviceOption,
    DtypeOption,
    MostOption,
    SuffixOption,
    ThreadsOption,
    load_model,
    print_one_table,
    show_progress,
)
from tokenprune_bench.recommend.advice import PROCESSOR_LIMIT, describe_limit

if TYPE_CHECKING:
    from tokenprune.cli.table import Table
    from tokenprune.settings import Setting


def profile(
    image: Annotated[
        list[Path] | None, typer.Option(help="Image file. Repeat for several. Default: the largest held-out image.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Question about the image. Some methods select by it.")] = None,
    method: Annotated[
        str,
        typer.Option(
            "--methods",
            "--method",
            autocompletion=complete_methods,
            help=f"{METHODS_HELP}. One table per method. Default: none.",
        ),
    ] = "",
    keep: Annotated[
        str,
        typer.Option(
            help="Comma-separated shares or numbers of visual tokens. 0.5+0.25: one keep per method of a stack."
        ),
    ] = "0.25",
    details: DetailsOption = False,
    max_visual_tokens: MostOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, unpatched and patched.")] = 7,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Generated tokens per run.")] = 9,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Print closed forms from the config without loading weights.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(help="With --config-only: visual tokens per image. Default: 1024.")
    ] = None,
    tiles: Annotated[int | None, typer.Option(help="With --config-only: tiles per image. Default: 1.")] = None,
    text: Annotated[int, typer.Option(min=0, help="With --config-only: text tokens.")] = 64,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all runs as JSON.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    suffix: SuffixOption = None,
) -> None:
    """Time the stages of a call, with and without pruning."""
    if config_only:
        defer_torch()
    settings = read_settings(method, keep, max_visual_tokens)
    is_stack = "+" in keep and not settings
    keeps = read_keeps(keep.replace("+", ","))
    if is_stack or not all(isinstance(share, int) or 0 < share <= 1 for share in keeps):
        hint = "a keep with plus signs needs a stack in --methods" if is_stack else "pass a share in (0, 1]"
        raise OptionError(f"--keep {keep!r}: {hint}")
    if len(settings) > 1 and (html is not None or json_file is not None):
        raise OptionError(f"--html and --json write one setting, but --methods has {len(settings)}. Pass one method.")
    if not config_only and (tokens is not None or tiles is not None):
        raise OptionError("--tokens and --tiles need --config-only. Without it the image determines both.")
    check_output(html, json_file)
    if config_only:
        if html is not None or json_file is not None:
            raise OptionError("--html and --json need measured times. Leave out --config-only.")
        _print_closed_forms(model, settings, keeps, tokens, tiles, text, details)
        return
    from PIL import Image

    from tokenprune_bench.calibration.images import read_image
    from tokenprune_bench.profiling.media import Source, is_animated
    from tokenprune_bench.profiling.profile import profile_call
    from tokenprune_bench.profiling.profile_tables import build_limit_table, build_stage_table

    images: list[Image.Image] = [read_image(path) for path in image or ()]
    for path in image or ():
        if is_animated(Source(str(path), 0, lambda path=path: path)):
            say(f"note: {path} is animated, and only its first frame is used", error=True)
    subject = load_model(model, device, threads, dtype, suffix)
    if not images:
        load_heldout = require("tokenprune_demo.heldout", "name an --image, or install held-out ones").load_heldout
        examples = load_heldout(folder=subject.heldout)
        largest = max(examples, key=lambda example: example.image.width * example.image.height)
        images, question = [largest.image], question or largest.question
    printed: set[str] = set()
    with show_progress(lines=False) as step:
        for index, setting in enumerate(settings or [None]):
            result = profile_call(
                subject,
                images,
                question or QUESTION,
                setting,
                repeats=repeats,
                new_tokens=max_new_tokens,
                step=partial(_step_of_several, step, index, max(1, len(settings))),
            )
            shares = _compute_shares(setting, keeps, result.visual_tokens_per_image)
            _print_table(build_stage_table(result), details)
            if max_visual_tokens is None and result.processor_share >= PROCESSOR_LIMIT:
                say(
                    f"The processor takes {result.processor_share:.0%} of the time to the first token. "
                    f"{describe_limit()}",
                    "dim",
                )
            for share in shares if details else ():
                _print_once(printed, build_limit_table(result.model, result.load, share), details)
    if not details:
        say("Pass --details for the maximum saving of each site, and for notes.", "dim")
    if image and (limits := subject.describe_limits(image)):
        say(limits)
    if html is not None:
        make_profile_page = require("tokenprune_bench.report.flame", "--html needs another package").make_profile_page

        write_file(html, make_profile_page(result, shares[0]))
    if json_file is not None:
        write_file(json_file, json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n")


def _step_of_several(
    step: Callable[[str, int, int], None], index: int, count: int, label: str, done: int, total: int
) -> None:
    """Report the progress of profile `index` of `count` as part of all profiles."""
    step(label, index * total + done, count * total)


def _print_closed_forms(
    model: str | None,
    settings: Sequence[Setting],
    keeps: Sequence[float | int],
    tokens: int | None,
    tiles: int | None,
    text: int,
    details: bool,
) -> None:
    from tokenprune.settings.cost import CostModel, Load
    from tokenprune_bench.profiling.kept_tokens import describe_cuts
    from tokenprune_bench.profiling.profile_tables import build_limit_table

    config = load_config(model)
    cost = CostModel.from_config(config)
    load = Load.from_config(config, tokens=tokens, tiles=tiles, text=text)
    title = f"Maximum saving per site: {model or 'demo_vlm'}"
    printed: set[str] = set()
    for setting in settings or (None,):
        for share in _compute_shares(setting, keeps, load.visual):
            _print_once(printed, build_limit_table(cost, load, share, title), details)
        if setting is not None:
            methods, budgets = setting.steps()
            ratio = cost.compute_cost(load).flops / cost.predict(load, methods, budgets).flops
            names = " + ".join(method.name for method in methods)
            cuts = describe_cuts(methods, budgets, load.visual)
            say(f"{names}: x{ratio:.2f} by FLOPs of tower and decoder; {cuts}")


def _compute_shares(setting: Setting | None, keeps: Sequence[float | int], num_tokens: float) -> list[float]:
    """Return the share of an image's tokens that a setting keeps; without a setting, the share of each keep."""
    from tokenprune.budgets import Budget
    from tokenprune_bench.profiling.kept_tokens import compute_kept_share

    if setting is not None:
        return [compute_kept_share(setting.budgets, num_tokens)]
    return [compute_kept_share([Budget.from_keep(keep)], num_tokens) for keep in keeps]


def _print_once(printed: set[str], table: Table, details: bool) -> None:
    """Print a table unless a table with the same columns was printed."""
    if table.columns[1] not in printed:
        printed.add(table.columns[1])
        _print_table(table, details)


def _print_table(table: Table, details: bool) -> None:
    if details:
        print_table(table)
    else:
        print_one_table(table)
