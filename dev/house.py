# SPDX-License-Identifier: Apache-2.0
"""Count files, lines and imports of each folder of the three distributions, and find faults of the layout.

python dev/house.py                # print the table, circles, imports that point upward, and sizes with their limits
python dev/house.py --root DIR     # print the numbers of another checkout

The site shows the table in docs/extend/architecture.md (dev/mkdocs_hooks.py). Imports are read from the code without
running it; imports under `if TYPE_CHECKING` do not count. A circle is a set of files (or folders) in which each file
reaches all others by imports. Files in the root of a distribution, or beside the folders named by a contract of
`[tool.importlinter]` in pyproject.toml, count as separate folders. Upward means against the layers of these
contracts. Lines of code exclude blank lines, comments and docstrings. dev/one_cut.py measures the files that run
during one cut.
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
# The package of each distribution, and its folder in the repository.
PACKAGES = {"tokenprune": ".", "tokenprune_bench": "benchmarks", "tokenprune_demo": "demo"}
# Files that a forward of any patched model may run: the decoder's engine, its parts, the checks, and the notes on
# encoded images.
ENGINE = [
    f"tokenprune/integrations/hf/{room}"
    for room in ("engine", "forward", "sequence", "cache", "attention", "attention_observer.py", "checks.py")
]
# Limits of the trunk; see the head of the file.
SIZES = ROOT / "dev/sizes.toml"
Imports = set[tuple[str, str]]


def packages_of(root: Path) -> dict[str, Path]:
    """Return the packages of a checkout with their folders. Packages missing in an older checkout are skipped."""
    package_folders = {package: root / folder for package, folder in PACKAGES.items()}
    return {package: folder for package, folder in package_folders.items() if (folder / package).is_dir()}


def files_of(packages: Mapping[str, Path]) -> dict[str, Path]:
    """Return the file of each module of the packages."""
    files = {}
    for package, folder in packages.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_of(files: Mapping[str, Path], for_types: bool = False) -> Imports:
    """Return pairs (importer, imported) of modules. `for_types` adds imports under TYPE_CHECKING."""
    pairs = set()
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for name in _imported(ast.parse(path.read_text()), package, for_types):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                pairs.add((module, name))
    return pairs


def _imported(node: ast.AST, package: str, for_types: bool) -> Iterator[str]:
    """Yield the modules, or names in modules, imported by a node."""
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
    """Return the number of lines of code of a file."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED) and ast.get_docstring(node)]
    docs = {line for node in nodes for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def measure(packages: Mapping[str, Path], open_folders: Collection[str] = ()) -> dict[str, Any]:
    """Return files, lines and imports (within, out, into) of each folder, and the circles.

    Args:
        packages: Folder of each package.
        open_folders: Modules. In circles, files directly in them, or directly in a package, count as separate folders.
    """
    files = files_of(packages)
    imports = imports_of(files)
    folder = {}
    for module, path in files.items():
        folder[module] = path.parent.relative_to(packages[module.partition(".")[0]]).as_posix()
    folders = {
        folder_name: dict(files=0, lines=0, within=0, out=0, into=0) for folder_name in sorted(set(folder.values()))
    }
    for module, path in files.items():
        folders[folder[module]]["files"] += 1
        folders[folder[module]]["lines"] += len(path.read_text().splitlines())
    for importer, other in imports:
        if folder[importer] == folder[other]:
            folders[folder[importer]]["within"] += 1
        else:
            folders[folder[importer]]["out"] += 1
            folders[folder[other]]["into"] += 1
    in_the_open = {name.replace(".", "/") for name in (*packages, *open_folders)}
    room = {module: module if folder_name in in_the_open else folder_name for module, folder_name in folder.items()}
    rooms = {(room[importer], room[other]) for importer, other in imports if room[importer] != room[other]}
    return {
        "folders": folders,
        "circles of files": circles(imports),
        "circles of files, types counted": circles(imports_of(files, for_types=True)),
        "circles of folders": circles(rooms),
    }


def circles(imports: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the sets of names that reach each other, the largest first."""
    direct = defaultdict(set)
    for importer, imported in imports:
        direct[importer].add(imported)
    reached = {}
    for start in list(direct):
        reached[start], ahead = set(), [start]
        while ahead:
            new = direct.get(ahead.pop(), set()) - reached[start]
            reached[start] |= new
            ahead += new
    members = {
        tuple(sorted(other for other in reachable if name in reached.get(other, ())))
        for name, reachable in reached.items()
        if name in reachable
    }
    return sorted((list(circle) for circle in members if len(circle) > 1), key=lambda circle: (-len(circle), circle))


def upward(imports: Imports, contracts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the imports that point to a higher layer, or to a sibling in an exclusive line of layers.

    Args:
        imports: Pairs (importer, imported).
        contracts: Contracts of import-linter. Only the type "layers" counts. The first line is the highest layer.
            Siblings in "a | b" must not import each other, siblings in "a : b" may.
    """
    violations = set()
    for contract in contracts:
        if contract.get("type") != "layers":
            continue
        for container in contract.get("containers") or [""]:
            layer_entries: dict[str, tuple[int, str, bool]] = {}
            for height, line in enumerate(contract["layers"]):
                apart = ":" not in line
                for name in line.replace("|", " ").replace(":", " ").split():
                    full = f"{container}.{name.strip('()')}".lstrip(".")
                    layer_entries[full] = (height, full, apart)
            for importer, other in imports:
                here, imported_layer = layer_of(importer, layer_entries), layer_of(other, layer_entries)
                if not here or not imported_layer or here[1] == imported_layer[1]:
                    continue
                if here[0] > imported_layer[0] or (here[0] == imported_layer[0] and here[2]):
                    violations.add((importer, other))
    return sorted(violations)


def layer_of(module: str, layer_entries: dict[str, tuple[int, str, bool]]) -> tuple[int, str, bool] | None:
    """Return the entry of the module, or of the nearest package around it with an entry."""
    while module:
        if module in layer_entries:
            return layer_entries[module]
        module = module.rpartition(".")[0]
    return None


def _entries(root: Path) -> list[str]:
    """Return the names in the root without those in .gitignore. Does not need git."""
    lines = (root / ".gitignore").read_text().splitlines()
    ignored = [".git", *(line.strip("/") for line in lines if line and not line.startswith("#"))]
    names = (path.name for path in root.iterdir())
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)]


def sizes(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return lines of code of each integration and sizes of the interfaces. dev/sizes.toml has their limits.

    Docstrings, comments and blank lines do not count, so documentation has no limit.
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
    """Return (value, target) of each measure of the layout."""
    files = files_of(packages_of(root))
    lines = {module: len(path.read_text().splitlines()) for module, path in files.items()}
    adapter = _class(root / "tokenprune/integrations/hf/families/base.py", "Adapter")
    tests = [path.read_text() for path in (root / "tests").rglob("*.py")]
    package = [path.read_text() for path in (root / "tokenprune").rglob("*.py")]
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
        "lines of tests/": (sum(len(text.splitlines()) for text in tests), 58000),
        # Docstrings with examples, and blank lines, are a third of the lines above and should not shrink.
        "lines of code of tokenprune/": (sum(map(code_lines, package)), 45000),
        "lines of code of tests/": (sum(map(code_lines, tests)), 58000),
    }


def longest_mro(folder: Path) -> int:
    """Return the length of the longest MRO of a class in the files of `folder` with "tower" in their path.

    The class and all ancestors except `object` count, also those in other libraries. Classes are matched by name.
    """
    trees = [(path.relative_to(folder), ast.parse(path.read_text())) for path in folder.rglob("*.py")]
    nodes = [(path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: [ast.unparse(base).partition("[")[0] for base in node.bases] for _, node in nodes}

    def find_ancestors(name: str) -> set[str]:
        return {name}.union(*(find_ancestors(base.rpartition(".")[2]) for base in bases.get(name, ())))

    return max(len(find_ancestors(node.name)) for path, node in nodes if "tower" in path.as_posix())


# Targets of the measures of dev/one_cut.py. The current 13 files (about 3,090 lines) exceed the first two. Nine files
# (about 2,400 lines) each contain a moment or value of docs/extend/architecture.md: engine, cuts, call, prompt_info,
# segments, plan, token_state, layer_inputs, trace. The others are the family's adapter, the checks of a call, the
# record of the encoder's output, and `run_eagerly`. Merging them would give files of 400 to 600 lines and would not
# remove lines.
ONE_CUT = {
    "files of one cut": 10,
    "lines of the files of one cut": 1700,
    "stays of the call in _activate": 16,
    "stays of the method in patch": 10,
}


def measure_cut(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Run dev/one_cut.py on a checkout and return (value, target) of each measure."""
    paths = os.pathsep.join(map(str, (root, root / "tests/unit/support")))
    command = [sys.executable, str(ROOT / "dev/one_cut.py")]
    output = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    return {name: (value, ONE_CUT[name]) for name, value in json.loads(output.stdout).items()}


def _class(path: Path, name: str) -> ast.ClassDef:
    return next(
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )


def _fields(path: Path, name: str) -> int:
    """Return the number of fields of a dataclass."""
    return sum(isinstance(node, ast.AnnAssign) for node in _class(path, name).body)


def _arguments(path: Path, name: str) -> int:
    """Return the number of constructor arguments of a dataclass: fields without `init=False`."""
    values = [
        ast.unparse(node.value) for node in _class(path, name).body if isinstance(node, ast.AnnAssign) and node.value
    ]
    return _fields(path, name) - sum("init=False" in value for value in values)


def _moments(path: Path) -> int:
    """Return the number of moments of `Part`: attributes with the default None."""
    values = [node.value for node in _class(path, "Part").body if isinstance(node, ast.AnnAssign)]
    return sum(isinstance(value, ast.Constant) and value.value is None for value in values)


def table(now: Mapping[str, Any]) -> str:
    """Return the table of a measurement, a sum for each package, and a note."""
    keys = ("files", "lines", "within", "out", "into")
    lines = ["| folder | files | lines | imports within | imports out | imports in |", "|---|---|---|---|---|---|"]
    for package in sorted({name.partition("/")[0] for name in now["folders"]}):
        folders_of_package = {
            name: counts for name, counts in now["folders"].items() if name.partition("/")[0] == package
        }
        lines += [_row(f"`{name}`", [counts[key] for key in keys]) for name, counts in folders_of_package.items()]
        sums = [sum(counts[key] for counts in folders_of_package.values()) for key in keys]
        lines.append(_row(f"**all of {package}**", [f"**{total}**" for total in sums]))
    note = (
        "An import is a pair of files: one imports the other at run time. *Out* counts imports of other folders, "
        f"*in* imports from other folders. Circles of files: {describe_type(now['circles of files'])}, "
        f"with the imports of type checkers {describe_type(now['circles of files, types counted'])}; of folders: "
        f"{describe_type(now['circles of folders'])}."
    )
    return "\n\n".join(["\n".join(lines), note])


def _row(name: str, cells: Iterable[object]) -> str:
    return f"| {' | '.join([name, *map(str, cells)])} |"


def in_numbers(root: Path = ROOT) -> dict[str, Any]:
    """Return the numbers of a checkout."""
    return measure(packages_of(root), [name for contract in contracts(root) for name in contract.get("containers", ())])


def contracts(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the contracts of import-linter of a checkout."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def describe_type(circles_of_type: list[list[str]]) -> str:
    return f"{len(circles_of_type)} ({sum(map(len, circles_of_type))} in them)" if circles_of_type else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="a checkout (default: this one)")
    root = parser.parse_args().root
    now = in_numbers(root)
    print(table(now))
    for name, items in now.items():
        if name.startswith("circles"):
            print(f"{name}: {len(items)}")
            for circle in items:
                print("  " + ", ".join(circle))
    against = upward(imports_of(files_of(packages_of(root))), contracts(root))
    print(f"imports upward: {len(against)}")
    for importer, imported in against:
        print(f"  {importer} -> {imported}")
    total = [0, 0]
    for folder in ENGINE:
        path = root / folder
        texts = [path.read_text() for path in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
        counts = sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts))
        total = [sum_so_far + more for sum_so_far, more in zip(total, counts, strict=True)]
        print(f"{folder}: {counts[0]} lines, {counts[1]} of code")
    print(f"all that a forward may run: {total[0]} lines, {total[1]} of code")
    for name, (value, target) in (measures(root) | measure_cut(root)).items():
        print(f"{name}: {value} (target {target})")
    limits = tomllib.loads(SIZES.read_text())
    for kind, items in sizes(root).items():
        for name, size in items.items():
            print(f"{kind}, {name}: {size} of {limits[kind].get(name, 'none')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
