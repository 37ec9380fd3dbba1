# SPDX-License-Identifier: Apache-2.0
"""`tokenprune families`: the model families, and where a method may act."""

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
            help="Say of each family whether this method may act, or why not; as in fastv:layer=3, or divprune+fastv.",
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """List the model families: where methods may act in each, and which are refused, with the reason."""
    from tokenprune.cli.table import Cell, Table, to_rich

    console = get_console()
    for title, columns, rows in _known() if method is None else _answers(method):
        shown = to_rich(Table(title, tuple(columns), [[Cell(text) for text in row] for row in rows]))
        for index, column in enumerate(shown.columns):
            column.justify, column.no_wrap = "left", method is None and index == 0
        if method is not None:
            longest = max(len(name) for _, names in rows for name in names.split(", "))
            shown.columns[0].max_width = console.width - longest - _LINES
        elif console.width < _NARROW:
            shown.box, shown.padding, shown.pad_edge = None, (0, 1, 0, 0), False
        console.print(shown)


_NARROW = 80  # columns of the screen below which the lines of a table take too many of them
_LINES = 8  # columns of the screen that hold no text: lines and blanks of a table with two columns, and a comma
_Shown = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


def _known() -> Iterator[_Shown]:
    from tokenprune.models.families import REFUSED, SUPPORTED
    from tokenprune.models.families.tested import list_tested_sites

    rows = sorted(SUPPORTED.items())
    known = [(name, ", ".join(list_tested_sites(row)), str(row.since), row.note) for name, row in rows]
    yield "Families (since: the first version of transformers)", ("model type", "sites", "since", "notes"), known
    yield "Refused", ("model type", "because"), sorted(REFUSED.items())


def _answers(text: str) -> Iterator[_Shown]:
    """Yield a table for each engine; families of one answer share a row, and those that may stand first."""
    defer_torch()
    from tokenprune.models.families import REFUSED, REFUSED_IN_VLLM, SERVED, SUPPORTED
    from tokenprune.selection.method import Site
    from tokenprune.selection.observable import Backend
    from tokenprune.settings import IN_LLM, Setting

    methods = Setting.from_text(text).methods
    columns = (f"may {text} act?", "families")
    refused = "no, as no method may: `tokenprune families` says why", ", ".join(sorted(REFUSED))
    yield "transformers", columns, [*_by_answer(methods, SUPPORTED, Backend.HF), refused]
    refused = "no, as no method may: docs/serving/reference.md says why", ", ".join(sorted(REFUSED_IN_VLLM))
    served = [row.name for row in SERVED.values()]
    yield "vLLM", columns, [*_by_answer(methods, served, Backend.VLLM), refused]
    if all(method.site is Site.IN_LLM for method in methods):
        title = f'vLLM with "{IN_LLM}": true'
        yield title, columns, [*_by_answer(methods, served, Backend.VLLM_IN_LLM), refused]


def _by_answer(methods: Iterable[Method], names: Iterable[str], backend: Backend) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        found[_answer(methods, name, backend)].append(name)
    return [(answer, ", ".join(of)) for answer, of in sorted(found.items(), key=lambda one: one[0] != "yes")]


def _answer(methods: Iterable[Method], name: str, backend: Backend) -> str:
    from tokenprune.integrations.shared.checks import find_unsupported_reason
    from tokenprune.models.families import FAMILIES

    for method in methods:
        if reason := find_unsupported_reason(method, name, backend):
            for own in (f"this {name!r}", repr(name), FAMILIES[name].vllm.architecture or name):
                reason = reason.replace(own, "this family", 1)
            return f"no: {reason}"
    return "yes"
