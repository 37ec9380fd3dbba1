# SPDX-License-Identifier: Apache-2.0
"""The field's words, one meaning each: replaced words do not come back, and a docstring opens with a verb or a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from each import each

ROOT = Path(__file__).parents[3]

# Pattern (case counts, unless it says otherwise), and what to use instead.
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
# Only in code.
CODE_WORDS = (
    (r"\b_?told\b", "a noun: record, host_args, tower_output; or the active verb"),
    (r"\bspelt\b", "canonical_spec, spelled"),
    (r"\b(behind|Behind) the cut\b", "after the cut"),
    (r"\bha(s|ve) the say\b", "decides"),
    (r"\breads_less\b", "fallback_options"),
    (r"\.without\((unknown|missing)\b", "fallback_hint("),
)
# What may stay, by the end of a file's path: words of users' questions, keys and names of files of data, which readers
# of those that exist would no longer find.
ALLOWED = {
    "dev/plain.py": (r"is told",),
    "view_select.py": (r"image\|picture\|photo", r'"pictures 1 and 3"'),
    "README.md": (r"heldout/pictures/",),
    "tokenprune_demo/heldout.py": (r'"picture"',),
    "lmms_eval/suite.py": (r'"picture"',),
    "benchmarks/experiments/serving.py": (r"What is in the picture\?",),
    "benchmarks/experiments/studies/guard_proof.py": (r'"pictures": \[FIRST',),
    # The function of benchmarks/experiments/training/make_heldout.py.
    "benchmarks/experiments/studies/tuner_promise.py": (
        r"\bone_of_each\b",
        r"head\['pictures'\]",
        r"pictures=args\.images",
    ),
}


def find_words(
    text: str, allowed: tuple[str, ...] = (), words: tuple[tuple[str, str], ...] = WORDS
) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, what to use instead) of a text."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern in allowed:
            line = re.sub(pattern, "", line)
        for pattern, instead in words:
            for match in re.finditer(pattern, line):
                yield number, match[0], instead


OPENING = re.compile(r"(What|Which|Where|Whether|Who|Whoever|Whose|How|When)\b")


def find_openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first line) of the docstrings of a module that open with a question word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and OPENING.match(text):
                yield node.body[0].lineno, text.splitlines()[0]


FOLDERS = ("tokenprune", "benchmarks", "demo", "dev")
PACKAGES = ("tokenprune", "benchmarks/tokenprune_bench", "demo/tokenprune_demo")
SHARED_CLASS_NAMES = {"Plan"}  # of two classes
TRAINING = ROOT / "benchmarks/experiments/training"  # its data are pictures that were drawn


def files() -> list[Path]:
    code = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    code = [path for path in code if not path.is_relative_to(TRAINING)]
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs/notebooks").glob("*.ipynb"))]
    return [*code, *pages, ROOT / "README.md"]


def package_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def allowed_in(path: Path) -> tuple[str, ...]:
    return tuple(one for end, patterns in ALLOWED.items() if path.as_posix().endswith("/" + end) for one in patterns)


def test_old_words_do_not_come_back() -> None:
    texts = [(path, WORDS, allowed_in(path)) for path in files()]
    texts += [(path, CODE_WORDS, ()) for path in package_files()]
    old = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}; use {instead}"
        for path, words, allowed in texts
        for line, word, instead in find_words(path.read_text(), allowed, words)
    ]
    assert not old, "old words (tests/unit/docs/test_words.py):\n" + "\n".join(old)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    openings = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in package_files()
        for line, text in find_openings(path.read_text())
    ]
    assert not openings, "\n".join(openings)


def test_a_name_means_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for path in package_files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: homes[name] for name in homes.keys() - SHARED_CLASS_NAMES if len(homes[name]) > 1}
    assert not twice, twice


@each("end", ALLOWED)
def test_what_is_allowed_is_there(end: str) -> None:
    """An entry that nothing needs any more leaves."""
    texts = [path.read_text() for path in files() if path.as_posix().endswith("/" + end)]
    unused = [one for one in ALLOWED[end] if not any(re.search(one, text) for text in texts)]
    assert texts and not unused, f"take {unused or end} out of ALLOWED"


def test_a_word_is_found_with_its_line_and_what_to_use() -> None:
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
