# SPDX-License-Identifier: Apache-2.0
"""Describe methods, observables and families in tables. The site shows the properties of each method, the list of
methods, the observables, the limits of image processors and the models that vLLM serves (dev/mkdocs_hooks.py). The
table of families is written to docs/reference/families.md.

python dev/docs.py            # rewrite the table of families
python dev/docs.py --check    # exit with 1 if the table is outdated (a test checks the same)

The page of a method is `docs/methods/<name>.md`: a title and text. This module does not need torch.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenprune
from tokenprune.integrations.shared.checks import find_unsupported_reason
from tokenprune.methods.registry import MethodInfo
from tokenprune.models.families import REFUSED, REFUSED_IN_VLLM, SERVED, SUPPORTED
from tokenprune.models.families.tested import list_tested_sites
from tokenprune.models.token_counts import RULES, list_countable_processors
from tokenprune.selection.docstrings import Docstring
from tokenprune.selection.observable import Backend
from tokenprune.selection.observable_registry import find_observable
from tokenprune.selection.options import describe_type, get_option_types

FOLDER = Path(__file__).parent.parent / "docs/methods"
COMPARISON = FOLDER.parent.parent / "benchmarks/tokenprune_bench/tuning/for_comparison.json"
FAMILIES = FOLDER.parent / "reference/families.md"
SITES = {
    "PRE_ENCODER": "on pixels, before the vision tower",
    "IN_ENCODER": "inside the vision tower",
    "PRE_LLM": "between the vision tower and the decoder",
    "ATTENTION": "on the attention pattern of prefill",
    "IN_LLM": "inside the decoder, during prefill",
    "DECODE": "on the cache, during decoding",
}
SHORT_SITES = {
    "PRE_ENCODER": "on pixels", "IN_ENCODER": "in the tower", "PRE_LLM": "before the decoder",
    "ATTENTION": "on attention", "IN_LLM": "in the decoder", "DECODE": "during decoding",
}  # fmt: skip
YES = {True: "yes", False: "no"}
UNLIMITED = 1_000_000  # `default_keep` of methods that drop as many tokens as the content allows


def head(name: str) -> str:
    """Return the properties and the options of a method, from the registry."""
    info = tokenprune.method_info(name)
    properties = {
        "acts": f"{SITES[info.site]} (`{info.site}`)",
        "query-aware": YES[info.query_aware],
        "prefix-cache-safe": YES[info.prefix_cache_safe],
        "merges tokens": YES[info.merges],
        "in a CUDA graph": YES[info.capturable],
        "needs": ", ".join(f"`{need}`" for need in sorted(info.observables)) or "only the tokens",
        "default `keep`": format_default_keep(info.cls.default_keep),
        "source": info.source,
    }
    if info.site in ("PRE_ENCODER", "IN_ENCODER"):
        del properties["needs"]
    rows = (f"| {title} | {escape_cell(value)} |" for title, value in properties.items())
    lines = ["| | |", "|---|---|", *rows]
    if info.options:
        meanings = Docstring.from_class(info.cls).args
        types = get_option_types(info.cls)
        lines += ["", "| option | default | type | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{option}` | `{default!r}` | {escape_cell(describe_type(types[option]))} "
            f"| {escape_cell(meanings.get(option, ''))} |"
            for option, default in info.options.items()
        ]
    return "\n".join(lines)


def format_default_keep(keep: float | int) -> str:
    if keep == UNLIMITED:
        return "no limit"
    return f"{keep:g}" if isinstance(keep, float) else f"{keep:,} tokens per image"


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> list[Path]:
    """Return the pages of methods, sorted by name."""
    return sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")


def sites() -> str:
    """Return the figure of the sites with their methods. Only the built site has its file."""
    return "![Methods by site](../images/sites-methods.svg)"


def index() -> str:
    """Return the tables of methods except the methods of `comparison`, one table per site in the order of a call."""
    names = sorted(set(tokenprune.available_methods()) - _read_comparison().keys())
    infos = [tokenprune.method_info(name) for name in names]
    parts = []
    for site, title in SITES.items():
        if site_infos := [info for info in infos if info.site == site]:
            table = _format_methods("properties", site_infos, _list_properties)
            parts += [f"## {title[0].upper()}{title[1:]}", "", *table, ""]
    return "\n".join(parts)


def comparison() -> str:
    """Return the table of the methods that our models did not show to be better than both baselines."""
    evidence = _read_comparison()
    infos = map(tokenprune.method_info, sorted(evidence))
    return "\n".join(_format_methods("shown to beat", infos, lambda info: evidence[info.name]))


def _read_comparison() -> dict[str, str]:
    methods: dict[str, str] = json.loads(COMPARISON.read_text())["methods"]
    return methods


def _format_methods(title: str, infos: Iterable[MethodInfo], describe: Callable[[MethodInfo], str]) -> list[str]:
    """Return the lines of a table of methods.

    Args:
        title: Title of the last column.
        infos: Methods of the table.
        describe: Returns the cell of a method in the last column.
    """
    lines = [f"| method | summary | {title} |", "|---|---|---|"]
    for info in infos:
        summary = escape_cell(info.summary.split(". ")[0].rstrip("."))
        lines.append(f"| [`{info.name}`]({info.name}.md) | {summary} | {describe(info)} |")
    return lines


def _list_properties(info: MethodInfo) -> str:
    properties = {
        "query-aware": info.query_aware, "prefix-cache-safe": info.prefix_cache_safe, "merges": info.merges,
        "CUDA graph": info.capturable,
    }  # fmt: skip
    return ", ".join(name for name, holds in properties.items() if holds)


def observables() -> str:
    """Return the table of observables that a method may declare in its needs."""
    lines = ["| need | meaning | Hugging Face | vLLM | vLLM, in the model |", "|---|---|---|---|---|"]
    for name in tokenprune.selection.available_observables():
        observable = find_observable(name)
        if observable is None or name in ("hidden", "normed"):
            continue
        description = " ".join(inspect.cleandoc(type(observable).__doc__ or "").split("\n\n")[0].split())
        support = " | ".join(YES[backend in observable.backends] for backend in Backend)
        lines.append(f"| `{name}` | {escape_cell(description)} | {support} |")
    return "\n".join(lines)


def families() -> str:
    """Return the tables of supported and refused families. Families with equal cells share a row."""
    lines = ["| model type | methods may act | from transformers | notes |", "|---|---|---|---|"]
    rows: list[tuple[str, str]] = []
    owners: dict[str, tuple[str, str]] = {}  # by long note: the first family that has it, and its row
    for name, family in sorted(SUPPORTED.items()):
        row = f"{', '.join(f'`{site}`' for site in list_tested_sites(family))} | {family.since} |"
        owner, owner_row = owners.setdefault(family.note, (name, row)) if len(family.note) > 30 else (name, row)
        note = escape_cell(family.note) if owner_row == row else f"as `{owner}`"
        rows.append((name, f"{row} {note}"))
    lines += _group_rows(rows)
    lines += ["", "Refused with an error:", "", "| model type | reason |", "|---|---|"]
    lines += _group_rows((name, escape_cell(reason)) for name, reason in REFUSED.items())
    lines += [
        "",
        "## What leaves the tower",
        "",
        "Families whose towers can drop units with `towerdrop`, by pixels (`pixelprune`, `docprune`, "
        '`score="detail"`) and by keys (`saint`).',
        "",
        *list_droppable_towers(),
    ]
    return "\n".join(lines)


def list_droppable_towers() -> list[str]:
    """Return the table of the families whose towers can drop units, by the score of the units."""
    towerdrop: Any = tokenprune.method_info("towerdrop").cls
    by_pixels, by_states, by_keys = towerdrop(score="detail"), towerdrop(), tokenprune.method("saint")
    lines = ["| engine | by pixels or hidden states | only by hidden states | by keys |", "|---|---|---|---|"]
    for engine, backend, table in (("transformers", Backend.HF, SUPPORTED), ("vLLM", Backend.VLLM, SERVED)):
        families = table.values()
        states = {family.name for family in families if not find_unsupported_reason(by_states, family, backend)}
        pixels = {name for name in states if not find_unsupported_reason(by_pixels, name, backend)}
        keys = {family.name for family in families if not find_unsupported_reason(by_keys, family, backend)}
        sets = (pixels, states - pixels, keys - states, states - keys)
        both, only_states, only_keys, no_keys = (", ".join(f"`{name}`" for name in sorted(names)) for names in sets)
        by_key = f"these and {only_keys}" + (f", without {no_keys}" if no_keys else "")
        lines.append(f"| {engine} | {both} | {only_states} | {by_key} |")
    return lines


def limits() -> str:
    """Return the table of image processors whose tokens `max_visual_tokens` limits. Equal cells share a row."""
    settings = {"input": ("the size of each image", "those of smaller images"), "target": ("`size`", "squares")}
    cells = {}
    for name in list_countable_processors():
        rule = RULES[name]
        limit = rule.limit
        cells[name] = (limit.setting, limit.values) if limit is not None else settings[str(rule.resizing)]
    lines = ["| image processor | what is set | numbers of tokens |", "|---|---|---|"]
    return "\n".join(lines + _group_rows((name, " | ".join(row)) for name, row in cells.items()))


def _group_rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, cells in sorted(rows):
        groups.setdefault(cells, []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {cells} |" for cells, names in groups.items()]


def served() -> str:
    """Return the table of architectures that vLLM serves with the plugin."""
    titles = ("models", "architecture", "budget is for", "tower is read", "with `experimental_in_llm`")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, family in sorted(SERVED.items()):
        reads_tower, acts_inside = YES[family.patches is not None], YES[family.vllm.in_llm]
        budget = family.vllm.budget + (". Audio is kept" if family.vllm.audio else "")
        lines.append(f"| {family.vllm.models} | `{name}` | {budget} | {reads_tower} | {acts_inside} |")
    return "\n".join(lines)


def list_unserved() -> str:
    """Return the table of architectures that the plugin refuses by name."""
    groups: dict[str, list[str]] = {}
    for name, reason in REFUSED_IN_VLLM.items():
        groups.setdefault(reason, []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {escape_cell(reason)} |" for reason, names in groups.items()]
    return "\n".join(["| architecture | reason |", "|---|---|", *lines])


def generate() -> dict[Path, str]:
    """Return the expected text of each file with generated parts."""
    block = re.compile(r"(<!-- families:begin[^\n]*-->\n).*?(<!-- families:end -->)", re.DOTALL)
    return {FAMILIES: block.sub(lambda match: f"{match[1]}\n{families()}\n\n{match[2]}", FAMILIES.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = {path: text for path, text in generate().items() if not path.exists() or path.read_text() != text}
    if args.check:
        sys.exit(bool(stale))
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
