# SPDX-License-Identifier: Apache-2.0
"""Rehearse all GPU runs with --tiny, in an environment with the machine's package versions and without network.

    python benchmarks/experiments/gpu/rehearse.py --python python3.12 # creates .venv-gpu if missing, and the wheels

--vllm is a Python with vLLM's CPU build, for the tables h and j.

The script writes rehearsal.md beside this file: versions, and time and exit status of each file. It exits with 1 if a
file did not exit with 0, or if the environment has a package that the machine lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv-gpu/bin/python"
# numpy: Triton 3.6's interpreter, which runs without a GPU, does not support numpy 2.4.
THERE = (
    "torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "timm", "einops", "accelerate", "typer<0.25",
    "safetensors", "matplotlib", "scipy", "pytest", "hypothesis", "pillow", "numpy<2.4",
)  # fmt: skip
# Packages that the machine lacks; the packages above may install them as dependencies.
LACKS = (
    "annotated-types",
    "rich",
    "markdown-it-py",
    "mdurl",
    "datasets",
    "rapidfuzz",
    "vllm",
    "pydantic",
    "pydantic-core",
)
ASK = """
import importlib.metadata as m, json, platform
names = {package.metadata["Name"].lower(): package.version for package in m.distributions()}
print(json.dumps({"python": platform.python_version()} | names))
"""


def versions() -> dict[str, str]:
    return json.loads(subprocess.run([PYTHON, "-c", ASK], check=True, stdout=subprocess.PIPE, text=True).stdout)


def prepare(python: str) -> str:
    """Create the environment if it is missing, and the wheels. Return the output of wheels.py."""
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    if not PYTHON.exists():
        subprocess.run([python, "-m", "venv", ROOT / ".venv-gpu"], check=True)
        subprocess.run([*pip, "install", *THERE], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *LACKS], check=True)
    result = subprocess.run(
        [PYTHON, HERE / "wheels.py", "--there", PYTHON], check=True, stdout=subprocess.PIPE, text=True
    )
    return result.stdout.strip()


def rehearse(out: Path, python: Path | str, *tables: str) -> tuple[int, bool]:
    """Run table files with --tiny, by default all files that do not need vLLM.

    Return the exit status, and whether the network was off. vLLM's processes need the network.
    """
    command = [str(python), str(HERE / "run.py"), "--tiny", "--out", str(out), *tables]
    isolate = ["unshare", "--map-root-user", "--net"]
    offline = (
        not tables
        and bool(shutil.which("unshare"))
        and subprocess.run([*isolate, "true"], capture_output=True).returncode == 0
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([*isolate, *command] if offline else command, env=env).returncode, offline


def page(wheels: str, installed: dict[str, str], out: Path, offline: bool) -> str:
    """Return rehearsal.md."""
    log = [json.loads(line) for line in sorted((out / "log.jsonl").read_text().splitlines())]
    names = ["python", *(re.split("[=<]", name)[0] for name in THERE)]
    lines = [
        "# The last rehearsal",
        "",
        f"By `python benchmarks/experiments/gpu/rehearse.py` on {platform.machine()} with {os.cpu_count()} cores, no "
        f"GPU and {'no network' if offline else 'a network'}. Every file ran with `--tiny`. One-minute load: "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        f"- Versions: {', '.join(f'{name} {installed[name]}' for name in names)}.",
        f"- Missing packages: {', '.join(name for name in LACKS if name not in installed)}.",
        f"- Wheels: {wheels}.",
        "",
        "| file | rc | minutes | processor seconds | rows | failed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for entry in log:
        _, *rows = (json.loads(line) for line in (out / f"{entry['file']}.jsonl").read_text().splitlines())
        failed = sum("failed" in row for row in rows)
        minutes, cpu = f"{entry['seconds'] / 60:.1f}", f"{entry['cpu_seconds']:.0f}"
        lines.append(f"| `{entry['file']}` | {entry['rc']} | {minutes} | {cpu} | {len(rows)} | {failed} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="Python of the created environment")
    parser.add_argument("--vllm", default=str(ROOT / ".venv-vllm/bin/python"), help="Python of the tables h and j")
    args = parser.parse_args()
    wheels, installed = prepare(args.python), versions()
    print(wheels)
    if extra := [name for name in LACKS if name in installed]:
        raise SystemExit(f"The environment has {', '.join(extra)}, which the machine lacks. Uninstall them.")
    with tempfile.TemporaryDirectory() as folder:
        code, offline = rehearse(Path(folder), PYTHON)
        code = max(code, rehearse(Path(folder), args.vllm, "h", "j")[0])
        (HERE / "rehearsal.md").write_text(page(wheels, installed, Path(folder), offline), encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
