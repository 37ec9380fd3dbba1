# SPDX-License-Identifier: Apache-2.0
"""`tokenprune methods`: list the registered methods, or describe one method."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenprune.cli.common import get_console
from tokenprune.cli.completion import complete_values, list_builtin_methods
from tokenprune.errors import OptionError
from tokenprune.models.torch_import import defer_torch

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokenprune.methods.registry import MethodInfo

WIDE = 150  # minimum width of a terminal for the table with all flags
_COST = (
    "keep: default value. FLOPs left: estimated share of the prefill FLOPs of tower and decoder at this keep, for "
    "LLaVA-1.5-7B with one image (576 visual tokens) and 64 text tokens. Excludes the cost of the selection. Methods "
    "with a variable number of tokens are assumed to keep exactly this share."
)
_MORE = "Run `tokenprune methods NAME` for details. Filter with --site, --prefix-cache-safe, --video and --runs-on."
_INPUTS = ("features", "frames", "question", "tower_attention", "tower_features", "pixels", "tower", "decoder")
_SITES = ("PRE_ENCODER", "IN_ENCODER", "PRE_LLM", "ATTENTION", "IN_LLM", "DECODE")


def _complete_names(incomplete: str) -> list[str]:
    return [name for name in list_builtin_methods() if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Describe this method and its options.", autocompletion=_complete_names)
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help=f"Show only methods of this site: {', '.join(_SITES)}.", autocompletion=complete_values(*_SITES)
        ),
    ] = None,
    prefix_cache_safe: Annotated[
        bool,
        typer.Option("--prefix-cache-safe", help="Show only methods whose selection does not depend on later tokens."),
    ] = False,
    video: Annotated[bool, typer.Option("--video", help="Show only methods for videos.")] = False,
    runs_on: Annotated[
        str | None,
        typer.Option(
            help=f"Show only methods that need no other inputs than these, separated by commas: {', '.join(_INPUTS)}.",
            autocompletion=complete_values(*_INPUTS),
        ),
    ] = None,
) -> None:
    """List the registered methods by site, or describe one method."""
    defer_torch()
    from rich.text import Text

    import tokenprune

    console = get_console()
    if name is not None:
        if site is not None or prefix_cache_safe or video or runs_on is not None:
            raise OptionError(
                f"--site, --prefix-cache-safe, --video and --runs-on do not apply to a single method. Leave out {name}."
            )
        for part in _describe(tokenprune.method_info(name)):
            console.print(part)
        return
    site_name = None if site is None else _read_site(site)
    inputs = None if runs_on is None else _read_inputs(runs_on)
    infos = [
        info
        for info in map(tokenprune.method_info, tokenprune.available_methods())
        if site_name in (None, info.site)
        and (info.prefix_cache_safe or not prefix_cache_safe)
        and (info.for_videos or not video)
        and (inputs is None or info.needs <= inputs)
    ]
    if not infos:
        console.print("No method matches.")
        return
    is_wide = console.width >= WIDE
    for part in _build_wide_table(infos) if is_wide else _build_site_tables(infos):
        console.print(part)
    for note in (_COST, _MORE) if is_wide else (_MORE,):
        console.print(Text(note, style="dim"))


def _read_site(text: str) -> str:
    """Return the site for a value of --site. Raise OptionError if it is unknown."""
    name = text.strip().upper().replace("-", "_")
    if name not in _SITES:
        raise OptionError(f"--site {text!r} is unknown. Use one of {', '.join(_SITES)}.")
    return name


def _read_inputs(text: str) -> frozenset[str]:
    """Return the inputs of a value of --runs-on. Raise OptionError if one is unknown."""
    inputs = frozenset(name.strip().lower().replace("-", "_") for name in text.split(","))
    if unknown := sorted(inputs - set(_INPUTS)):
        raise OptionError(f"--runs-on {unknown[0]!r} is unknown. Use {', '.join(_INPUTS)}.")
    return inputs


def _extract_clause(info: MethodInfo) -> str:
    """Return the first clause of a method's summary."""
    return re.split(r"[:;,(]|\.(?:\s|$)", info.summary, maxsplit=1)[0].strip()


def _build_site_tables(infos: Sequence[MethodInfo]) -> list[RenderableType]:
    """Return one table per site, for a narrow terminal."""
    from rich.table import Table
    from rich.text import Text

    width = max(len(info.name) for info in infos)
    parts: list[RenderableType] = []
    for site in sorted({info.site for info in infos}, key=_SITES.index):
        infos_of_site = [info for info in infos if info.site == site]
        parts.append(Text(f"{site}: {infos_of_site[0].site.description}", style="bold"))
        table = Table.grid(padding=(0, 1), pad_edge=False)
        table.add_column(min_width=width + 1, no_wrap=True)
        table.add_column(min_width=_compute_longest_word(map(_extract_clause, infos_of_site)))
        for info in infos_of_site:
            table.add_row(Text(f" {info.name}"), Text(_extract_clause(info)))
        parts.append(table)
    return parts


def _build_wide_table(infos: Sequence[MethodInfo]) -> list[RenderableType]:
    """Return one table with all flags, for a wide terminal or a pipe."""
    from rich.table import Table
    from rich.text import Text

    cost = _make_cost_formatter()
    names = ("method", "site", "keep", "FLOPs left", "query-aware", "prefix-cache-safe", "merges", "what it does")
    rows = [
        (
            info.name,
            str(info.site),
            _keep(info),
            cost(info),
            *map(_format_flag, _get_flags(info)),
            _extract_clause(info),
        )
        for info in infos
    ]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        cells = [name, *(row[index] for row in rows)]
        justify: Literal["left", "right"] = "right" if name in ("keep", "FLOPs left") else "left"
        table.add_column(name, no_wrap=index < 3, justify=justify, min_width=_compute_longest_word(cells))
    for row in rows:
        table.add_row(*map(Text, row))
    return [table]


def _describe(info: MethodInfo) -> list[RenderableType]:
    """Return the full description of a method."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from tokenprune.selection.docstrings import Docstring
    from tokenprune.selection.options import describe_type, get_option_types

    query, safe, merges = map(_format_flag, _get_flags(info))
    facts = {
        "acts": f"{info.site} ({info.site.description})",
        "paper": info.source,
        "default keep": _keep(info),
        "FLOPs left": _make_cost_formatter()(info),
        "query-aware": query,
        "prefix-cache-safe": safe,
        "merges": merges,
        "in a CUDA graph": _format_flag(info.capturable),
        "for": "videos only" if info.for_videos else "images and videos",
        "needs": ", ".join(sorted(info.needs)),
        "reads": ", ".join(sorted(info.observables)) or "no observables",
        "docs": f"docs/methods/{info.name}.md" if info.cls.__module__.startswith("tokenprune.") else "",
    }
    if info.query_aware and info.cls.query_free:
        facts["query-aware"] += "; not with " + ", ".join(
            f"{key}={value!r}" for key, value in info.cls.query_free.items()
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, value in facts.items():
        if value:
            table.add_row(Text(name, style="dim"), Text(value))
    doc = Docstring.from_class(info.cls)
    summary, *paragraphs = doc.paragraphs
    parts: list[RenderableType] = [Text(info.name, style="bold"), Text(summary), Text(), table]
    parts += [Text(f"\n{paragraph}") for paragraph in paragraphs]
    parts.append(Text("\nOptions:" if info.options else "\nNo options."))
    types = get_option_types(info.cls)
    for option, default in info.options.items():
        parts.append(Text(f"  {option}={default!r}: {describe_type(types[option])}", style="bold"))
        parts.append(Padding(doc.args.get(option, ""), (0, 0, 0, 4)))
    for title, lines in doc.sections.items():
        parts.append(Text(f"\n{title}:"))
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    return parts


def _compute_longest_word(texts: Iterable[str]) -> int:
    return max(len(word) for text in texts for word in text.split() or [""])


def _get_flags(info: MethodInfo) -> tuple[bool, bool, bool]:
    return info.query_aware, info.prefix_cache_safe, info.merges


def _format_flag(value: bool) -> str:
    return "yes" if value else "no"


def _keep(info: MethodInfo) -> str:
    # Methods with a variable count have a default that no image reaches.
    return "all" if info.default_keep > 1e5 else f"{info.default_keep:.2g}"


def _make_cost_formatter() -> Callable[[MethodInfo], str]:
    """Return a function from a method to its share of the prefill FLOPs at the default keep, or "" if it is unknown."""
    from tokenprune.errors import TokenPruneError
    from tokenprune.selection.sites.pixels import ImageChooser
    from tokenprune.settings.cost import LLAVA_7B as model
    from tokenprune.settings.cost import LLAVA_7B_LOAD as load

    total = model.compute_cost(load).flops

    def cost(info: MethodInfo) -> str:
        from tokenprune.budgets import Budget

        if info.default_keep == 1 or issubclass(info.cls, ImageChooser):
            return ""
        try:
            share = model.predict(load, [info.cls()], [Budget.from_keep(info.default_keep)]).flops / total
        except TokenPruneError:
            return ""
        return f"{share:.0%}"

    return cost
