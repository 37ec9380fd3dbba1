# SPDX-License-Identifier: Apache-2.0
"""`tokenprune recommend`: recommend a setting with evidence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import get_console
from tokenprune.cli.completion import complete_models, complete_values
from tokenprune.models.model_config import SHIPPED
from tokenprune.models.torch_import import defer_torch
from tokenprune.selection.files import check_output
from tokenprune_bench.cli.common import DetailsOption
from tokenprune_bench.recommend.advice import load_advice


def recommend(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Directory or hub id; its config is read, no weights. Default: {SHIPPED[0]}, which ships.",
            autocompletion=complete_models,
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(load_advice())} (docs/start/choose.md).", autocompletion=complete_values(*load_advice())
        ),
    ] = "general",
    details: DetailsOption = False,
    out: Annotated[Path | None, typer.Option(help="Write the setting, for patch(model, config=...) and vLLM.")] = None,
) -> None:
    """Suggest a setting for a model and a task.

    The evidence is graded strong or weak: published numbers, our own runs, and closed forms of the model's cost. The
    command measures nothing; `tokenprune tune` does, on your questions.
    """
    defer_torch()
    import tokenprune
    from tokenprune.settings import Setting
    from tokenprune.settings.saved import write_config

    check_output(out)
    console, notes = get_console(), get_console(error=True)
    if model is None:
        notes.print(f"No model named: this is for {SHIPPED[0]}. Name yours: tokenprune recommend MODEL", markup=False)
    advised = tokenprune.recommend(model or SHIPPED[0], task=task)
    console.print(str(advised) if details else advised.summary, markup=False, soft_wrap=not console.is_terminal)
    if out is not None:
        setting = Setting.from_json(advised.setting)
        write_config(out, dataclasses.replace(setting, guard=advised.guard or None))
        notes.print(f"written: {out}", markup=False, soft_wrap=True)
