# SPDX-License-Identifier: Apache-2.0
"""Make the folder of wheels that travel to a machine without a network: what the project and its tests need, less what
is there.

    python benchmarks/experiments/gpu/wheels.py --there .venv-gpu/bin/python

--there: a Python with the packages of that machine (rehearse.py makes one). Its pip says what it lacks; that is
downloaded here. A wheel that is not pure Python is refused, since it would have to fit that machine's system.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = ("pytest", "hypothesis", "cachetools")  # the last by what vLLM's plugin imports
LIMIT = 20 * 2**20


def required() -> list[str]:
    """Return the requirements of the library and of the tests that run on a GPU."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    transformers = next(one for one in project["optional-dependencies"]["hf"] if one.startswith("transformers"))
    return [*project["dependencies"], transformers, *TESTS]


def lacking(python: str) -> list[str]:
    """Return what pip would install there, as `name==version`."""
    report = pip(python, "install", "--dry-run", "--quiet", "--report", "-", *required())
    found = [one["metadata"] for one in json.loads(report)["install"]]
    return sorted(f"{one['name']}=={one['version']}" for one in found)


def pip(python: str, *given: str) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *given]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check(folder: Path) -> str:
    """Return the folder's size in words. Raises SystemExit if it is too large, or holds what is not pure Python."""
    files = sorted(folder.glob("*"))
    if other := [one.name for one in files if not one.name.endswith("none-any.whl")]:
        raise SystemExit(f"not pure Python: {', '.join(other)}; it would have to be built for that machine")
    size = sum(one.stat().st_size for one in files)
    if size > LIMIT:
        raise SystemExit(f"{folder} holds {size / 2**20:.1f} MiB; {LIMIT / 2**20:.0f} may travel")
    return f"{len(files)} wheels, {size / 2**20:.2f} MiB: {', '.join(one.name for one in files)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--there", default=str(ROOT / ".venv-gpu/bin/python"))
    parser.add_argument("--to", type=Path, default=ROOT / "wheels")
    args = parser.parse_args()
    for old in args.to.glob("*.whl"):
        old.unlink()
    if names := lacking(args.there):
        given = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(args.to), *names]
        pip(args.there, "download", *given)
    print(check(args.to))


if __name__ == "__main__":
    main()
