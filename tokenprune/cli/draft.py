# SPDX-License-Identifier: Apache-2.0
"""`tokenprune draft`: estimate the speed-up of assisted generation with a pruned draft."""

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
        str | None,
        typer.Option("--draft", help="Smaller model. Default: a draft that shares the weights of the model."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--methods",
            "--method",
            autocompletion=complete_methods,
            help=f"Methods of the draft. {METHODS_HELP}. One table each.",
        ),
    ] = "divprune",
    keep: Annotated[
        str, typer.Option(help="Shares of the visual tokens, or numbers of tokens, as for `profile`.")
    ] = "0.1",
    tokens: Annotated[int, typer.Option(min=1, help="Visual tokens of the prompt.")] = 1024,
    text: Annotated[int, typer.Option(min=0, help="Text tokens, including the answer.")] = 256,
    drafts: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 4,
) -> None:
    """Estimate the speed-up of decoding with a pruned draft model.

    Reads only model configurations: no weights are loaded.
    """
    from tokenprune.cli.table import Cell, Table
    from tokenprune.integrations.hf.drafting.cost import DraftCost

    draft_config = None if draft is None else load_config(draft)
    config = load_config(model)
    settings = read_settings(method, keep)
    for setting in settings or (None,):
        methods, budgets = ([], []) if setting is None else setting.steps()
        cost = DraftCost.from_configs(config, draft_config, methods, budgets, tokens=tokens, text=text)
        rows = []
        for num_drafts in sorted({1, 2, drafts, 2 * drafts}):
            speedups = [f"x{cost.speedup(acceptance, num_drafts):.2f}" for acceptance in _ACCEPTANCES]
            rate = cost.break_even(num_drafts)
            break_even = "never" if rate is None else f"{rate:.0%}"
            rows.append([*map(Cell, (f"{num_drafts} a round", *speedups, break_even))])
        columns = ("drafted", *(f"{acceptance:.0%}" for acceptance in _ACCEPTANCES), "pays from")
        steps = zip(methods, budgets, strict=True)
        name = " + ".join(f"{method.name} {budget.format_short()}" for method, budget in steps)
        print_table(Table(f"{name or 'unpatched'}: speed-up of decoding by acceptance rate", columns, rows))
        say(
            f"c = {cost.c:.3f}: a draft step reads {_format_bytes(cost.draft)}, a target step "
            f"{_format_bytes(cost.target)}, with 2 bytes per value.",
            "dim",
        )
    say(
        "For one prompt at a time, where memory reads determine the speed. Not included: the prefill of the draft, and "
        "the image encoding of a smaller draft.",
        "dim",
    )


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
