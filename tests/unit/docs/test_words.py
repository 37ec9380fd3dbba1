# SPDX-License-Identifier: Apache-2.0
"""Replaced words of the project must not return, docstrings start with a verb or noun, and class names are unique."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from each import each

ROOT = Path(__file__).parents[3]

# (pattern, replacement). Patterns are case-sensitive unless they contain (?i).
WORDS = (
    (r"(?i)picture", "image"),
    (r"(?i)film", "video"),
    (r"(?i)how-manieth", "index of this ... in ..."),
    (r"\b(is|are) told\b", "gets, knows, or a passive with a subject"),
    (r"\bSeenError\b", "StopForward"),
    (r"\blook_ahead\b", "probe_layer"),
    (r"\bof_each_piece\b", "align_per_image"),
    (r"\bone_of_each\b", "keep_one_per_group"),
    (r"\bnumber_features\b", "index_placeholders"),
    (r"\bcounted_keep\b", "validate_selection"),
    (r"\bto_the_right\b", "right_align"),
    (r"\bleave_cache\b", "save_to_cache"),
    (r"\bLate\b", "AsyncValues"),
    (r"\bsent\(", "to_device("),
    (r"\bsettled\(", "finalize("),
    (r"\b(Subject|Outlook)\b", "Model, Estimate"),
)
# checked only in packages
CODE_WORDS = (
    (r"\b_?told\b", "a noun: record, host_args, tower_output; or the active verb"),
    (r"\bspelt\b", "canonical_spec, spelled"),
    (r"\b(behind|Behind) the cut\b", "after the cut"),
    (r"\bha(s|ve) the say\b", "decides"),
    (r"\breads_less\b", "fallback_options"),
    (r"\.without\((unknown|missing)\b", "fallback_hint("),
)
# Allowed patterns by the end of a file's path: words in users' questions, and keys or file names of existing data.
ALLOWED = {
    "view_select.py": (r"image\|picture\|photo", r'"pictures 1 and 3"'),
    "README.md": (r"heldout/pictures/",),
    "tokenprune_demo/heldout.py": (r'"picture"',),
    "lmms_eval/suite.py": (r'"picture"',),
    "benchmarks/experiments/serving.py": (r"What is in the picture\?",),
    "benchmarks/experiments/studies/guard_proof.py": (r'"pictures": \[FIRST',),
    # a function of benchmarks/experiments/training/make_heldout.py
    "benchmarks/experiments/studies/tuner_promise.py": (
        r"\bone_of_each\b",
        r"head\['pictures'\]",
        r"pictures=args\.images",
    ),
}


def find_words(
    text: str, allowed: tuple[str, ...] = (), words: tuple[tuple[str, str], ...] = WORDS
) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, replacement) of a text."""
    for line_number, line in enumerate(text.splitlines(), 1):
        for pattern in allowed:
            line = re.sub(pattern, "", line)
        for pattern, instead in words:
            for match in re.finditer(pattern, line):
                yield line_number, match[0], instead


OPENING = re.compile(r"(What|Which|Where|Whether|Who|Whoever|Whose|How|When)\b")


def find_openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first line) of docstrings that start with a question word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and OPENING.match(text):
                yield node.body[0].lineno, text.splitlines()[0]


FOLDERS = ("tokenprune", "benchmarks", "demo", "dev")
PACKAGES = ("tokenprune", "benchmarks/tokenprune_bench", "demo/tokenprune_demo")
SHARED_CLASS_NAMES = {"Plan"}  # two classes share this name
TRAINING = ROOT / "benchmarks/experiments/training"  # its data are drawn pictures


def list_files() -> list[Path]:
    code = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    code = [path for path in code if not path.is_relative_to(TRAINING)]
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs/notebooks").glob("*.ipynb"))]
    return [*code, *pages, ROOT / "README.md"]


def list_package_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def find_allowed(path: Path) -> tuple[str, ...]:
    return tuple(
        pattern for end, patterns in ALLOWED.items() if path.as_posix().endswith("/" + end) for pattern in patterns
    )


def test_replaced_words_are_not_used() -> None:
    texts = [(path, WORDS, find_allowed(path)) for path in list_files()]
    texts += [(path, CODE_WORDS, ()) for path in list_package_files()]
    old = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}; use {instead}"
        for path, words, allowed in texts
        for line, word, instead in find_words(path.read_text(), allowed, words)
    ]
    assert not old, "old words (tests/unit/docs/test_words.py):\n" + "\n".join(old)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    openings = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in list_package_files()
        for line, text in find_openings(path.read_text())
    ]
    assert not openings, "\n".join(openings)


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in list_package_files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: homes[name] for name in homes.keys() - SHARED_CLASS_NAMES if len(homes[name]) > 1}
    assert not twice, twice


@each("end", ALLOWED)
def test_exceptions_are_used(end: str) -> None:
    """Remove exceptions that no file needs."""
    texts = [path.read_text() for path in list_files() if path.as_posix().endswith("/" + end)]
    unused = [pattern for pattern in ALLOWED[end] if not any(re.search(pattern, text) for text in texts)]
    assert texts and not unused, f"remove {unused or end} from ALLOWED"


def test_find_words() -> None:
    assert list(find_words("An image.\nTwo LostPictures, a film, the how-manieth\nA picture.")) == [
        (2, "Picture", "image"), (2, "film", "video"), (2, "how-manieth", "index of this ... in ..."),
        (3, "picture", "image"),
    ]  # fmt: skip
    assert list(find_words("what does the picture show?", (r"the picture show",))) == []
    assert [instead for *_, instead in find_words("sent(x); absent(x); latest; Late")] == ["AsyncValues", "to_device("]
    source = '"""What a module is."""\nclass A:\n    """A noun."""\n    def f(self):\n        """Whether told."""\n'
    assert list(find_openings(source)) == [(1, "What a module is."), (5, "Whether told.")]
    code = source + "# the layer behind the cut; foretold\n"
    assert [line for line, *_ in find_words(code, words=CODE_WORDS)] == [5, 6]
    assert not OPENING.match("Whatever comes") and not OPENING.match("However")
