# SPDX-License-Identifier: Apache-2.0
"""The cost that the plugin adds to a request in a worker, held without a clock: launches on the device, waits for it,
and calls of the library's functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("worker_costs.py")


def test_a_request_takes_no_more_than_the_table_says() -> None:
    """In a process of its own, where no engine of vLLM meets the pretended device."""
    done = subprocess.run([sys.executable, SCRIPT, "--most", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_stage_waits() -> None:
    table = json.loads(SCRIPT.with_suffix(".json").read_text())
    waits = {name: number for row in table.values() for name, number in row.items() if name.endswith("waits")}
    assert waits.keys() == {"prompt waits", "choice waits", "placing V1 waits", "placing V2 waits"}
    assert not any(waits.values())
