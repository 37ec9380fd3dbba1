# SPDX-License-Identifier: Apache-2.0
"""`tokenprune methods` and `families`: see what there is."""

from __future__ import annotations

from tokenprune.cli.common import get_console


def methods() -> None:
    """List the methods that are registered."""
    import tokenprune
    from tokenprune.bench.tables import Cell, Table, to_rich

    def yes(value: bool) -> Cell:
        return Cell("yes" if value else "no")

    rows = []
    for name in tokenprune.available_methods():
        info = tokenprune.method_info(name)
        flags = [yes(info.query_aware), yes(info.prefix_cache_safe), yes(info.merges)]
        rows.append([Cell(name), Cell(info.site.name), *flags, Cell(info.source), Cell(info.summary)])
    columns = ("method", "site", "query-aware", "prefix-cache-safe", "merges", "paper", "what it does")
    table = to_rich(Table("Methods", columns, rows))
    for column in table.columns[1:]:
        column.justify = "left"
    get_console().print(table)


def families() -> None:
    """List the model families: where methods may act in each, and which are refused, with the reason."""
    from tokenprune.bench.tables import Cell, Table, to_rich
    from tokenprune.integrations.hf.families.table import REFUSED, SUPPORTED

    known = [
        [Cell(name), Cell(", ".join(one.sites)), Cell(one.tested), Cell(one.note)]
        for name, one in sorted(SUPPORTED.items())
    ]
    refused = [[Cell(name), Cell(reason)] for name, reason in sorted(REFUSED.items())]
    for table in (
        Table("Families", ("model type", "sites", "tested with transformers", "notes"), known),
        Table("Refused", ("model type", "because"), refused),
    ):
        shown = to_rich(table)
        for column in shown.columns[1:]:
            column.justify = "left"
        get_console().print(shown)
