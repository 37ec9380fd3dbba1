# SPDX-License-Identifier: Apache-2.0
"""transformers' tensor parallelism in two processes on the CPU keeps the tokens of a single process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/unit/support"


def test_two_processes_keep_the_same_tokens(tmp_path: Path) -> None:
    """Processes get the environment of torchrun, without torchrun, which would import torch again."""
    with socket.socket() as free_socket:
        free_socket.bind(("localhost", 0))
        port = free_socket.getsockname()[1]
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
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out.count("agrees") for out, _ in outputs] == [3, 3]
