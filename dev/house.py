# SPDX-License-Identifier: Apache-2.0
"""Count files, lines and imports of each folder of the package, and write them into docs/architecture.md.

python dev/house.py                  # write the table between its markers in docs/architecture.md
python dev/house.py --check          # exit with 1 where the page holds another table
python dev/house.py --before COMMIT  # write dev/house_before.json from that commit

An import counts once for each pair of modules, wherever in the file it stands; imports for type checking alone do not.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEFORE = ROOT / "dev/house_before.json"
PAGE = ROOT / "docs/architecture.md"
PACKAGE = "tokenprune"


def measure(root: Path) -> dict[str, Any]:
    """Return the counts of the package below `root`: of each folder its files, lines, and imports within it, into other
    folders and from them; and of the whole its folders' pairs and circles."""
    paths = {module_of(path.relative_to(root)): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    home = {name: path.parent.relative_to(root).as_posix() for name, path in paths.items()}
    edges = {(name, to) for name, path in paths.items() for to in imports(name, path, paths) if to != name}
    folders = {folder: dict(files=0, lines=0, within=0, out=0, into=0) for folder in sorted(set(home.values()))}
    for name, path in paths.items():
        folders[home[name]]["files"] += 1
        folders[home[name]]["lines"] += len(path.read_text().splitlines())
    for name, to in edges:
        if home[name] == home[to]:
            folders[home[name]]["within"] += 1
        else:
            folders[home[name]]["out"] += 1
            folders[home[to]]["into"] += 1
    return {"folders": folders, "modules_in_circles": in_circles(edges)}


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, an imported name's own module before its package."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in known or base in known:
                    yield full if full in known else base


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file, but for what stands under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from executed(node)


def in_circles(edges: set[tuple[str, str]]) -> int:
    """Return how many modules reach themselves by imports."""
    after: dict[str, set[str]] = {}
    for name, to in edges:
        after.setdefault(name, set()).add(to)
    return sum(name in reached(name, after) for name in after)


def reached(start: str, after: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(after[start])
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += after.get(one, ())
    return found


def table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the Markdown table of two measurements; a folder that one of them lacks has a dash there."""
    lines = ["| folder | files | lines | imports within | imports out | imports in |", "|---|---|---|---|---|---|"]
    keys = ("files", "lines", "within", "out", "into")
    for folder in sorted({*before["folders"], *now["folders"]}):
        pairs = [[one["folders"].get(folder, {}).get(key, "–") for one in (before, now)] for key in keys]
        lines.append(f"| `{folder}` | " + " | ".join(f"{old} → {new}" for old, new in pairs) + " |")
    sums = [sum((Counter(folder) for folder in one["folders"].values()), Counter()) for one in (before, now)]
    lines.append("| all | " + " | ".join(f"{sums[0][key]} → {sums[1][key]}" for key in keys) + " |")
    note = (
        f"Before → now; before is commit {before['commit'][:7]}. An import is a pair of modules, one of which imports "
        "the other at run time; *out* leads into another folder, *in* comes from one. Modules that reach themselves by "
        f"imports: {before['modules_in_circles']} → {now['modules_in_circles']}."
    )
    source = "By `python dev/house.py`; raw data: [dev/house_before.json](../dev/house_before.json) and the code."
    return "\n\n".join(["\n".join(lines), note, source])


def filled(page: str) -> str:
    """Return the page with the table of the code as it is now."""
    text = table(json.loads(BEFORE.read_text()), measure(ROOT))
    block = re.compile(r"(<!-- house:begin[^\n]*-->\n).*?(<!-- house:end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)


def at_commit(commit: str) -> dict[str, Any]:
    """Return the counts of an earlier commit."""
    full = subprocess.run(["git", "rev-parse", commit], cwd=ROOT, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "package.tar"
        subprocess.run(["git", "archive", "-o", archive, commit, PACKAGE], cwd=ROOT, check=True)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        return {"commit": full.stdout.strip(), **measure(Path(folder))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--before", metavar="COMMIT")
    args = parser.parse_args()
    if args.before:
        BEFORE.write_text(json.dumps(at_commit(args.before), indent=1) + "\n")
        return
    text = PAGE.read_text()
    made = filled(text)
    if args.check:
        sys.exit(made != text)
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
