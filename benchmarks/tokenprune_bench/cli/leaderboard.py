# SPDX-License-Identifier: Apache-2.0
"""`tokenprune leaderboard`: add runs to the leaderboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import ErrorGroup, ModelOption, get_console, read_specs
from tokenprune.errors import OptionError

ENTRIES = Path("benchmarks/experiments/leaderboard/entries")
leaderboard = typer.Typer(
    cls=ErrorGroup, no_args_is_help=True, help="Add runs and methods to the leaderboard of the documentation."
)


@leaderboard.callback()
def _define_group() -> None:
    pass  # with a callback, one command alone keeps its name


@leaderboard.command()
def add(
    run: Annotated[Path, typer.Argument(help="The folder that `tokenprune bench --run` wrote.")],
    by: Annotated[str, typer.Option(help="Who ran it, as the page shall name them.")],
    note: Annotated[str, typer.Option(help="Remark for readers, in one line.")] = "",
    model_name: Annotated[
        str, typer.Option(help="Name of the model on the page; default: the name in the run, unless it is a folder.")
    ] = "",
    to: Annotated[Path, typer.Option(help="The folder of entries, in a checkout.")] = ENTRIES,
) -> None:
    """Check a run (schema, versions, seeds, questions, the unpatched model) and write its entry, one JSON file."""
    from tokenprune_bench.leaderboard.run import add_run

    path = add_run(run, to, by=by, note=note, model=model_name)
    console = get_console()
    console.print(f"written: {path}", markup=False, soft_wrap=True)
    console.print("next: python dev/leaderboard_page.py, and a pull request with both files", markup=False)


@leaderboard.command()
def submit(
    method: Annotated[str, typer.Argument(help="Your method, of an installed package; with options as bench takes.")],
    by: Annotated[str, typer.Option(help="Who ran it, as the page shall name them.")],
    model: ModelOption = None,
    keep: Annotated[str, typer.Option(help="Shares averaged over the decoder's layers, with commas.")] = "0.25,0.11",
    data: Annotated[Path | None, typer.Option(help="Your own questions, as `bench` takes them; default ours.")] = None,
    page: Annotated[Path, typer.Option(help="The method's page, which gets the table.")] = Path("README.md"),
    run: Annotated[
        Path | None, typer.Option(help="The folder of the run; default: runs/METHOD. The same command goes on there.")
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder for the entry; in a checkout its folder of entries.")] = Path(),
) -> None:
    """Check a method's rules, measure it at equal cost, and write the table of its page and its leaderboard entry.

    Beside it stand divprune, uniform, random and downsample, at the same share of tokens.
    """
    from tokenprune.testing import check_method
    from tokenprune_bench.cli.bench import bench
    from tokenprune_bench.leaderboard.checks import read_entry
    from tokenprune_bench.leaderboard.run import add_run
    from tokenprune_bench.leaderboard.submit import BESIDE, write_table

    if not page.is_file():
        raise OptionError(f"there is no page {page}: name that of the method with --page")
    if len(settings := read_specs(method)) != 1:
        raise OptionError(f"{method!r}: name one method, or one stack with plus signs")
    for method_instance in settings[0].methods:
        check_method(method_instance)
    console = get_console()
    console.print(f"{method}: keeps the rules of all methods", markup=False)
    run = run or Path("runs") / method.partition(":")[0]
    bench(model, ",".join(dict.fromkeys((method, *BESIDE))), keep, equal_cost=True, data=data, run=run)
    path = add_run(run, ENTRIES if to == Path() and ENTRIES.is_dir() else to, by=by)
    write_table(page, read_entry(path))
    console.print(f"written: {path}, and the table of {page}", markup=False, soft_wrap=True)
