# SPDX-License-Identifier: Apache-2.0
"""Describe methods, observables and families in tables: for the site, which dev/mkdocs_hooks.py puts together, the
head of each method's page, the index of methods, the list of observables and what vLLM serves; and in
docs/reference/families.md the families.

python dev/docs.py            # rewrite the table of families
python dev/docs.py --check    # exit with 1 where it is not what this would write (the test suite checks the same)

A method's page is `docs/methods/<name>.md`: a title, and text written by hand. No torch is needed here.
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
from tokenprune.cli.docstrings import Docstring
from tokenprune.integrations.shared.checks import find_unsupported_reason
from tokenprune.methods.registry import MethodInfo
from tokenprune.models.families import REFUSED, REFUSED_IN_VLLM, SERVED, SUPPORTED
from tokenprune.models.families.tested import list_tested_sites
from tokenprune.selection.observable import Backend
from tokenprune.selection.observable_registry import find_observable
from tokenprune.selection.options import describe_type, get_option_types

FOLDER = Path(__file__).parent.parent / "docs/methods"
COMPARISON = FOLDER.parent.parent / "benchmarks/tokenprune_bench/tuning/for_comparison.json"
FAMILIES = FOLDER.parent / "reference/families.md"
SITES = {
    "PRE_ENCODER": "on pixels, before the vision tower",
    "IN_ENCODER": "inside the vision tower",
    "PRE_LLM": "between the vision tower and the language model",
    "ATTENTION": "on the attention pattern of prefill",
    "IN_LLM": "inside the language model, in prefill",
    "DECODE": "on the cache, while decoding",
}
YES = {True: "yes", False: "no"}


def head(name: str) -> str:
    """What the registry knows of a method."""
    info = tokenprune.method_info(name)
    rows = [
        ("acts", f"{SITES[info.site]} (`{info.site}`)"),
        ("query-aware", YES[info.query_aware]),
        ("prefix-cache-safe", YES[info.prefix_cache_safe]),
        ("merges tokens", YES[info.merges]),
        ("in a CUDA graph", YES[info.capturable]),
        ("needs", ", ".join(f"`{need}`" for need in sorted(info.needs)) or "nothing but the tokens"),
        ("`keep` by default", default_keep(info.cls.default_keep)),
        ("source", info.source),
    ]
    if info.site in ("PRE_ENCODER", "IN_ENCODER"):
        rows = [row for row in rows if row[0] != "needs"]
    lines = [cell(info.summary), "", "| | |", "|---|---|", *(f"| {a} | {cell(b)} |" for a, b in rows)]
    if info.options:
        meanings = Docstring.from_class(info.cls).args
        types = get_option_types(info.cls)
        lines += ["", "| option | default | takes | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{one}` | `{default!r}` | {cell(describe_type(types[one]))} | {cell(meanings.get(one, ''))} |"
            for one, default in info.options.items()
        ]
    return "\n".join(lines)


def default_keep(keep: float | int) -> str:
    """A share; or, of an int, tokens: more than any image has are all."""
    return f"{keep:g}" if isinstance(keep, float) else f"{keep:,} tokens an image"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> list[Path]:
    """Return the pages of methods, in order of their names."""
    return sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")


def sites() -> str:
    """Return the figure of the sites with their methods, which is a file of the built site alone."""
    return "![Each method at its site](../images/sites-methods.svg)"


def index() -> str:
    """Return the tables of methods, one for each site in the order in which data meets them, but for `comparison`."""
    names = sorted(set(tokenprune.available_methods()) - _behind().keys())
    infos = [tokenprune.method_info(name) for name in names]
    parts = []
    for site, title in SITES.items():
        if here := [info for info in infos if info.site == site]:
            parts += [f"## {title[0].upper()}{title[1:]}", "", *_table("properties", here, _properties), ""]
    return "\n".join(parts)


def comparison() -> str:
    """Return the table of the methods that our models did not show to be better than the baselines, and what they
    showed."""
    behind = _behind()
    return "\n".join(_table("shown to beat", map(tokenprune.method_info, sorted(behind)), lambda one: behind[one.name]))


def _behind() -> dict[str, str]:
    made: dict[str, str] = json.loads(COMPARISON.read_text())["methods"]
    return made


def _table(title: str, infos: Iterable[MethodInfo], last: Callable[[MethodInfo], str]) -> list[str]:
    """Return the lines of a table of methods. last: what stands in the last column, under the title."""
    lines = [f"| method | what it does | {title} |", "|---|---|---|"]
    for info in infos:
        summary = cell(info.summary.split(". ")[0].rstrip("."))
        lines.append(f"| [`{info.name}`]({info.name}.md) | {summary} | {last(info)} |")
    return lines


def _properties(info: MethodInfo) -> str:
    said = {"query-aware": info.query_aware, "prefix-cache-safe": info.prefix_cache_safe, "merges": info.merges,
            "CUDA graph": info.capturable}  # fmt: skip
    return ", ".join(name for name, holds in said.items() if holds)


def observables() -> str:
    """The rows of what a method may declare in its needs."""
    lines = ["| need | shape | what | Hugging Face | vLLM | vLLM, in the model |", "|---|---|---|---|---|---|"]
    for name in tokenprune.selection.available_observables():
        one = find_observable(name)
        if name in ("hidden", "normed"):
            continue
        said = " ".join(inspect.cleandoc(type(one).__doc__).split("\n\n")[0].split())
        shape, _, what = said.partition(": ")
        served = " | ".join(YES[backend in one.backends] for backend in Backend)
        lines.append(f"| `{name}` | {cell(shape)} | {cell(what)} | {served} |")
    return "\n".join(lines)


def families() -> str:
    """The table of families that work, and that of those that are refused; families of which the same is said share a
    row."""
    lines = ["| model type | methods may act | from transformers | notes |", "|---|---|---|---|"]
    said: list[tuple[str, str]] = []
    first: dict[str, str] = {}  # of a long note, who has it
    for name, one in sorted(SUPPORTED.items()):
        row = f"{', '.join(f'`{site}`' for site in list_tested_sites(one))} | {one.since} |"
        before = first.setdefault(one.note, row + name) if len(one.note) > 30 else row + name
        note = cell(one.note) if before.startswith(row) else f"as `{before.rpartition('|')[2]}`"
        said.append((name, f"{row} {note}"))
    lines += _grouped(said)
    lines += ["", "Refused, with the reason in the error:", "", "| model type | because |", "|---|---|"]
    lines += _grouped((name, cell(reason)) for name, reason in REFUSED.items())
    lines += [
        "",
        "## What leaves the tower",
        "",
        "Families with methods that drop tokens inside or before the tower. Pixels: `pixelprune`, `docprune`, "
        '`towerdrop` with `score="detail"`. Hidden states: `towerdrop`. Keys: `saint`.',
        "",
        *leaving(),
    ]
    return "\n".join(lines)


def leaving() -> list[str]:
    """Return the table of families with token dropping in the tower, by the data that the method reads."""
    drop: Any = tokenprune.method_info("towerdrop").cls
    by_pixels, by_states, by_keys = drop(score="detail"), drop(), tokenprune.method("saint")
    lines = ["| engine | pixels or hidden states | only hidden states | keys |", "|---|---|---|---|"]
    for engine, backend, rows in (("transformers", Backend.HF, SUPPORTED), ("vLLM", Backend.VLLM, SERVED)):
        left = sorted(one.name for one in rows.values() if not find_unsupported_reason(by_states, one, backend))
        pixels = [name for name in left if not find_unsupported_reason(by_pixels, name, backend)]
        keys = {one.name for one in rows.values() if not find_unsupported_reason(by_keys, one, backend)}
        found = (pixels, set(left) - set(pixels), keys - set(left), set(left) - keys)
        first, second, more, less = (", ".join(f"`{name}`" for name in sorted(names)) for names in found)
        others = f"these, and {more}" + (f", without {less}" if less else "")
        lines.append(f"| {engine} | {first} | {second} | {others} |")
    return lines


def _grouped(said: Iterable[tuple[str, str]]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for name, rest in sorted(said):
        rows.setdefault(rest, []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {rest} |" for rest, names in rows.items()]


def served() -> str:
    """Return the table of architectures that vLLM serves with the plugin."""
    lines = ["| models | architecture | budget is for | tower is read | with `experimental_in_llm` |", "|---" * 5 + "|"]
    for name, one in sorted(SERVED.items()):
        read, inside = YES[one.patches is not None], YES[one.vllm.in_llm]
        budget = one.vllm.budget + (". Audio stays" if one.vllm.audio else "")
        lines.append(f"| {one.vllm.models} | `{name}` | {budget} | {read} | {inside} |")
    return "\n".join(lines)


def list_unserved() -> str:
    """Return the table of architectures that the plugin refuses by name."""
    rows: dict[str, list[str]] = {}
    for name, reason in REFUSED_IN_VLLM.items():
        rows.setdefault(reason, []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {cell(reason)} |" for reason, names in rows.items()]
    return "\n".join(["| architecture | why not |", "|---|---|", *lines])


def written() -> dict[Path, str]:
    """Return every file that is generated in part, as it has to be."""
    block = re.compile(r"(<!-- families:begin[^\n]*-->\n).*?(<!-- families:end -->)", re.DOTALL)
    return {FAMILIES: block.sub(lambda match: f"{match[1]}\n{families()}\n\n{match[2]}", FAMILIES.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = {path: text for path, text in written().items() if not path.exists() or path.read_text() != text}
    if args.check:
        sys.exit(bool(stale))
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
