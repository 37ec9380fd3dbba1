# SPDX-License-Identifier: Apache-2.0
"""Count constructions and names that make prose and code hard to read.

python dev/plain.py                                                # code, pages and notebooks
python dev/plain.py tokenprune/budgets --kinds docstrings --show 5 # marked lines of a folder
python dev/plain.py --max 5                                        # exit with 1 above 5 markers per 1,000 words

A marker is a construction that this repository once used 10 to 40 times as often as other libraries: relative clauses
instead of a noun, pronouns far from their noun, inverted negations, and everyday words with a private meaning. A marker
shows a sentence to look at. Rewrite the sentence with the noun of the field as its subject.

Markers per 1,000 words in other libraries (docstrings, comments, error messages; November 2026):

    kvpress                    1.3  0.4
    timm                       1.3  2.0  0.7
    scikit-image               1.9  2.5  0.7
    transformers (generation)  2.6  2.8  1.3
    peft                       2.9  2.6  3.9
    accelerate                 4.3  2.1  1.7
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("tokenprune", "benchmarks/tokenprune_bench", "benchmarks/experiments", "demo", "dev", "tests")
PAGES = ("docs", "README.md", "CONTRIBUTING.md")
# Markers per 1,000 words. Do not raise these limits.
LIMITS = {"docstrings": 5.0, "comments": 5.0, "strings": 5.0, "pages": 6.0}
# Assignments to NAMES in CODE_FOLDERS, all files together. Do not raise this limit.
MAX_NAMES = 40

MARKERS = {
    "what": r"\bwhat(ever)?\b(?![^.;:]*\?)",
    "those that": (r"\bthose (that|of|which|who|in|with|at|it)\b|\bthat of\b|\bones? that\b|\bthe one\b|\bthe ones\b"),
    "none, nothing": r"\bnone where\b|\bwhere there (is|are)\b|\bnothing\b",
    "preposition + which/whose": (
        r"\b(of|by|at|in|to|from|on|for|with|through|after|before|over) (which|whose|whom)\b"
    ),
    "is no": r"\b(is|are|was|were|has|have|takes?|makes?|needs?) no\b",
    "of its own": r"\bof (its|their) own\b|\bof (them|these|those|it)\b",
    "as it is": r"\bas (it|they) (is|are|was|were|do|does|goes|stands?)\b",
    "stands, lies": r"\bst(and|ood|ands)\b(?!-)|\blies?\b|\bgoes? by\b|\bcomes? (out|with|to)\b",
    "says, tells, knows": r"\b(says|tells|asks|knows|(is|are) (told|asked|said)|asked for)\b",
    "place": r"\bplaces?\b",
    "alone": r"\balone\b",
    "hand over": r"\bhand(s|ed|ing)? (over|on|to|out|back|it|them)\b|\b(is|are) handed\b",
    "is to be": r"\b(is|are|was|were) (not )?to be\b",
    "how many": r"\breturn how\b|\bhow many of\b|\bhow many\b(?![^.;:]*\?)",
}
# Names that do not describe a value. Other libraries use them fewer than 15 times together.
NAMES = frozenset(
    "one number found place most own given whole seen wanted real alike made at there near gone into of".split()
)
COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in MARKERS.items()}
CODE = re.compile(r"```.*?```|`[^`]*`|<[^>]+>|https?://\S+|\]\([^)]*\)|\{[^}]*\}", re.DOTALL)
FENCED = re.compile(r"```.*?```", re.DOTALL)
WORD = re.compile(r"[A-Za-z][a-z']+")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Passages = Iterator[tuple[int, str]]


def docstring_nodes(tree: ast.AST) -> list[ast.Constant]:
    """Return the string nodes that are docstrings."""
    nodes = []
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        value = first.value if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            nodes.append(value)
    return nodes


def docstrings(source: str) -> Passages:
    """Yield (line, text) for each docstring."""
    for node in docstring_nodes(ast.parse(source)):
        yield node.lineno, str(node.value)


def strings(source: str) -> Passages:
    """Yield (line, text) for each string literal of four words or more that is not a docstring."""
    tree = ast.parse(source)
    skipped = {id(node) for node in docstring_nodes(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and id(node) not in skipped else None
        if isinstance(text, str) and len(WORD.findall(text)) >= 4:
            yield node.lineno, text


def comments(source: str) -> Passages:
    """Yield (line, text) for each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def read_text(file: Path) -> str:
    """Return the text of a file, or the Markdown cells of a notebook."""
    text = file.read_text()
    if file.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def page_lines(text: str) -> Passages:
    """Yield (line, text) for each line of a Markdown page outside fenced code."""
    text = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for index, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("|---"):
            yield index, line


READERS = {"docstrings": docstrings, "comments": comments, "strings": strings, "pages": page_lines}


def assigned_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for each variable, parameter or function that is called like one of NAMES."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        else:
            continue
        if name in NAMES:
            yield node.lineno, name


def list_files(paths: Iterable[str | Path], *suffixes: str) -> list[Path]:
    """Return the files with one of the suffixes at or below the given paths, which are relative to the repository."""
    files: list[Path] = []
    for path in (ROOT / path for path in paths):
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in files if file.suffix in suffixes]


def count_markers(kind: str, files: Iterable[Path], show: int = 0) -> tuple[int, Counter[str]]:
    """Return the number of words of one kind of prose, and the number of hits of each marker.

    Args:
        kind: A key of READERS.
        files: Python files, or Markdown files and notebooks if kind is "pages".
        show: Number of marked lines to print per file.
    """
    num_words, hits = 0, Counter[str]()
    for file in files:
        shown = 0
        for line, text in READERS[kind](read_text(file)):
            plain = CODE.sub(" X ", text)
            num_words += len(WORD.findall(plain))
            for marker, pattern in COMPILED.items():
                if matches := pattern.findall(plain):
                    hits[marker] += len(matches)
                    if shown < show:
                        print(f"  {file.relative_to(ROOT)}:{line}: [{marker}] {' '.join(plain.split())[:160]}")
                        shown += 1
    return num_words, hits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=lambda path: Path(path).resolve())
    parser.add_argument("--kinds", default="docstrings,comments,strings,pages", help="kinds of prose to count")
    parser.add_argument("--show", type=int, default=0, help="print this many marked lines of each file")
    parser.add_argument("--max", type=float, help="exit with 1 if a kind has more markers per 1,000 words")
    args = parser.parse_args()
    exceeded = False
    for kind in args.kinds.split(","):
        paths = args.paths or (PAGES if kind == "pages" else CODE_FOLDERS)
        files = list_files(paths, *((".md", ".ipynb") if kind == "pages" else (".py",)))
        num_words, hits = count_markers(kind, files, args.show)
        density = 1000 * hits.total() / max(1, num_words)
        exceeded |= args.max is not None and density > args.max
        print(f"{kind:<12} {len(files):4} files {num_words:7} words {density:6.1f} markers per 1,000 words")
        for marker, count in hits.most_common(5):
            print(f"    {count:5}  {marker}")
    files = list_files(args.paths or CODE_FOLDERS, ".py")
    names = Counter(name for file in files for _, name in assigned_names(file.read_text()))
    print(f"names        {names.total()} assignments to listed names {dict(names.most_common(6))}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
