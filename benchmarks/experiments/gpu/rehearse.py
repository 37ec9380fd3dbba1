# SPDX-License-Identifier: Apache-2.0
"""Rehearse both runs on a stand-in: an environment with exactly the machine's versions, no network, --tiny.

    python experiments/gpu/rehearse.py --python python3.12     # makes .venv-gpu where it is missing, and wheels

--vllm: a Python with vLLM's CPU build, which the tables h run in.

Writes rehearsal.md beside this file: versions, what each file took, and how it ended. It ends with 1 where one did not
end with 0, and where a package is there that the machine lacks.
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
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-gpu/bin/python"
# numpy: Triton 3.6 has an interpreter, for machines without a GPU, that does not run under 2.4.
THERE = (
    "torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "timm", "einops", "accelerate", "typer<0.25",
    "safetensors", "matplotlib", "scipy", "pytest", "hypothesis", "pillow", "numpy<2.4",
)  # fmt: skip
# Not there; some of them come along with what is.
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
names = {one.metadata["Name"].lower(): one.version for one in m.distributions()}
print(json.dumps({"python": platform.python_version()} | names))
"""


def versions() -> dict[str, str]:
    return json.loads(subprocess.run([PYTHON, "-c", ASK], check=True, stdout=subprocess.PIPE, text=True).stdout)


def prepare(python: str) -> str:
    """Make the stand-in where it is missing, and the wheels; return what wheels.py says."""
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    if not PYTHON.exists():
        subprocess.run([python, "-m", "venv", ROOT / ".venv-gpu"], check=True)
        subprocess.run([*pip, "install", *THERE], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *LACKS], check=True)
    made = subprocess.run(
        [PYTHON, HERE / "wheels.py", "--there", PYTHON], check=True, stdout=subprocess.PIPE, text=True
    )
    return made.stdout.strip()


def rehearse(out: Path, python: Path | str, *tables: str) -> tuple[int, bool]:
    """Run files with --tiny, all but those of vLLM where none is named; return how that ended, and whether without a
    network. vLLM's parts talk to each other through it."""
    command = [str(python), str(HERE / "run.py"), "--tiny", "--out", str(out), *tables]
    apart = ["unshare", "--map-root-user", "--net"]
    alone = (
        not tables
        and bool(shutil.which("unshare"))
        and subprocess.run([*apart, "true"], capture_output=True).returncode == 0
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([*apart, *command] if alone else command, env=env).returncode, alone


def page(wheels: str, there: dict[str, str], out: Path, alone: bool) -> str:
    """Return rehearsal.md."""
    log = [json.loads(line) for line in sorted((out / "log.jsonl").read_text().splitlines())]
    names = ["python", *(re.split("[=<]", name)[0] for name in THERE)]
    lines = [
        "# The last rehearsal",
        "",
        f"By `python benchmarks/experiments/gpu/rehearse.py`, {platform.machine()}, {os.cpu_count()} cores and no GPU, "
        f"{'without' if alone else 'with'} a network, every file with `--tiny`. Load of the last minute: "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        f"- Versions: {', '.join(f'{name} {there[name]}' for name in names)}.",
        f"- Not there: {', '.join(name for name in LACKS if name not in there)}.",
        f"- Wheels: {wheels}.",
        "",
        "| file | rc | minutes | processor seconds | rows | failed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in log:
        _, *rows = (json.loads(line) for line in (out / f"{one['file']}.jsonl").read_text().splitlines())
        failed = sum("failed" in row for row in rows)
        minutes, cpu = f"{one['seconds'] / 60:.1f}", f"{one['cpu_seconds']:.0f}"
        lines.append(f"| `{one['file']}` | {one['rc']} | {minutes} | {cpu} | {len(rows)} | {failed} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="of which the stand-in is made")
    parser.add_argument("--vllm", default=str(ROOT / ".venv-vllm/bin/python"), help="of the tables h")
    args = parser.parse_args()
    wheels, there = prepare(args.python), versions()
    print(wheels)
    if found := [name for name in LACKS if name in there]:
        raise SystemExit(f"the machine lacks {', '.join(found)}, the stand-in does not")
    with tempfile.TemporaryDirectory() as folder:
        code, alone = rehearse(Path(folder), PYTHON)
        code = max(code, rehearse(Path(folder), args.vllm, "h")[0])
        (HERE / "rehearsal.md").write_text(page(wheels, there, Path(folder), alone), encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
