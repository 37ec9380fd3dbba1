# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-method`: create a package with a new method."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import get_console
from tokenprune.cli.completion import complete_values

_SITES = ("pre-encoder", "in-encoder", "pre-llm", "attention", "in-llm", "decode", "session")


def new_method(
    name: Annotated[
        str, typer.Argument(help="Name of the method: lowercase letters, digits and underscores, such as my_method.")
    ],
    site: Annotated[
        str,
        typer.Option(help=f"Site: {', '.join(_SITES)} (a session policy).", autocompletion=complete_values(*_SITES)),
    ] = "pre-llm",
    to: Annotated[
        Path | None, typer.Option(help="Folder to create. Default: tokenprune-NAME in the current folder.")
    ] = None,
) -> None:
    """Create a package with a working method, its test and its README."""
    from tokenprune.cli import scaffold

    folder = scaffold.new_method(name, site, to)
    console = get_console()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    quoted = shlex.quote(str(folder))
    console.print(f"try it:  cd {quoted} && python -m pytest", markup=False, soft_wrap=True)
    use = f"pip install -e {quoted} && tokenprune bench --methods {name}"
    if site.lower() == scaffold.SESSION:
        use = f'pip install -e {quoted}; tokenprune.sessions.session(model, processor, memory=512, policy="{name}")'
    console.print(f"use it:  {use}", markup=False, soft_wrap=True)
