# SPDX-License-Identifier: Apache-2.0
"""Dispatch of an operation between its kernel and its reference."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.kernels import dispatch
from tokenprune.kernels.dispatch import Operation


def double(x: Tensor, odd: bool = False) -> Tensor:
    """Return 2 * x."""
    return 2 * x


def kernel(x: Tensor, odd: bool = False) -> str:
    return "kernel"


@pytest.fixture
def op() -> Operation:
    return Operation(double, f"{__name__}:kernel", lambda x, odd=False: "x is odd" if odd else None)


def test_cpu_tensors_take_the_reference(op: Operation) -> None:
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert op.__doc__ == "Return 2 * x." and op.name == "double"


@pytest.mark.parametrize("value", ["", "Triton", "cuda"])
def test_unknown_backend_raises(op: Operation, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TOKENPRUNE_KERNELS", value)
    with pytest.raises(OptionError, match="auto, triton, reference"):
        op(torch.ones(2))


def test_triton_can_be_forced(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    assert op(torch.ones(2)) == "kernel"
    with pytest.raises(UnsupportedSetupError, match="x is odd"):
        op(torch.ones(2), odd=True)
    with pytest.raises(UnsupportedSetupError, match="no_grad"):
        op(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        assert op(torch.ones(2, requires_grad=True)) == "kernel"
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "reference")
    assert op(torch.ones(2)).tolist() == [2, 2]


def test_forced_kernel_that_cannot_run_raises(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPRUNE_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    with pytest.raises(TokenPruneError, match="TRITON_INTERPRET=1"):
        op(torch.ones(2))
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(TokenPruneError, match="not installed"):
        op(torch.ones(2))


def test_kernel_and_reference_have_the_same_parameters(kernel_device: torch.device) -> None:
    operations = dispatch.list_operations()
    assert {"attention_rows", "attention_column_means"} <= operations.keys()
    for name, op in operations.items():
        kernel_parameters, reference_parameters = (
            list(inspect.signature(f).parameters.values()) for f in (op.triton, op.reference)
        )
        assert [(p.name, p.kind, p.default) for p in kernel_parameters[: len(reference_parameters)]] == [
            (p.name, p.kind, p.default) for p in reference_parameters
        ], name
        assert op.__doc__, name


def test_limits_accept_the_parameters_of_the_function() -> None:
    """A GPU call passes its arguments on to the limits, positional or by keyword."""
    for op in dispatch.list_operations().values():
        if op._limits is None:
            continue
        kinds = {name: parameter.kind for name, parameter in inspect.signature(op.reference).parameters.items()}
        positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        keywords = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_POSITIONAL]
        for num_positional in range(1, len(positional) + 1):
            inspect.signature(op._limits).bind(*positional[:num_positional], **dict.fromkeys(keywords[num_positional:]))


def test_every_operation_has_a_case_in_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks" / "experiments" / "gpu")
    before = set(sys.modules)
    benchmark, compare = importlib.import_module("kernel_cases"), importlib.import_module("e_kernels").compare
    for name in set(sys.modules) - before:  # remove modules with generic names such as `common`
        monkeypatch.delitem(sys.modules, name)
    for name, op in dispatch.list_operations().items():
        cases = list(benchmark.CASES[name](torch.device("cpu"), True))
        assert cases, name
        for case in cases:
            assert compare(op.reference(*case.args, **case.kwargs), op(*case.args, **case.kwargs), 0) == (0, 0)
            assert case.bytes > 0


def test_triton_is_not_imported_before_a_kernel_runs() -> None:
    code = "import sys, tokenprune, tokenprune.kernels.dispatch; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unwritten_memory_is_marked(kernel_device: torch.device) -> None:
    assert torch.empty(5, device=kernel_device).isnan().all()
    assert (torch.empty(5, dtype=torch.long, device=kernel_device) == torch.iinfo(torch.long).max).all()


class OnGPU(Tensor):
    """A CPU tensor that reports a GPU as its device."""

    is_cuda, device = True, torch.device("cuda", 0)


class OnSecondGPU(OnGPU):
    device = torch.device("cuda", 1)


@pytest.mark.parametrize(("capability", "old"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_gpu_tensors_take_the_kernel(
    op: Operation, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], old: bool
) -> None:
    monkeypatch.delenv("TOKENPRUNE_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dispatch._is_old.cache_clear()
    x = torch.ones(2).as_subclass(OnGPU)
    try:
        if old:
            assert op(x).tolist() == [2, 2]
            monkeypatch.setenv("TOKENPRUNE_KERNELS", "triton")
            with pytest.raises(UnsupportedSetupError, match="older"):
                op(x)
            return
        assert op(x) == "kernel"
        assert op(x, odd=True).tolist() == [2, 2], "the reference replaces a kernel that cannot run"
        monkeypatch.setattr(dispatch, "has_triton", lambda: False)
        assert op(x).tolist() == [2, 2]
    finally:
        dispatch._is_old.cache_clear()


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])])
def test_kernel_runs_on_the_device_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, current: int, entered: list[int]
) -> None:
    active_devices, devices_at_launch = [], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        active_devices.append(index)
        try:
            yield
        finally:
            active_devices.pop()

    def launch(x: Tensor) -> str:
        devices_at_launch.append(list(active_devices))
        return "launched"

    monkeypatch.delenv("TOKENPRUNE_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_is_old", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    op = Operation(double, f"{__name__}:kernel", None)
    monkeypatch.setitem(vars(op), "triton", dispatch.on_device_of_tensors(launch))
    x = torch.ones(2).as_subclass(OnSecondGPU)
    assert op(x) == op.triton(x=x) == "launched"
    assert devices_at_launch == [entered] * 2 and not active_devices


def test_every_kernel_is_guarded(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A direct call of a kernel enters the device of its tensors; for CPU tensors CUDA is not called."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert op.triton(torch.ones(2)) == "kernel" and entered == []
    assert op.triton(torch.ones(2).as_subclass(OnSecondGPU)) == "kernel" and entered == [1]


def test_tensors_on_two_gpus_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Operation(double, f"{__name__}:kernel", None)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_is_old", lambda device: False)
    first, second = torch.ones(2).as_subclass(OnGPU), torch.ones(2).as_subclass(OnSecondGPU)
    assert "several devices" in op.get_unsupported_reason(first, second)
    assert op.get_unsupported_reason(second, second) is None
