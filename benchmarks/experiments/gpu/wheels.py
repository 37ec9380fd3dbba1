# SPDX-License-Identifier: Apache-2.0
"""Create the folder of wheels for a machine without network: requirements of the project and its tests that it lacks.

    python benchmarks/experiments/gpu/wheels.py --there .venv-gpu/bin/python

--there is a Python with the packages of that machine (rehearse.py creates one). Its pip reports the missing packages,
which are downloaded here. Wheels that are not pure Python are rejected, because they depend on the machine's system.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = ("pytest", "hypothesis", "cachetools")  # vLLM's plugin imports cachetools
LIMIT = 20 * 2**20


def required() -> list[str]:
    """Return the requirements of the library and of the tests on a GPU."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    transformers = next(one for one in project["optional-dependencies"]["hf"] if one.startswith("transformers"))
    return [*project["dependencies"], transformers, *TESTS]


def lacking(python: str) -> list[str]:
    """Return the packages that pip would install there, as `name==version`."""
    report = pip(python, "install", "--dry-run", "--quiet", "--report", "-", *required())
    packages = [entry["metadata"] for entry in json.loads(report)["install"]]
    return sorted(f"{package['name']}=={package['version']}" for package in packages)


def pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check(folder: Path) -> str:
    """Describe the folder's size. Raises SystemExit if it is too large or has wheels that are not pure Python."""
    files = sorted(folder.glob("*"))
    if other := [file.name for file in files if not file.name.endswith("none-any.whl")]:
        raise SystemExit(f"{', '.join(other)} is not pure Python and would have to be built for that machine.")
    size = sum(file.stat().st_size for file in files)
    if size > LIMIT:
        raise SystemExit(f"{folder} has {size / 2**20:.1f} MiB, and the limit is {LIMIT / 2**20:.0f} MiB.")
    return f"{len(files)} wheels, {size / 2**20:.2f} MiB: {', '.join(file.name for file in files)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--there", default=str(ROOT / ".venv-gpu/bin/python"))
    parser.add_argument("--to", type=Path, default=ROOT / "wheels")
    args = parser.parse_args()
    for old in args.to.glob("*.whl"):
        old.unlink()
    if names := lacking(args.there):
        arguments = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(args.to), *names]
        pip(args.there, "download", *arguments)
    print(check(args.to))


if __name__ == "__main__":
    main()
