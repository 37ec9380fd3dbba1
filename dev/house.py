# SPDX-License-Identifier: Apache-2.0
"""Count files, lines and imports of each folder of the three distributions, and find what no layout should have.

python dev/house.py                # print the table, circles, imports that point upward, and sizes beside their limits
python dev/house.py --root DIR     # the same of another checkout

The site shows the table in docs/extend/architecture.md (dev/mkdocs_hooks.py). To fill it no file is imported: imports
are read from the code, except those under `if TYPE_CHECKING`, which never run. A circle is a set of files (or folders)
each of which reaches the others by imports; files that lie in a distribution's own folder, or beside the folders that a
contract of `[tool.importlinter]` in pyproject.toml names, count as folders of their own there. Upward is against the
layers of these contracts. Code is lines without blanks, comments and docstrings. What one cut runs through is measured
by dev/one_cut.py, which runs the checkout.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The package of each distribution, and the folder of the repository in which it lies.
PACKAGES = {"tokenprune": ".", "tokenprune_bench": "benchmarks", "tokenprune_demo": "demo"}
# All that a forward of a patched model may run, whatever the method and the family: what takes tokens out of a decoder,
# the parts that plug into it, the checks, and the notes on encoded images.
ENGINE = [
    f"tokenprune/integrations/hf/{room}"
    for room in ("engine", "forward", "sequence", "cache", "attention", "attention_observer.py", "checks.py")
]
# Limits of the trunk; see the head of the file.
SIZES = ROOT / "dev/sizes.toml"
Imports = set[tuple[str, str]]


def packages_of(root: Path) -> dict[str, Path]:
    """Return the packages of a checkout, each with the folder in which it lies; of an older one those that it has."""
    found = {package: root / folder for package, folder in PACKAGES.items()}
    return {package: folder for package, folder in found.items() if (folder / package).is_dir()}


def files_of(packages: Mapping[str, Path]) -> dict[str, Path]:
    """Return the file of each module of some packages, which lie in the folders given."""
    files = {}
    for package, folder in packages.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_of(files: Mapping[str, Path], for_types: bool = False) -> Imports:
    """Return the imports between modules: (importer, imported). for_types: those under TYPE_CHECKING too."""
    found = set()
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for name in _imported(ast.parse(path.read_text()), package, for_types):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                found.add((module, name))
    return found


def _imported(node: ast.AST, package: str, for_types: bool) -> Iterator[str]:
    """Yield what a part of a file imports: modules, or names in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*around, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.If) and not for_types and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for part in node.orelse:
            yield from _imported(part, package, for_types)
    else:
        for part in ast.iter_child_nodes(node):
            yield from _imported(part, package, for_types)


def code_lines(text: str) -> int:
    """Return how many lines of a file hold code: no blank ones, no comments, no docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED) and ast.get_docstring(node)]
    docs = {line for node in nodes for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in _NO_CODE]
    return len({line for one in tokens for line in range(one.start[0], one.end[0] + 1)} - docs)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def measure(packages: Mapping[str, Path], open_folders: Collection[str] = ()) -> dict[str, Any]:
    """Return the numbers of some packages: of each folder its files, its lines, and its imports (within it, out of it,
    into it), and the circles.

    open_folders: as modules; files in them count as folders of their own in circles, as those of a package itself.
    """
    files = files_of(packages)
    imports = imports_of(files)
    folder = {}
    for module, path in files.items():
        folder[module] = path.parent.relative_to(packages[module.partition(".")[0]]).as_posix()
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
    in_the_open = {name.replace(".", "/") for name in (*packages, *open_folders)}
    room = {module: module if at in in_the_open else at for module, at in folder.items()}
    rooms = {(room[one], room[other]) for one, other in imports if room[one] != room[other]}
    return {
        "folders": folders,
        "circles of files": circles(imports),
        "circles of files, types counted": circles(imports_of(files, for_types=True)),
        "circles of folders": circles(rooms),
    }


def circles(imports: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the sets of names that reach each other, the largest first."""
    direct = defaultdict(set)
    for one, other in imports:
        direct[one].add(other)
    reached = {}
    for one in list(direct):
        reached[one], ahead = set(), [one]
        while ahead:
            new = direct.get(ahead.pop(), set()) - reached[one]
            reached[one] |= new
            ahead += new
    found = {
        tuple(sorted(other for other in there if one in reached.get(other, ())))
        for one, there in reached.items()
        if one in there
    }
    return sorted((list(one) for one in found if len(one) > 1), key=lambda one: (-len(one), one))


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


def _entries(root: Path) -> list[str]:
    """Return the names in the root, but for those that .gitignore leaves out; git itself may be absent."""
    lines = (root / ".gitignore").read_text().splitlines()
    ignored = [".git", *(line.strip("/") for line in lines if line and not line.startswith("#"))]
    names = (path.name for path in root.iterdir())
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)]


def sizes(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Count the lines of code of each integration and the width of the interfaces, which dev/sizes.toml limits.

    Docstrings, comments and blank lines are not counted, so documentation has no limit.
    """
    lines: defaultdict[str, int] = defaultdict(int)
    for path in files_of({"tokenprune": root}).values():
        folders = path.relative_to(root).parent.parts
        if folders[:2] == ("tokenprune", "integrations") and folders[2:]:
            lines["/".join(folders[:3])] += code_lines(path.read_text())
    homes = next(
        node.value
        for node in ast.parse((root / "tokenprune/__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    forward = root / "tokenprune/integrations/hf/forward"
    width = {
        "public names": sum(len(names.elts) for names in homes.values if isinstance(names, ast.Tuple)),
        "arguments of Budget": _arguments(root / "tokenprune/budgets/budget.py", "Budget"),
        "fields of Call": _fields(forward / "call.py", "Call"),
        "moments of Part": _moments(forward / "part.py"),
        "entries of the root": len(_entries(root)),
    }
    return {"lines": dict(sorted(lines.items())), "width": width}


def count_floors(root: Path = ROOT) -> int:
    """Count the rooms of the package on the longest chain of imports between them."""
    imports = imports_of(files_of({"tokenprune": root}))
    below = defaultdict(set)
    for importer, imported in imports:
        room, other = (name.split(".")[1:2] for name in (importer, imported))
        if room and other and room != other:
            below[room[0]].add(other[0])

    def height(room: str) -> int:
        return 1 + max(map(height, below.get(room, ())), default=0)

    return max(map(height, list(below)), default=1)


def measures(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Return the measures of the layout: what is counted -> (value, target)."""
    files = files_of(packages_of(root))
    lines = {module: len(path.read_text().splitlines()) for module, path in files.items()}
    adapter = _class(root / "tokenprune/integrations/hf/families/base.py", "Adapter")
    tests = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    entries = [path for path in (root / "tokenprune").iterdir() if path.name != "__pycache__"]
    return {
        "entries of tokenprune/": (len(entries), 15),
        "import floors of tokenprune/": (count_floors(root), 9),
        "imports that point upward": (len(upward(imports_of(files), contracts(root))), 0),
        "arguments of Budget": (_arguments(root / "tokenprune/budgets/budget.py", "Budget"), 8),
        "fields of Family": (_fields(root / "tokenprune/models/families/row.py", "Family"), 22),
        "methods of Adapter": (sum(isinstance(node, ast.FunctionDef) for node in adapter.body), 24),
        "longest MRO of a tower class": (longest_mro(root / "tokenprune/integrations"), 4),
        "lines of tokenprune/": (sum(n for name, n in lines.items() if name.partition(".")[0] == "tokenprune"), 45000),
        "lines of tests/": (tests, 58000),
    }


def longest_mro(folder: Path) -> int:
    """Return the length of the longest MRO of a class in a file whose path in `folder` names a tower.

    The class itself and all its ancestors count, those of other libraries too, but not `object`. Classes are matched by
    name.
    """
    trees = [(path.relative_to(folder), ast.parse(path.read_text())) for path in folder.rglob("*.py")]
    nodes = [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: [ast.unparse(base).partition("[")[0] for base in node.bases] for _, node in nodes}

    def find_ancestors(name: str) -> set[str]:
        return {name}.union(*(find_ancestors(base.rpartition(".")[2]) for base in bases.get(name, ())))

    return max(len(find_ancestors(node.name)) for path, node in nodes if "tower" in path.as_posix())


# Targets of the measures that dev/one_cut.py takes; see its docstring for what they count. Today's 13 files with about
# 3,090 lines are above the first two. Nine of them hold a moment or value of docs/extend/architecture.md each (engine,
# cuts, call, prompt_info, segments, plan, token_state, layer_inputs, trace) and have about 2,400 lines. The others are
# the adapter of the family, the checks of a call, the record on the encoder's output, and `run_eagerly`. Further merges
# would make files of 400 to 600 lines, and would not lower the number of lines.
ONE_CUT = {
    "files of one cut": 10,
    "lines of the files of one cut": 1700,
    "stays of the call in _activate": 16,
    "stays of the method in patch": 10,
}


def measure_cut(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Run dev/one_cut.py on a checkout, and return its measures: what is counted -> (value, target)."""
    paths = os.pathsep.join(map(str, (root, root / "tests/unit/support")))
    command = [sys.executable, str(ROOT / "dev/one_cut.py")]
    output = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    return {name: (value, ONE_CUT[name]) for name, value in json.loads(output.stdout).items()}


def _class(path: Path, name: str) -> ast.ClassDef:
    return next(one for one in ast.parse(path.read_text()).body if isinstance(one, ast.ClassDef) and one.name == name)


def _fields(path: Path, name: str) -> int:
    """Return the number of fields of a dataclass."""
    return sum(isinstance(one, ast.AnnAssign) for one in _class(path, name).body)


def _arguments(path: Path, name: str) -> int:
    """Return the number of arguments of the constructor of a dataclass: its fields without those of `init=False`."""
    values = [ast.unparse(one.value) for one in _class(path, name).body if isinstance(one, ast.AnnAssign) and one.value]
    return _fields(path, name) - sum("init=False" in value for value in values)


def _moments(path: Path) -> int:
    """Return the number of moments at which a part may act: attributes that are None where it does not."""
    values = [one.value for one in _class(path, "Part").body if isinstance(one, ast.AnnAssign)]
    return sum(isinstance(value, ast.Constant) and value.value is None for value in values)


def table(now: Mapping[str, Any]) -> str:
    """Return the table of a measurement, a sum for each package, and a note."""
    keys = ("files", "lines", "within", "out", "into")
    lines = ["| folder | files | lines | imports within | imports out | imports in |", "|---|---|---|---|---|---|"]
    for package in sorted({name.partition("/")[0] for name in now["folders"]}):
        own = {name: one for name, one in now["folders"].items() if name.partition("/")[0] == package}
        lines += [_row(f"`{name}`", [one[key] for key in keys]) for name, one in own.items()]
        sums = [sum(one[key] for one in own.values()) for key in keys]
        lines.append(_row(f"**all of {package}**", [f"**{one}**" for one in sums]))
    note = (
        "An import is a pair of files, one of which imports the other at run time; *out* leads into another folder, "
        f"*in* comes from one. Circles of files: {describe_type(now['circles of files'])}, with the imports of type "
        f"checkers {describe_type(now['circles of files, types counted'])}; of folders: "
        f"{describe_type(now['circles of folders'])}."
    )
    return "\n\n".join(["\n".join(lines), note])


def _row(name: str, cells: Iterable[object]) -> str:
    return f"| {' | '.join([name, *map(str, cells)])} |"


def in_numbers(root: Path = ROOT) -> dict[str, Any]:
    """Return the numbers of a checkout."""
    return measure(packages_of(root), [name for one in contracts(root) for name in one.get("containers", ())])


def contracts(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the contracts of import-linter of a checkout."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def describe_type(found: list[list[str]]) -> str:
    return f"{len(found)} ({sum(map(len, found))} in them)" if found else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="a checkout (default: this one)")
    root = parser.parse_args().root
    now = in_numbers(root)
    print(table(now))
    for name, found in now.items():
        if name.startswith("circles"):
            print(f"{name}: {len(found)}")
            for one in found:
                print("  " + ", ".join(one))
    against = upward(imports_of(files_of(packages_of(root))), contracts(root))
    print(f"imports upward: {len(against)}")
    for one, other in against:
        print(f"  {one} -> {other}")
    total = [0, 0]
    for folder in ENGINE:
        place = root / folder
        texts = [path.read_text() for path in (sorted(place.glob("*.py")) if place.is_dir() else [place])]
        counts = sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts))
        total = [one + more for one, more in zip(total, counts, strict=True)]
        print(f"{folder}: {counts[0]} lines, {counts[1]} of code")
    print(f"all that a forward may run: {total[0]} lines, {total[1]} of code")
    for name, (value, target) in (measures(root) | measure_cut(root)).items():
        print(f"{name}: {value} (target {target})")
    limits = tomllib.loads(SIZES.read_text())
    for kind, found in sizes(root).items():
        for name, number in found.items():
            print(f"{kind}, {name}: {number} of {limits[kind].get(name, 'none')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
