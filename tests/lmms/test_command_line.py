# SPDX-License-Identifier: Apache-2.0
"""Test `python -m lmms_eval`. Its exit code is always 0, so the tests read its results file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import CPU, DEMO
from tokenprune_bench.lmms_eval import get_tasks_folder


def run(output: Path, args: str, *further: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Return the process, and the contents of its results files."""
    command = [sys.executable, "-m", "lmms_eval", "--model", "tokenprune", "--model_args", args]
    command += [
        "--include_path",
        str(get_tasks_folder()),
        "--tasks",
        "tokenprune_suite_plain",
        "--limit",
        "1",
        "--batch_size",
        "1",
    ]
    process = subprocess.run(
        [*command, "--output_path", str(output), *further],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return process, [json.loads(file.read_text()) for file in sorted(output.rglob("*_results.json"))]


def test_results_file(tmp_path: Path) -> None:
    args = f"base=llava_hf,method=divprune,keep=0.25,pretrained={DEMO},dtype=float32,{CPU}"
    process, files = run(tmp_path, args, "--log_samples")
    assert process.returncode == 0 and len(files) == 1, process.stdout + process.stderr
    (results,) = files
    throughput = results["throughput"]
    assert throughput["avg_visual_tokens_in"] == 256
    assert throughput["avg_visual_tokens_out"] == throughput["avg_visual_tokens_average"] == 64
    assert throughput["avg_keep_ratio"] == 0.25
    assert 0.2 < throughput["avg_prefill_flops_ratio"] < 0.3
    assert 0 < throughput["avg_kv_bytes"] < throughput["avg_kv_bytes_full"]
    assert throughput["avg_overhead_ms"] > 0 and throughput["avg_ttft_ms"] > 0
    assert throughput["avg_measured_requests"] == 8
    assert throughput["avg_tokenprune_word_plain/visual_tokens_out"] == 64
    assert 0 <= results["results"]["tokenprune_suite_plain"]["exact,none"] <= 1
    assert results["config"]["model_args"] == args
    assert len(list(tmp_path.rglob("*_samples_tokenprune_*_plain.jsonl"))) == 8


def test_an_error_is_in_the_log(tmp_path: Path) -> None:
    process, files = run(tmp_path, f"base=llava_hf,method=fastv,keep=0.25,layr=3,pretrained={DEMO},{CPU}")
    assert process.returncode == 0 and not files
    assert "OptionError: Unknown argument 'layr' for base=llava_hf: did you mean 'layer'?" in process.stderr
    assert "Error during evaluation: Unknown argument 'layr'" in process.stdout
