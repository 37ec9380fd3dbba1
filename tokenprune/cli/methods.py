# SPDX-License-Identifier: Apache-2.0
"""`tokenprune methods` and `families`: see what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenprune.cli.common import get_console

if TYPE_CHECKING:
    from tokenprune.registry import MethodInfo

_COST = (
    "Keep: where none is given. FLOPs left: of tower and decoder in prefill at that keep, by closed forms, on "
    "LLaVA-1.5-7B with one image (576 visual tokens) and 64 tokens of text; what choosing takes is not in it, and a "
    "method whose number of tokens follows from content is taken to keep what it is asked for."
)


def methods() -> None:
    """List the methods that are registered: where they act, what they keep unless told otherwise, and what that
    costs."""
    from rich.text import Text

    import tokenprune
    from tokenprune.bench.tables import Cell, Table, to_rich

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    cost, rows = _costs(), []
    for name in tokenprune.available_methods():
        info = tokenprune.method_info(name)
        flags = [yes(info.query_aware), yes(info.prefix_cache_safe), yes(info.merges)]
        told = [name, info.site.words, f"{info.default_keep:g}", cost(info), *flags, info.source, info.summary]
        rows.append([*map(Cell, told)])
    columns = (
        "method", "acts", "keep", "FLOPs left", "query-aware", "prefix-cache-safe", "merges", "paper", "what it does",
    )  # fmt: skip
    table = to_rich(Table("Methods", columns, rows))
    for column in (*table.columns[1:2], *table.columns[4:]):
        column.justify = "left"
    for column in table.columns[:2]:
        column.no_wrap = True
    get_console().print(table)
    get_console().print(Text(_COST, style="dim"), soft_wrap=True)


def _costs() -> Any:
    """Return a function from a method to the share of a prefill's FLOPs that its default keep leaves; "" where the
    method promises none."""
    from transformers import LlavaConfig

    from tokenprune.base import ImageChooser
    from tokenprune.cost_model import CostModel, Load
    from tokenprune.errors import TokenPruneError

    config = LlavaConfig()  # that of LLaVA-1.5-7B
    model, load = CostModel.from_config(config), Load.of_config(config)
    whole = model.cost(load).flops

    def cost(info: MethodInfo) -> str:
        from tokenprune.budget import Budget

        if info.default_keep == 1 or issubclass(info.cls, ImageChooser):
            return ""
        try:
            left = model.predict(load, [info.cls()], [Budget.of(info.default_keep)]).flops / whole
        except TokenPruneError:
            return ""
        return f"{left:.0%}"

    return cost


def families() -> None:
    """List the model families: where methods may act in each, and which are refused, with the reason."""
    from tokenprune.bench.tables import Cell, Table, to_rich
    from tokenprune.integrations.hf.families.table import REFUSED, SUPPORTED

    known = [
        [Cell(name), Cell(", ".join(one.sites)), Cell(one.since), Cell(one.note)]
        for name, one in sorted(SUPPORTED.items())
    ]
    refused = [[Cell(name), Cell(reason)] for name, reason in sorted(REFUSED.items())]
    for table in (
        Table("Families", ("model type", "sites", "from transformers", "notes"), known),
        Table("Refused", ("model type", "because"), refused),
    ):
        shown = to_rich(table)
        for column in shown.columns[1:]:
            column.justify = "left"
        get_console().print(shown)
