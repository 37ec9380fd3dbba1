# SPDX-License-Identifier: Apache-2.0
"""`tokenprune draft`: whether a draft that sees fewer visual tokens pays, before anything is run."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenprune.cli.common import ModelOption, get_console, load_config, read_stack
from tokenprune.cli.completion import complete_methods

_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def draft(
    model: ModelOption = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="A smaller model; default: one that shares the model's weights.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--methods",
            "--method",
            autocompletion=complete_methods,
            help="What the draft is patched with: a name out of `tokenprune methods`, or a "
            "stack: divprune+fastv:layer=3.",
        ),
    ] = "divprune",
    keep: Annotated[str, typer.Option(help="Share of the visual tokens, or a whole number of them.")] = "0.1",
    tokens: Annotated[int, typer.Option(min=1, help="Visual tokens of the prompt.")] = 1024,
    text: Annotated[int, typer.Option(min=0, help="Tokens of text, the answer's among them.")] = 256,
    drafts: Annotated[int, typer.Option(min=1, help="Tokens drafted in a round.")] = 4,
) -> None:
    """Show what a step of a draft costs beside one of its target (c), and how much faster decoding gets by the share of
    drafts that the target accepts. Reads configs alone: no weights are loaded, and nothing is measured."""
    from rich.text import Text

    from tokenprune.bench.tables import Cell, Table, to_rich
    from tokenprune.config import Config
    from tokenprune.draft_cost import DraftCost

    setting = read_stack(method, keep)
    methods, budgets = ([], []) if setting is None else Config(setting).steps()
    own = None if draft is None else load_config(draft)
    cost = DraftCost.of_configs(load_config(model), own, methods, budgets, tokens=tokens, text=text)
    counts = sorted({1, 2, drafts, 2 * drafts})
    rows = []
    for number in counts:
        told = [f"x{cost.speedup(acceptance, number):.2f}" for acceptance in _ACCEPTANCES]
        least = cost.break_even(number)
        rows.append([*map(Cell, (f"{number} a round", *told, "never" if least is None else f"{least:.0%}"))])
    columns = ("drafted", *(f"{acceptance:.0%}" for acceptance in _ACCEPTANCES), "pays from")
    console = get_console()
    console.print(to_rich(Table("How many times faster decoding gets, by the share of drafts accepted", columns, rows)))
    notes = (
        f"c = {cost.c:.3f}: a step of the draft reads {_gigabytes(cost.draft)} and one of the target "
        f"{_gigabytes(cost.target)}, in numbers of 2 bytes.",
        "One prompt at a time, so that memory decides. The draft reads the prompt too, and a smaller one encodes its "
        "images: that time is not in it.",
    )
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
