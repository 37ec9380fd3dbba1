# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-method`: start a method in a package of your own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import get_console
from tokenprune.cli.completion import complete_values

_SITES = ("pre-encoder", "in-encoder", "pre-llm", "attention", "in-llm", "decode", "session")


def new_method(
    name: Annotated[str, typer.Argument(help="Of the method: small letters, digits and underscores, as in my_method.")],
    site: Annotated[
        str,
        typer.Option(
            help=f"Where it acts: {', '.join(_SITES)} (a policy of sessions).", autocompletion=complete_values(*_SITES)
        ),
    ] = "pre-llm",
    to: Annotated[
        Path | None, typer.Option(help="The folder to make; default: tokenprune-NAME, in the current one.")
    ] = None,
) -> None:
    """Write a package with one method in it, its test and its page, to start from: it works as written."""
    from tokenprune.cli import scaffold

    folder = scaffold.new_method(name, site, to)
    console = get_console()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    place = shlex.quote(str(folder))
    console.print(f"try it:  cd {place} && python -m pytest", markup=False, soft_wrap=True)
    use = f"pip install -e {place} && tokenprune bench --methods {name}"
    if site.lower() == scaffold.SESSION:
        use = f'pip install -e {place}; tokenprune.sessions.session(model, processor, memory=512, policy="{name}")'
    console.print(f"use it:  {use}", markup=False, soft_wrap=True)
