# SPDX-License-Identifier: Apache-2.0
"""transformers' tensor parallelism in two processes on the CPU: both keep the tokens that one process would keep."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/unit/support"


def test_two_processes_keep_the_same_tokens(tmp_path: Path) -> None:
    """Started as torchrun starts them, without torchrun, which would import torch once more."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
              "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "tensor_parallel.py"), str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [out.count("agrees") for out, _ in said] == [3, 3]
