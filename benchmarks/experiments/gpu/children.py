# SPDX-License-Identifier: Apache-2.0
"""Rows that another process measures: an engine of vLLM has one to itself."""

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
MARK = "@@ "  # before a row, as vllm_kit/engine.py writes it


def rows_of(script: str, name: str, tiny: bool) -> list[dict[str, Any]]:
    """Return the rows that `vllm_kit/<script>.py <name>` says. Whatever ends this ends the process, and those that it
    began. Raises RuntimeError with its last words where it fails."""
    command = [sys.executable, str(FOLDER / f"{script}.py"), name, *(["--tiny"] if tiny else [])]
    found = []
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )  # fmt: skip
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(MARK):
                    found.append(json.loads(line.removeprefix(MARK)))
            code = child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if code or not found:
            log.seek(0)
            text = log.read().strip()
            print(text[-4000:])
            raise RuntimeError(f"{name} ended with {code}: {text.splitlines()[-1] if text else 'it said nothing'}")
    return found
