# SPDX-License-Identifier: Apache-2.0
"""`tokenprune new-family`: create an adapter for a new model family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import get_console


def new_family(
    model: Annotated[
        str, typer.Argument(help="Model type of transformers, or folder of a checkpoint. No weights are loaded.")
    ],
    to: Annotated[
        Path | None, typer.Option(help="Folder to create. Default: family-TYPE in the current folder.")
    ] = None,
) -> None:
    """Create an adapter and a test for a model family.

    Prints the facts that its configuration and class do not contain.
    """
    from tokenprune.cli.scaffold import write_folder
    from tokenprune.integrations.hf.families.describe import describe

    about, console = describe(model), get_console()
    folder = write_folder(Path(f"family-{about.row.name}") if to is None else to, about.files())
    lines = [f"{name}: {what}" for name, what in about.properties.items()]
    lines += [f"look up {field}: {what}" for field, what in about.missing.items()]
    lines += [f"written: {path}" for path in sorted(folder.iterdir())]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
