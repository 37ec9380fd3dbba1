# SPDX-License-Identifier: Apache-2.0
"""Count the words of README and of the pages of docs/, as a reader sees them.

python dev/words.py    # the path, the largest pages, and all of docs/

A word contains a letter or a digit. Markup, targets of links, comments and lines of tables do not count. Cells of
tables, code and folded rows do.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The way from the front page to a server, in the order of the navigation (mkdocs.yml); the pages of methods follow it.
PATH = (
    "index.md",
    "start/install.md",
    "start/quickstart.md",
    "start/choose.md",
    "measure/bench.md",
    "measure/tune.md",
    "serving/start.md",
)


def words(text: str) -> int:
    """Return the number of words in a page of Markdown."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[a-z/][^>\n]*>|\]\([^)\n]*\)|\{ [^}\n]* \}", " ", text, flags=re.DOTALL)
    return sum(bool(re.search(r"[^\W_]", word)) for word in text.split())


def pages() -> dict[str, int]:
    """Return the words of each page of docs/, by its path in there."""
    docs = ROOT / "docs"
    return {path.relative_to(docs).as_posix(): words(path.read_text()) for path in sorted(docs.rglob("*.md"))}


def main() -> None:
    words_of_pages = pages()
    print(f"{words((ROOT / 'README.md').read_text()):7,} README.md")
    for name in PATH:
        print(f"{words_of_pages[name]:7,} {name}")
    print(f"{sum(words_of_pages[name] for name in PATH):7,} the path")
    for name in sorted(set(words_of_pages) - set(PATH), key=words_of_pages.get, reverse=True)[:20]:
        print(f"{words_of_pages[name]:7,} {name}")
    print(f"{sum(words_of_pages.values()):7,} docs/, {len(words_of_pages)} pages")


if __name__ == "__main__":
    main()
