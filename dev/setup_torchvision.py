# SPDX-License-Identifier: Apache-2.0
"""Development set-up only: make torchvision importable with any build of torch.

The registry's torchvision is compiled for CUDA and fails to import with a CPU build of torch. In this case the script
copies ``_torchvision_cpu_shim.py`` to site-packages, with a ``.pth`` line that loads it in every process. Run it with
the environment's Python. It may run twice.
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
        print(f"torchvision: installed {SHIM}, because torch is a CPU build and torchvision is a CUDA build")
    if attempt.returncode:
        print(attempt.stderr, "torchvision does not import", sep="\n", file=sys.stderr)
    else:
        print("torchvision imports")
    return attempt.returncode


if __name__ == "__main__":
    sys.exit(main())
