# SPDX-License-Identifier: Apache-2.0
"""Plain words in code: docstrings open with a verb or a noun phrase, and words of our own do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("tokenprune", "benchmarks/tokenprune_bench", "demo/tokenprune_demo")

OPENING = re.compile(r"(What|Which|Where|Whether|Who|Whoever|Whose|How|When)\b")
# Pattern, and what to use instead.
WORDS = (
    (r"\b_?told\b", "a noun: record, host_args, tower_output; or the active verb"),
    (r"\bspelt\b", "canonical_spec, spelled"),
    (r"\b(behind|Behind) the cut\b", "after the cut"),
    (r"\bha(s|ve) the say\b", "decides"),
    (r"\breads_less\b", "fallback_options"),
    (r"\.without\((unknown|missing)\b", "fallback_hint("),
)
# Names of two classes that are not apart yet; leaves with the second class.
SHARED = {"Plan"}


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first line) of the docstrings of a module that open with a question word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and OPENING.match(text):
                yield node.body[0].lineno, text.splitlines()[0]


def words(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, the word and what to use instead)."""
    for number, line in enumerate(source.splitlines(), 1):
        for pattern, instead in WORDS:
            for found in re.finditer(pattern, line):
                yield number, f"{found[0]!r}; use {instead}"


def check(find: Callable[[str], Iterator[tuple[int, str]]]) -> None:
    """Fail for what is found in the packages."""
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in find(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    check(openings)


def test_words_of_our_own_do_not_come_back() -> None:
    check(words)


def test_a_name_means_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: files for name, files in homes.items() if len(files) > 1 and name not in SHARED}
    assert not twice, "\n".join(f"{name}: {', '.join(files)}" for name, files in twice.items())


def test_an_opening_and_a_word_are_found() -> None:
    source = '"""What a module is."""\nclass A:\n    """A noun."""\n    def f(self):\n        """Whether told."""\n'
    assert list(openings(source)) == [(1, "What a module is."), (5, "Whether told.")]
    assert [line for line, _ in words(source + "# the layer behind the cut; foretold\n")] == [5, 6]
    assert not OPENING.match("Whatever comes") and not OPENING.match("However")
