# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for absent GPUs, without spilled registers and within the committed budgets.

Triton was imported by this process to interpret kernels, so a subprocess compiles them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from each import each

pytest.importorskip("triton", reason="Triton is not installed, so there is no compiler to test with")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def import_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports an experiment script by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks" / "experiments")):
            del sys.modules[name]


def run_script(script: str, *arguments: str, fails: bool = False) -> str:
    """Run an experiment script in a process that compiles kernels and return its output."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "experiments" / script), *arguments]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert (completed.returncode != 0) == fails, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def read_table(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *records = (json.loads(line) for line in path.read_text().splitlines())
    return first, records


def get_identity(record: dict[str, Any]) -> str:
    fields = ("kernel", "gpu", "warps", "stages", "constants", "ones", "divided", "types")
    return json.dumps([record[field] for field in fields], sort_keys=True)


def test_the_worst_program_of_each_kernel_compiles_within_its_budget(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The table lists every program, and the worst program of each kernel compiles like its record.

    The worst program is the nearest to its limits; --every-combination compiles all programs.
    """
    table, path = ROOT / "benchmarks/results/kernels.jsonl", tmp_path / "kernels.jsonl"
    header, recorded = read_table(table)
    if header["triton"] != (installed := importlib.import_module("triton").__version__):
        pytest.skip(
            f"the table was compiled with triton {header['triton']}, and triton {installed} allocates other registers"
        )
    limit = [] if request.config.getoption("--every-combination") else ["--worst", "1"]
    run_script(
        "compile_kernels.py", *limit, "--gpus", *header["gpus"], "--dtypes", *header["dtypes"], "--json", str(path)
    )
    programs = read_table(path)[1]
    assert {get_identity(program) for program in programs} == {get_identity(program) for program in recorded}, (
        "other programs: dev/measure kernels"
    )
    compiled = [program for program in programs if "registers" in program]
    assert {program["kernel"] for program in compiled} == {program["kernel"] for program in recorded}
    assert all(program["spills"] == 0 for program in compiled)


def test_the_table_is_whole(import_script: Any) -> None:
    """The table has every kernel for each GPU, without spills and within the GPU's limits."""
    module, targets = import_script("compile_kernels"), import_script("gpu_targets")
    header, records = read_table(ROOT / "benchmarks/results/kernels.jsonl")
    kernels = {record["kernel"] for record in records}
    sources = "".join(path.read_text() for path in (ROOT / "tokenprune/kernels").glob("*_triton.py"))
    jitted = re.findall(r"@(?:triton\.)?jit.*\ndef (\w+)", sources)
    assert kernels == {name for name in jitted if re.search(rf"\b{name}\[", sources)}, "launched kernels"
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} == set(header["gpus"]) == targets.GPUS.keys()
    assert {"float32", "float16", "bfloat16"} == set(header["dtypes"])
    assert {(record["kernel"], record["gpu"]) for record in records} == {
        (k, gpu) for k in kernels for gpu in header["gpus"]
    }
    assert [fault for record in records for fault in module.faults(record)] == []


def test_faults_are_found(import_script: Any) -> None:
    module = import_script("compile_kernels")
    good = {
        "kernel": "_k", "gpu": "sm_80", "dtype": "float32", "model": "m", "spills": 0, "shared": 1024, "registers": 100,
        "size": 1000, "occupancy": 0.5, "grid": [9, 1, 1],
    }  # fmt: skip
    assert module.faults(good, good) == []
    cases = {
        "spills 8 bytes": {"spills": 8}, "of shared memory": {"shared": 166913}, "a grid of": {"grid": [9, 65536, 1]},
        "does not fit": {"occupancy": 0.0}, "111 registers, 100": {"registers": 111}, "1251 size": {"size": 1251},
        "1025 shared": {"shared": 1025},
    }  # fmt: skip
    for message, change in cases.items():
        faults = module.faults(good | change, good)
        assert any(message in fault and "_k on sm_80" in fault for fault in faults), message
    grown = [{"registers": 111}, {"size": 1251}, {"shared": 1025}]
    assert not any(module.faults(good | change) for change in grown), "growth is a fault only beside a recorded budget"


@each(
    ("gpu", "registers", "shared", "warps", "share"),
    [
        # NVIDIA's occupancy calculator: 2048 threads. 64 registers fit 4 blocks of 256 threads, 255 fit 2
        # blocks of 128.
        ("sm_80", 32, 0, 8, 1.0),
        ("sm_80", 64, 0, 8, 0.5),
        ("sm_80", 255, 0, 4, 0.125),
        ("sm_80", 32, 100 * 1024, 8, 0.125),
        ("sm_90", 128, 0, 8, 0.25),
        ("gfx942", 64, 0, 4, 1.0),
        ("gfx942", 128, 0, 4, 0.5),
        ("gfx942", 32, 32768, 4, 0.25),
    ],
)
def test_occupancy(import_script: Any, gpu: str, registers: int, shared: int, warps: int, share: float) -> None:
    assert import_script("gpu_targets").GPUS[gpu].occupancy(registers, shared, warps) == share
