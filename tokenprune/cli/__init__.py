# SPDX-License-Identifier: Apache-2.0
"""The `tokenprune` command. Imports are deferred to the commands that need them, to keep `--help` fast."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenprune import __version__
from tokenprune.cli.capacity import capacity
from tokenprune.cli.common import BoundedCommand, Commands
from tokenprune.cli.draft import draft
from tokenprune.cli.families import families
from tokenprune.cli.methods import methods
from tokenprune.cli.new_family import new_family
from tokenprune.cli.new_method import new_method
from tokenprune.cli.serve_check import serve_check
from tokenprune.models.torch_import import set_passive_threads

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Prune visual tokens of vision-language models, and measure speed and accuracy.",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"tokenprune {__version__}")
        raise typer.Exit


@app.callback()
def _define_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass  # `_print_version` handles the option


for command in (methods, families, capacity, draft, new_method, new_family, serve_check):
    app.command(cls=BoundedCommand)(command)


def main() -> None:
    """Entry point of the `tokenprune` command."""
    set_passive_threads()
    app(prog_name="tokenprune")
