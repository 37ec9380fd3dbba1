# SPDX-License-Identifier: Apache-2.0
"""The command line. Nothing heavy is imported before a command needs it: `tokenprune --help` must answer at once."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tokenprune import __version__
from tokenprune.cli.bench import bench
from tokenprune.cli.calibrate import calibrate, fit_d2pruner, fit_dyrate, fit_fitprune
from tokenprune.cli.common import get_console
from tokenprune.cli.draft import draft
from tokenprune.cli.methods import families, methods
from tokenprune.cli.profile import profile
from tokenprune.cli.report import report
from tokenprune.cli.show import demo, show
from tokenprune.cli.tune import tune
from tokenprune.errors import TokenPruneError


class _Group(TyperGroup):
    """Turns our own errors into one red line and exit code 2; other exceptions are bugs and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenPruneError as error:
            from rich.text import Text

            get_console(error=True).print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
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


_COMMANDS = (methods, families, bench, report, tune, profile, draft, demo, show, calibrate)
for command in (*_COMMANDS, fit_dyrate, fit_d2pruner, fit_fitprune):
    app.command()(command)


def main() -> None:
    """Entry point of the `tokenprune` command."""
    app(prog_name="tokenprune")
