# SPDX-License-Identifier: Apache-2.0
"""`tokenprune draft`: whether a draft that sees fewer visual tokens pays, before anything is run."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenprune.cli.common import METHODS_HELP, ModelOption, load_config, read_settings, say
from tokenprune.cli.completion import complete_methods
from tokenprune.cli.output import print_table

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
            help=f"What the draft is patched with. {METHODS_HELP}; each has a table.",
        ),
    ] = "divprune",
    keep: Annotated[str, typer.Option(help="Shares of the visual tokens, or whole numbers; as for `profile`.")] = "0.1",
    tokens: Annotated[int, typer.Option(min=1, help="Visual tokens of the prompt.")] = 1024,
    text: Annotated[int, typer.Option(min=0, help="Tokens of text, the answer's among them.")] = 256,
    drafts: Annotated[int, typer.Option(min=1, help="Tokens drafted in a round.")] = 4,
) -> None:
    """Show what a step of a draft costs beside one of its target (c), and how much faster decoding gets by the share of
    drafts that the target accepts. Reads configs alone: no weights are loaded, and nothing is measured."""
    from tokenprune.cli.table import Cell, Table
    from tokenprune.integrations.hf.drafting.cost import DraftCost

    own = None if draft is None else load_config(draft)
    whole = load_config(model)
    settings = read_settings(method, keep)
    for setting in settings or (None,):
        methods, budgets = ([], []) if setting is None else setting.steps()
        cost = DraftCost.from_configs(whole, own, methods, budgets, tokens=tokens, text=text)
        rows = []
        for number in sorted({1, 2, drafts, 2 * drafts}):
            speedups = [f"x{cost.speedup(acceptance, number):.2f}" for acceptance in _ACCEPTANCES]
            least = cost.break_even(number)
            rows.append([*map(Cell, (f"{number} a round", *speedups, "never" if least is None else f"{least:.0%}"))])
        columns = ("drafted", *(f"{acceptance:.0%}" for acceptance in _ACCEPTANCES), "pays from")
        drawn = " + ".join(f"{one.name} {budget.format_short()}" for one, budget in zip(methods, budgets, strict=True))
        title = f"{drawn or 'unpatched'}: how many times faster decoding gets, by the share of drafts accepted"
        print_table(Table(title, columns, rows))
        said = (
            f"c = {cost.c:.3f}: a step of the draft reads {_gigabytes(cost.draft)} and one of the target "
            f"{_gigabytes(cost.target)}, in numbers of 2 bytes."
        )
        say(said, "dim")
    said = (
        "One prompt at a time, so that memory decides. The draft reads the prompt too, and a smaller one encodes its "
        "images: that time is not in it."
    )
    say(said, "dim")


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
