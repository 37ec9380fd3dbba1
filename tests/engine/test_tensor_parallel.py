# SPDX-License-Identifier: Apache-2.0
"""transformers' tensor parallelism in two processes on the CPU: both keep the tokens that one process would keep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests/support"


def test_two_processes_keep_the_same_tokens(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(SUPPORT / "tensor_parallel.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("agrees") == 6
