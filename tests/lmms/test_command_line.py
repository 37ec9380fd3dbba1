# SPDX-License-Identifier: Apache-2.0
"""`python -m lmms_eval` as a user runs it. It ends with 0 whatever happened, so its results file is what counts."""

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
    """Return the process, and what the results files hold that it wrote."""
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
    done = subprocess.run(
        [*command, "--output_path", str(output), *further],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done, [json.loads(file.read_text()) for file in sorted(output.rglob("*_results.json"))]


def test_results_file(tmp_path: Path) -> None:
    args = f"base=llava_hf,method=divprune,keep=0.25,pretrained={DEMO},dtype=float32,{CPU}"
    done, files = run(tmp_path, args, "--log_samples")
    assert done.returncode == 0 and len(files) == 1, done.stdout + done.stderr
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
    done, files = run(tmp_path, f"base=llava_hf,method=fastv,keep=0.25,layr=3,pretrained={DEMO},{CPU}")
    assert done.returncode == 0 and not files
    assert "OptionError: Unknown argument 'layr' for base=llava_hf: did you mean 'layer'?" in done.stderr
    assert "Error during evaluation: Unknown argument 'layr'" in done.stdout
