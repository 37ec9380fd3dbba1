# SPDX-License-Identifier: Apache-2.0
"""Run a measurement in a child process and read its rows: an engine of vLLM needs a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kit import ROOT

FOLDER = Path(__file__).parent / "vllm_kit"
MARK = "@@ "  # prefix of a row, as in vllm_kit/engine.py


def rows_of(script: str, name: str, tiny: bool) -> list[dict[str, Any]]:
    """Return the rows that `vllm_kit/SCRIPT.py NAME` prints.

    Any exception here also kills the child process group. Raises RuntimeError with the last line of output on failure.
    """
    command = [sys.executable, str(FOLDER / f"{script}.py"), name, *(["--tiny"] if tiny else [])]
    rows = []
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )  # fmt: skip
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(MARK):
                    rows.append(json.loads(line.removeprefix(MARK)))
            code = child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if code or not rows:
            log.seek(0)
            text = log.read().strip()
            print(text[-4000:])
            raise RuntimeError(f"{name} ended with {code}: {text.splitlines()[-1] if text else 'no output'}")
    return rows
