# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-family`: start a model family that the library does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import get_console


def new_family(
    model: Annotated[
        str, typer.Argument(help="A model type of transformers, or the folder of a checkpoint; no weights are read.")
    ],
    to: Annotated[
        Path | None, typer.Option(help="The folder to make; default: family-TYPE, in the current one.")
    ] = None,
) -> None:
    """Write a row for a model family and a test of it, and say what its config and class do not tell."""
    from tokenprune.cli.scaffold import write_folder
    from tokenprune.integrations.hf.families.describe import describe

    about, console = describe(model), get_console()
    folder = write_folder(Path(f"family-{about.row.name}") if to is None else to, about.files())
    lines = [f"{name}: {what}" for name, what in about.found.items()]
    lines += [f"look up {field}: {what}" for field, what in about.missing.items()]
    lines += [f"written: {path}" for path in sorted(folder.iterdir())]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
