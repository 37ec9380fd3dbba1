# SPDX-License-Identifier: Apache-2.0
"""Reads our docstrings for the API reference (mkdocs.yml): options become a list, the rest is Markdown already.

An option is a line that begins with `name:` or `name, name:`, where the names are parameters or attributes of the thing
described; what follows belongs to it, up to the next option or an empty line.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"(\w+(?:, \w+)*):\s+(.*)")
LABEL = re.compile(r"(Source|Differs from the paper):")


class Options(griffe.Extension):
    """Makes lists of the options that a docstring describes."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, names_of(obj))


def names_of(obj: griffe.Object) -> set[str]:
    """What the docstring of `obj` may describe."""
    if obj.is_function:
        return {parameter.name.lstrip("*") for parameter in obj.parameters}
    return set(obj.members) if obj.is_class else set()


def as_markdown(docstring: str, names: set[str]) -> str:
    """Return `docstring` with a list item for each of `names` that it describes."""
    lines, inside = [], False
    for line in docstring.splitlines():
        match = OPTION.match(line)
        if match and names.issuperset(match[1].split(", ")):
            if not inside and lines and lines[-1]:
                lines.append("")
            titles = ", ".join(f"`{name}`" for name in match[1].split(", "))
            line, inside = f"- {titles}: {match[2]}", True
        elif not line.strip():
            inside = False
        elif inside and line[0].isspace():
            line = f"    {line.strip()}"
        elif inside and line.startswith("Raises "):
            lines.append("")
            inside = False
        elif inside:
            line = f"    {line}"
        else:
            line = LABEL.sub(r"**\1:**", line)
        lines.append(line)
    return "\n".join(lines)
