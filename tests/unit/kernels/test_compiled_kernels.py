# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for GPUs that are not there, without spilled registers, and within what was committed.

Triton was imported by this process to interpret kernels, so the compiling is done in another one.
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
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """script(name): a script of experiments/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks" / "experiments")):
            del sys.modules[name]


def ran(script: str, *arguments: str, fails: bool = False) -> str:
    """Return the output of a script of experiments/, in a process that compiles kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "experiments" / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *records = (json.loads(line) for line in path.read_text().splitlines())
    return first, records


def identity(record: dict[str, Any]) -> str:
    fields = ("kernel", "gpu", "warps", "stages", "constants", "ones", "divided", "types")
    return json.dumps([record[field] for field in fields], sort_keys=True)


def test_the_worst_program_of_each_kernel_compiles_within_its_budget(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """All programs are listed, so that one that is new, or made with other block sizes, is missed in the table; of each
    kernel the one nearest to its limits is compiled and compared with its record (all with --every-combination)."""
    table, path = ROOT / "benchmarks/results/kernels.jsonl", tmp_path / "kernels.jsonl"
    head, known = read(table)
    if head["triton"] != (here := importlib.import_module("triton").__version__):
        pytest.skip(f"the table is of triton {head['triton']}, and this is {here}, which counts other registers")
    few = [] if request.config.getoption("--every-combination") else ["--worst", "1"]
    ran("compile_kernels.py", *few, "--gpus", *head["gpus"], "--dtypes", *head["dtypes"], "--json", str(path))
    asked = read(path)[1]
    assert {identity(one) for one in asked} == {identity(one) for one in known}, "other programs: dev/measure kernels"
    compiled = [one for one in asked if "registers" in one]
    assert {one["kernel"] for one in compiled} == {one["kernel"] for one in known}
    assert all(one["spills"] == 0 for one in compiled)


def test_the_table_is_whole(script: Any) -> None:
    """Every kernel is in it for each GPU; nothing in it spills, or takes more than there is."""
    module, targets = script("compile_kernels"), script("gpu_targets")
    head, records = read(ROOT / "benchmarks/results/kernels.jsonl")
    kernels = {one["kernel"] for one in records}
    sources = "".join(path.read_text() for path in (ROOT / "tokenprune/kernels").glob("*_triton.py"))
    made = re.findall(r"@(?:triton\.)?jit.*\ndef (\w+)", sources)
    assert kernels == {name for name in made if re.search(rf"\b{name}\[", sources)}, "launched ones"
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} == set(head["gpus"]) == targets.GPUS.keys()
    assert {"float32", "float16", "bfloat16"} == set(head["dtypes"])
    assert {(one["kernel"], one["gpu"]) for one in records} == {(k, gpu) for k in kernels for gpu in head["gpus"]}
    assert [fault for one in records for fault in module.faults(one)] == []


def test_faults_are_found(script: Any) -> None:
    module = script("compile_kernels")
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
    for said, change in cases.items():
        found = module.faults(good | change, good)
        assert any(said in fault and "_k on sm_80" in fault for fault in found), said
    grown = [{"registers": 111}, {"size": 1251}, {"shared": 1025}]
    assert not any(module.faults(good | change) for change in grown), "without a budget there is nothing to grow past"


@each(
    ("gpu", "registers", "shared", "warps", "share"),
    [
        # NVIDIA's occupancy calculator: 2048 threads; 64 registers of 256 threads fit four times; 255 of 128, twice.
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
def test_occupancy(script: Any, gpu: str, registers: int, shared: int, warps: int, share: float) -> None:
    assert script("gpu_targets").GPUS[gpu].occupancy(registers, shared, warps) == share
