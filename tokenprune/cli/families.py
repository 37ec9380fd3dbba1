# SPDX-License-Identifier: Apache-2.0
"""`tokenprune families`: list model families, and the sites at which methods support them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tokenprune.cli.common import get_console
from tokenprune.cli.completion import list_builtin_methods
from tokenprune.models.torch_import import defer_torch

if TYPE_CHECKING:
    from tokenprune.selection.method import Method
    from tokenprune.selection.observable import Backend


def _complete(incomplete: str) -> list[str]:
    return [name for name in list_builtin_methods() if name.startswith(incomplete)]


def families(
    method: Annotated[
        str | None,
        typer.Option(
            help="Show which families support this method, such as fastv:layer=3 or divprune+fastv.",
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """List the supported model families and their sites.

    Also lists the families that are not supported, with the reason.
    """
    from tokenprune.cli.table import Cell, Table, to_rich

    console = get_console()
    for title, columns, rows in _list_families() if method is None else _list_answers(method):
        table = to_rich(Table(title, tuple(columns), [[Cell(text) for text in row] for row in rows]))
        for index, column in enumerate(table.columns):
            column.justify, column.no_wrap = "left", method is None and index == 0
        if method is not None:
            longest = max(len(name) for _, names in rows for name in names.split(", "))
            table.columns[0].max_width = console.width - longest - _LINES
        elif console.width < _NARROW:
            table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
        console.print(table)


_NARROW = 80  # width of a terminal below which tables have no lines
_LINES = 8  # width of the lines and blanks of a table with two columns, and of a comma
_TableData = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


def _list_families() -> Iterator[_TableData]:
    from tokenprune.models.families import REFUSED, SUPPORTED
    from tokenprune.models.families.tested import list_tested_sites

    rows = sorted(SUPPORTED.items())
    families = [(name, ", ".join(list_tested_sites(row)), str(row.since), row.note) for name, row in rows]
    yield "Families (since: minimum version of transformers)", ("model type", "sites", "since", "notes"), families
    yield "Not supported", ("model type", "reason"), sorted(REFUSED.items())


def _list_answers(text: str) -> Iterator[_TableData]:
    """Yield a table for each engine that lists which families support the methods in `text`.

    Families with the same answer share a row. Supported families come first.
    """
    defer_torch()
    from tokenprune.models.families import REFUSED, REFUSED_IN_VLLM, SERVED, SUPPORTED
    from tokenprune.selection.method import Site
    from tokenprune.selection.observable import Backend
    from tokenprune.settings import IN_LLM, Setting

    methods = Setting.from_text(text).methods
    columns = (f"{text} supported?", "families")
    refused = "no, like all methods (see `tokenprune families`)", ", ".join(sorted(REFUSED))
    yield "transformers", columns, [*_group_by_answer(methods, SUPPORTED, Backend.HF), refused]
    refused = "no, like all methods (see docs/serving/reference.md)", ", ".join(sorted(REFUSED_IN_VLLM))
    served = [row.name for row in SERVED.values()]
    yield "vLLM", columns, [*_group_by_answer(methods, served, Backend.VLLM), refused]
    if all(method.site is Site.IN_LLM for method in methods):
        title = f'vLLM with "{IN_LLM}": true'
        yield title, columns, [*_group_by_answer(methods, served, Backend.VLLM_IN_LLM), refused]


def _group_by_answer(methods: Iterable[Method], names: Iterable[str], backend: Backend) -> list[tuple[str, ...]]:
    by_answer: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_answer[_answer(methods, name, backend)].append(name)
    return [
        (answer, ", ".join(families)) for answer, families in sorted(by_answer.items(), key=lambda row: row[0] != "yes")
    ]


def _answer(methods: Iterable[Method], name: str, backend: Backend) -> str:
    from tokenprune.integrations.shared.checks import find_unsupported_reason
    from tokenprune.models.families import FAMILIES

    for method in methods:
        if reason := find_unsupported_reason(method, name, backend):
            for family in (f"this {name!r}", repr(name), FAMILIES[name].vllm.architecture or name):
                reason = reason.replace(family, "this family", 1)
            return f"no: {reason}"
    return "yes"
