# SPDX-License-Identifier: Apache-2.0
"""`tokenprune recommend`: a setting to start from, with its evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenprune.cli.common import get_console
from tokenprune.cli.completion import complete_models, complete_of
from tokenprune.files import check_output
from tokenprune.startup import defer_torch
from tokenprune_bench.recommend.advice import advice


def recommend(
    model: Annotated[
        str,
        typer.Argument(
            help="Directory or hub id; its config is read, no weights. demo_qwen and demo_vlm ship.",
            autocompletion=complete_models,
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(advice())} (docs/guide/which-method.md).", autocompletion=complete_of(*advice())
        ),
    ] = "general",
    out: Annotated[Path | None, typer.Option(help="Write the setting, for patch(model, config=...) and vLLM.")] = None,
) -> None:
    """Name a setting to start from, as Python, vLLM flag and config, with its evidence, graded strong or weak:
    published numbers, our own runs, and closed forms of the model's cost. Nothing is measured: `tokenprune tune` does
    that, on your questions."""
    defer_torch()
    import tokenprune
    from tokenprune.setting.saved import Config, write_config

    check_output(out)
    found = tokenprune.recommend(model, task=task)
    console = get_console()
    console.print(str(found), markup=False, soft_wrap=not console.is_terminal)
    if out is not None:
        write_config(out, Config(found.setting, guard=found.guard or None))
        get_console(error=True).print(f"written: {out}", markup=False, soft_wrap=True)
