# SPDX-License-Identifier: Apache-2.0
"""Development set-up only: make torchvision importable in this environment, whatever build of torch it holds.

torchvision's registry build is compiled for CUDA and does not import beside a CPU build of torch. Where so, this
copies ``_torchvision_cpu_shim.py`` into site-packages with a ``.pth`` line that loads it in every process.
Run with the environment's own Python; running it again changes nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SHIM = "_torchvision_cpu_shim"
CPU_TORCH = "import sys, torch; sys.exit(torch.version.cuda is not None)"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, because ``.pth`` files are read when Python starts."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def main() -> int:
    site_packages = Path(sysconfig.get_path("purelib"))
    line = site_packages / f"{SHIM}.pth"
    attempt = run("import torchvision.transforms.v2")
    if line.exists() or (attempt.returncode and run(CPU_TORCH).returncode == 0):
        shutil.copyfile(Path(__file__).with_name(f"{SHIM}.py"), site_packages / f"{SHIM}.py")
        line.write_text(f"import {SHIM}\n", encoding="utf-8")
        attempt = run("import torchvision.transforms.v2")
        print(f"torchvision: {SHIM} is in place, because torch is a CPU build and torchvision is not")
    if attempt.returncode:
        print(attempt.stderr, "torchvision does not import", sep="\n", file=sys.stderr)
    else:
        print("torchvision imports")
    return attempt.returncode


if __name__ == "__main__":
    sys.exit(main())
