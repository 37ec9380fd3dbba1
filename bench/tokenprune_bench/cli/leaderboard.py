# SPDX-License-Identifier: Apache-2.0
"""`tokenprune leaderboard`: put what was measured beside what others measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import ErrorGroup, get_console

leaderboard = typer.Typer(
    cls=ErrorGroup, no_args_is_help=True, help="Put a run of `tokenprune bench` on the documentation's leaderboard."
)


@leaderboard.callback()
def _commands() -> None:
    pass  # with a callback, one command alone keeps its name


@leaderboard.command()
def add(
    run: Annotated[Path, typer.Argument(help="The folder that `tokenprune bench --run` wrote.")],
    by: Annotated[str, typer.Option(help="Who ran it, as the page shall name them.")],
    note: Annotated[str, typer.Option(help="What else a reader should know, in a line.")] = "",
    model_name: Annotated[
        str, typer.Option(help="What the page calls the model; default: what the run does, if that is no folder.")
    ] = "",
    to: Annotated[Path, typer.Option(help="The folder of entries, in a checkout.")] = Path(
        "experiments/leaderboard/entries"
    ),
) -> None:
    """Check a run (schema, versions, seeds, questions, the unpatched model) and write its entry, one JSON file."""
    from tokenprune_bench.leaderboard.run import add_run

    path = add_run(run, to, by=by, note=note, model=model_name)
    console = get_console()
    console.print(f"written: {path}", markup=False, soft_wrap=True)
    console.print("next: python dev/leaderboard_page.py, and a pull request with both files", markup=False)
