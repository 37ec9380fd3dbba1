# SPDX-License-Identifier: Apache-2.0
"""Write "The house in numbers" of docs/architecture.md: files, lines and imports of each folder of the library, at an
earlier commit and now; print what no layout should have.

python dev/house.py                    # rewrite the table, and print circles and imports that point upward
python dev/house.py --check            # change nothing; exit with 1 if the table is out of date
python dev/house.py --before COMMIT    # take the numbers of "before" from that commit (dev/house_before.json)

An import counts wherever it stands in a file, but under `if TYPE_CHECKING`, which never runs. A circle is a set of
files (or folders) each of which reaches the others by imports; files that lie in `tokenprune/` itself, or beside the
folders that a contract of `[tool.importlinter]` in pyproject.toml names, count as folders of their own there. Upward is
against the layers of these contracts. Code is lines without blanks, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import grimp
import networkx

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/architecture.md"
BEFORE = Path(__file__).with_name("house_before.json")
BEGIN, END = "<!-- house:begin (dev/house.py) -->", "<!-- house:end -->"
PACKAGE = "tokenprune"
# The engine proper: what prunes a decoder, whatever the method and the family.
ENGINE = [f"tokenprune/integrations/hf/{room}" for room in ("decoder", "forward", "sequence", "cache", "attention")]
Imports = set[tuple[str, str]]


def imports_of(root: Path, package: str = PACKAGE) -> Imports:
    """Return the imports between the modules of the package that lies in `root`: (importer, imported)."""
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    finally:
        sys.path.remove(str(root))
    return {(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)}


def files_of(root: Path, package: str = PACKAGE) -> dict[str, Path]:
    """Return the file of each module of the package that lies in `root`."""
    files = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def code_lines(text: str) -> int:
    """Return how many lines of a file hold code: no blank ones, no comments, no docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED) and ast.get_docstring(node)]
    docs = {line for node in nodes for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in _NO_CODE]
    return len({line for one in tokens for line in range(one.start[0], one.end[0] + 1)} - docs)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def measure(root: Path, package: str = PACKAGE, open_folders: Collection[str] = ()) -> dict[str, Any]:
    """Return the numbers of the package that lies in `root`: of each folder its files, its lines, and its imports
    (within it, out of it, into it), and the circles.

    open_folders: as modules; files in them count as folders of their own in circles, as those of the package itself.
    """
    files, imports = files_of(root, package), imports_of(root, package)
    folder = {module: path.parent.relative_to(root).as_posix() for module, path in files.items()}
    folders = {one: dict(files=0, lines=0, within=0, out=0, into=0) for one in sorted(set(folder.values()))}
    for module, path in files.items():
        folders[folder[module]]["files"] += 1
        folders[folder[module]]["lines"] += len(path.read_text().splitlines())
    for one, other in imports:
        if folder[one] == folder[other]:
            folders[folder[one]]["within"] += 1
        else:
            folders[folder[one]]["out"] += 1
            folders[folder[other]]["into"] += 1
    in_the_open = {name.replace(".", "/") for name in (package, *open_folders)}
    room = {module: module if at in in_the_open else at for module, at in folder.items()}
    rooms = {(room[one], room[other]) for one, other in imports if room[one] != room[other]}
    return {"folders": folders, "circles of files": circles(imports), "circles of folders": circles(rooms)}


def circles(imports: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the sets of names that reach each other, the largest first."""
    found = networkx.strongly_connected_components(networkx.DiGraph(imports))
    return sorted((sorted(one) for one in found if len(one) > 1), key=lambda one: (-len(one), one))


def upward(imports: Imports, contracts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the imports that point from a lower layer to a higher one, or between siblings that do not import each
    other.

    contracts: of import-linter; those of the kind "layers" count. A line of layers is the highest first; "a | b" are
    siblings that do not import each other, "a : b" may.
    """
    found = set()
    for contract in contracts:
        if contract.get("type") != "layers":
            continue
        for container in contract.get("containers") or [""]:
            place: dict[str, tuple[int, str, bool]] = {}
            for height, line in enumerate(contract["layers"]):
                apart = ":" not in line
                for name in line.replace("|", " ").replace(":", " ").split():
                    full = f"{container}.{name.strip('()')}".lstrip(".")
                    place[full] = (height, full, apart)
            for one, other in imports:
                here, there = layer_of(one, place), layer_of(other, place)
                if not here or not there or here[1] == there[1]:
                    continue
                if here[0] > there[0] or (here[0] == there[0] and here[2]):
                    found.add((one, other))
    return sorted(found)


def layer_of(module: str, place: dict[str, tuple[int, str, bool]]) -> tuple[int, str, bool] | None:
    """Return the entry of `place` for the module, or the nearest package around it that has one."""
    while module:
        if module in place:
            return place[module]
        module = module.rpartition(".")[0]
    return None


def at_commit(commit: str) -> dict[str, Any]:
    """Return the numbers of the library as it was at `commit`."""
    packed = subprocess.run(
        ["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return {"commit": commit} | measure(Path(folder))


def table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the table of two measurements, and a note; a folder that one of them lacks has a dash there."""
    keys = ("files", "lines", "within", "out", "into")
    lines = ["| folder | files | lines | imports within | imports out | imports in |", "|---|---|---|---|---|---|"]
    for name in sorted({*before["folders"], *now["folders"]}):
        cells = [[one["folders"].get(name, {}).get(key, "–") for one in (before, now)] for key in keys]
        lines.append(f"| `{name}` | " + " | ".join(f"{old} → {new}" for old, new in cells) + " |")
    sums = [[sum(row[key] for row in one["folders"].values()) for one in (before, now)] for key in keys]
    lines.append("| all | " + " | ".join(f"{old} → {new}" for old, new in sums) + " |")
    circles = [
        f"{kind}: {' → '.join(in_words(one[f'circles of {kind}']) for one in (before, now))}"
        for kind in ("files", "folders")
    ]
    note = (
        f"Before → now; before is commit {before['commit']}. An import is a pair of files, one of which imports the "
        "other at run time; *out* leads into another folder, *in* comes from one. Circles of "
        + "; of ".join(circles)
        + "."
    )
    source = "By `python dev/house.py`; raw data: [dev/house_before.json](../dev/house_before.json) and the code."
    return "\n\n".join(["\n".join(lines), note, source])


def in_words(found: list[list[str]]) -> str:
    return f"{len(found)} ({sum(map(len, found))} in them)" if found else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    parser.add_argument("--before", metavar="COMMIT", help="take the left columns from this commit")
    options = parser.parse_args()
    if options.before:
        BEFORE.write_text(json.dumps(at_commit(options.before), indent=1) + "\n")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    now = measure(ROOT, open_folders=[name for one in contracts for name in one.get("containers", ())])
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    made = f"{head}{BEGIN}\n\n{table(json.loads(BEFORE.read_text()), now)}\n\n{END}{rest.partition(END)[2]}"
    if options.check:
        if made != text:
            print("docs/architecture.md is out of date: run python dev/house.py", file=sys.stderr)
        return int(made != text)
    PAGE.write_text(made)
    for name in ("circles of files", "circles of folders"):
        print(f"{name}: {len(now[name])}")
        for one in now[name]:
            print("  " + ", ".join(one))
    against = upward(imports_of(ROOT), contracts)
    print(f"imports upward: {len(against)}")
    for one, other in against:
        print(f"  {one} -> {other}")
    total = [0, 0]
    for folder in ENGINE:
        texts = [path.read_text() for path in sorted((ROOT / folder).glob("*.py"))]
        counts = sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts))
        total = [one + more for one, more in zip(total, counts, strict=True)]
        print(f"{folder}: {counts[0]} lines, {counts[1]} of code")
    print(f"the engine proper: {total[0]} lines, {total[1]} of code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
