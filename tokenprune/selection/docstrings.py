# SPDX-License-Identifier: Apache-2.0
"""Read Google style docstrings."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from textwrap import dedent

_SECTION = re.compile(r"([A-Z][\w ]*):")
_ENTRY = re.compile(r"(\w+): +(.*)")
_EXAMPLE = (">>> ", "... ")


@dataclass(frozen=True)
class Docstring:
    """A parsed docstring. Line breaks inside a paragraph, an entry or a list item are removed.

    Args:
        paragraphs: The text before the first section; the first paragraph is the summary.
        args: Description of each parameter in the section "Args".
        sections: Lines of each other section, by title.
    """

    paragraphs: list[str]
    args: dict[str, str]
    sections: dict[str, list[str]]

    @classmethod
    def from_class(cls, item: type) -> Docstring:
        """Parse the docstring that a class defines itself."""
        return cls.from_text(vars(item).get("__doc__") or "")

    @classmethod
    def from_text(cls, text: str) -> Docstring:
        """Parse the text of a docstring."""
        blocks: dict[str, list[str]] = {"": []}
        title = ""
        for line in inspect.cleandoc(text).splitlines():
            if match := _SECTION.fullmatch(line):
                title = match[1]
                blocks[title] = []
            else:
                blocks[title].append(line)
        texts = {title: dedent("\n".join(lines)).strip("\n") for title, lines in blocks.items()}
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", texts.pop(""))]
        entries = map(_ENTRY.match, _join_indented(texts.pop("Args", "")))
        args = {match[1]: match[2] for match in entries if match}
        return cls(paragraphs, args, {title: _join_lines(text) for title, text in texts.items()})


def _join_indented(text: str) -> list[str]:
    """Join each entry with its continuation lines, which are indented."""
    entries: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        if line[0].isspace() and entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    return entries


def _join_lines(text: str) -> list[str]:
    """Join the lines of each list item or paragraph. The lines of examples, with their output, stay apart."""
    if text.startswith(_EXAMPLE):
        return text.splitlines()
    lines: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        if not lines or line.startswith("- "):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return lines
