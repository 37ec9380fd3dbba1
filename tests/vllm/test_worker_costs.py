# SPDX-License-Identifier: Apache-2.0
"""Cost of the plugin per request in a worker, measured without a clock: launches, waits, and calls of the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("worker_costs.py")


def test_costs_do_not_exceed_the_table() -> None:
    """The separate process keeps the simulated device away from vLLM's engines."""
    done = subprocess.run([sys.executable, SCRIPT, "--most", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_stage_synchronizes() -> None:
    table = json.loads(SCRIPT.with_suffix(".json").read_text())
    waits = {name: count for row in table.values() for name, count in row.items() if name.endswith("waits")}
    assert waits.keys() == {"prompt waits", "choice waits", "placing V1 waits", "placing V2 waits"}
    assert not any(waits.values())
