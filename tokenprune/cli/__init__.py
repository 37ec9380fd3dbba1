# SPDX-License-Identifier: Apache-2.0
"""The command line. Nothing heavy is imported before a command needs it: `tokenprune --help` must answer at once."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenprune import __version__
from tokenprune.cli.app import app as open_app
from tokenprune.cli.bench import bench
from tokenprune.cli.calibrate import calibrate, fit_d2pruner, fit_dyrate, fit_fitprune
from tokenprune.cli.common import ErrorGroup
from tokenprune.cli.draft import draft
from tokenprune.cli.leaderboard import leaderboard
from tokenprune.cli.methods import families, methods
from tokenprune.cli.new_method import new_method
from tokenprune.cli.profile import profile
from tokenprune.cli.recommend import recommend
from tokenprune.cli.report import report
from tokenprune.cli.show import demo, show
from tokenprune.cli.tune import tune
from tokenprune.startup import calm_threads

app = typer.Typer(
    cls=ErrorGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Prune the visual tokens of vision-language models, and see what that costs.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenprune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass  # the version is answered by its callback


_COMMANDS = (methods, families, recommend, bench, report, tune, profile, draft, demo, show, calibrate, new_method)
app.command("app")(open_app)
app.add_typer(leaderboard, name="leaderboard")
for command in (*_COMMANDS, fit_dyrate, fit_d2pruner, fit_fitprune):
    app.command()(command)


def main() -> None:
    """Entry point of the `tokenprune` command."""
    calm_threads()
    app(prog_name="tokenprune")
