# SPDX-License-Identifier: Apache-2.0
"""The field's words, one meaning each: what was called otherwise once does not come back."""

from __future__ import annotations

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
# What may stay, by the end of a file's path: words of users' questions, keys and names of files of data, which readers
# of those that exist would no longer find.
ALLOWED = {
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


def old_words(text: str, allowed: tuple[str, ...] = ()) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, what to use instead) of a text."""
    for number, line in enumerate(text.splitlines(), 1):
        for one in allowed:
            line = re.sub(one, "", line)
        for pattern, instead in WORDS:
            for found in re.finditer(pattern, line):
                yield number, found[0], instead


FOLDERS = ("tokenprune", "benchmarks", "demo", "dev")
TRAINING = ROOT / "benchmarks/experiments/training"  # its data are pictures that were drawn


def files() -> list[Path]:
    code = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    code = [path for path in code if not path.is_relative_to(TRAINING)]
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs/notebooks").glob("*.ipynb"))]
    return [*code, *pages, ROOT / "README.md"]


def allowed_in(path: Path) -> tuple[str, ...]:
    return tuple(one for end, patterns in ALLOWED.items() if path.as_posix().endswith("/" + end) for one in patterns)


def test_old_words_do_not_come_back() -> None:
    found = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for line, word, instead in old_words(path.read_text(), allowed_in(path)):
            found.append(f"{name}:{line}: {word!r}; use {instead}")
    assert not found, "old words (tests/unit/docs/test_words.py):\n" + "\n".join(found)


@each("end", ALLOWED)
def test_what_is_allowed_is_there(end: str) -> None:
    """An entry that nothing needs any more leaves."""
    texts = [path.read_text() for path in files() if path.as_posix().endswith("/" + end)]
    unused = [one for one in ALLOWED[end] if not any(re.search(one, text) for text in texts)]
    assert texts and not unused, f"take {unused or end} out of ALLOWED"


def test_a_word_is_found_with_its_line_and_what_to_use() -> None:
    assert list(old_words("An image.\nTwo LostPictures, a film, the how-manieth\nA picture.")) == [
        (2, "Picture", "image"),
        (2, "film", "video"),
        (2, "how-manieth", "index of this ... in ..."),
        (3, "picture", "image"),
    ]
    assert list(old_words("what does the picture show?", (r"the picture show",))) == []
    assert [instead for *_, instead in old_words("sent(x); absent(x); latest; Late")] == ["AsyncValues", "to_device("]
