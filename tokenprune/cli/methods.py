# SPDX-License-Identifier: Apache-2.0
"""`tokenprune methods` and `families`: see what there is."""

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

WIDE = 150  # columns of a terminal from which a method's flags stand beside it
_COST = (
    "Keep: where none is given. FLOPs left: of tower and decoder in prefill at that keep, by closed forms, on "
    "LLaVA-1.5-7B with one image (576 visual tokens) and 64 tokens of text; what choosing takes is not in it, and a "
    "method whose number of tokens follows from content is taken to keep what it is asked for."
)
_MORE = "`tokenprune methods NAME` shows options, paper and cost; --site, --prefix-cache-safe and --video choose."
_SITES = ("PRE_ENCODER", "IN_ENCODER", "PRE_LLM", "ATTENTION", "IN_LLM", "DECODE")


def _complete_names(incomplete: str) -> list[str]:
    return [name for name in list_builtin_methods() if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show this one in full, with its options.", autocompletion=_complete_names)
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(help=f"Those that act at a site: {', '.join(_SITES)}.", autocompletion=complete_values(*_SITES)),
    ] = None,
    prefix_cache_safe: Annotated[
        bool,
        typer.Option("--prefix-cache-safe", help="Those whose choice depends on nothing that comes after the image."),
    ] = False,
    video: Annotated[bool, typer.Option("--video", help="Those that are for videos alone.")] = False,
) -> None:
    """List the methods that are registered, by the site where they act; or show one in full."""
    defer_torch()
    from rich.text import Text

    import tokenprune

    console = get_console()
    if name is not None:
        if site is not None or prefix_cache_safe or video:
            raise OptionError(f"{name} is one method: leave out --site, --prefix-cache-safe and --video")
        for part in _in_full(tokenprune.method_info(name)):
            console.print(part)
        return
    chosen = None if site is None else _site(site)
    infos = [
        info
        for info in map(tokenprune.method_info, tokenprune.available_methods())
        if chosen in (None, info.site)
        and (info.prefix_cache_safe or not prefix_cache_safe)
        and (info.for_videos or not video)
    ]
    if not infos:
        console.print("No method is all of that.")
        return
    wide = console.width >= WIDE
    for part in _table(infos) if wide else _by_site(infos):
        console.print(part)
    for note in (_COST, _MORE) if wide else (_MORE,):
        console.print(Text(note, style="dim"))


def _site(text: str) -> str:
    """Return the site that a text names; raise OptionError where it names none."""
    name = text.strip().upper().replace("-", "_")
    if name not in _SITES:
        raise OptionError(f"--site {text!r} is no site: use one of {', '.join(_SITES)}")
    return name


def _clause(info: MethodInfo) -> str:
    """Return the first clause of a method's summary."""
    return re.split(r"[:;,(]|\.(?:\s|$)", info.summary, maxsplit=1)[0].strip()


def _by_site(infos: Sequence[MethodInfo]) -> list[RenderableType]:
    """Return the methods of each site below its name, for a narrow terminal."""
    from rich.table import Table
    from rich.text import Text

    width = max(len(info.name) for info in infos)
    parts: list[RenderableType] = []
    for site in sorted({info.site for info in infos}, key=_SITES.index):
        mine = [info for info in infos if info.site == site]
        parts.append(Text(f"{site}: {mine[0].site.description}", style="bold"))
        table = Table.grid(padding=(0, 1), pad_edge=False)
        table.add_column(min_width=width + 1, no_wrap=True)
        table.add_column(min_width=_longest_word(map(_clause, mine)))
        for info in mine:
            table.add_row(Text(f" {info.name}"), Text(_clause(info)))
        parts.append(table)
    return parts


def _table(infos: Sequence[MethodInfo]) -> list[RenderableType]:
    """Return one table with all flags, for a wide terminal, or a pipe."""
    from rich.table import Table
    from rich.text import Text

    cost = _costs()
    names = ("method", "site", "keep", "FLOPs left", "query-aware", "prefix-cache-safe", "merges", "what it does")
    rows = [
        (info.name, str(info.site), _keep(info), cost(info), *map(_yes, _flags(info)), _clause(info)) for info in infos
    ]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        cells = [name, *(row[index] for row in rows)]
        justify: Literal["left", "right"] = "right" if name in ("keep", "FLOPs left") else "left"
        table.add_column(name, no_wrap=index < 3, justify=justify, min_width=_longest_word(cells))
    for row in rows:
        table.add_row(*map(Text, row))
    return [table]


def _in_full(info: MethodInfo) -> list[RenderableType]:
    """Return what is known of one method."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from tokenprune.cli.docstrings import Docstring
    from tokenprune.selection.options import describe_type, get_option_types

    query, safe, merges = map(_yes, _flags(info))
    facts = {
        "acts": f"{info.site} ({info.site.description})",
        "paper": info.source,
        "keep": f"{_keep(info)}, where none is given",
        "FLOPs left": _costs()(info),
        "query-aware": query,
        "prefix-cache-safe": safe,
        "merges": merges,
        "in a CUDA graph": _yes(info.capturable),
        "for": "videos alone" if info.for_videos else "images and videos",
        "reads": ", ".join(sorted(info.needs)) or "nothing of the model",
        "docs": f"docs/methods/{info.name}.md" if info.cls.__module__.startswith("tokenprune.") else "",
    }
    if info.query_aware and info.cls.query_free:
        facts["query-aware"] += "; not with " + ", ".join(f"{key}={one!r}" for key, one in info.cls.query_free.items())
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


def _longest_word(texts: Iterable[str]) -> int:
    return max(len(word) for text in texts for word in text.split() or [""])


def _flags(info: MethodInfo) -> tuple[bool, bool, bool]:
    return info.query_aware, info.prefix_cache_safe, info.merges


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _keep(info: MethodInfo) -> str:
    # Of a method whose count follows from content the default is a limit that no image reaches.
    return "all" if info.default_keep > 1e5 else f"{info.default_keep:.2g}"


def _costs() -> Callable[[MethodInfo], str]:
    """Return a function from a method to the share of a prefill's FLOPs that its default keep leaves; "" where the
    method promises none."""
    from tokenprune.errors import TokenPruneError
    from tokenprune.selection.sites.pixels import ImageChooser
    from tokenprune.settings.cost import LLAVA_7B as model
    from tokenprune.settings.cost import LLAVA_7B_LOAD as load

    whole = model.compute_cost(load).flops

    def cost(info: MethodInfo) -> str:
        from tokenprune.budgets import Budget

        if info.default_keep == 1 or issubclass(info.cls, ImageChooser):
            return ""
        try:
            left = model.predict(load, [info.cls()], [Budget.from_keep(info.default_keep)]).flops / whole
        except TokenPruneError:
            return ""
        return f"{left:.0%}"

    return cost
