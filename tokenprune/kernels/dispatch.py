# SPDX-License-Identifier: Apache-2.0
"""Dispatch of operations that have a PyTorch reference and a Triton kernel.

    @operation(kernel="tokenprune.kernels.row_max_triton:row_max", limits=_limits)
    def row_max(x: torch.Tensor) -> torch.Tensor:
        \"\"\"Return the maximum of each row, `[B]`.\"\"\"
        return x.amax(dim=1)

`row_max(x)` runs one of the two; `row_max.reference(x)` and `row_max.triton(x)` run a specific one. The environment
variable TOKENPRUNE_KERNELS selects the implementation, and is read at every call:

    auto       (default) the kernel for tensors on a GPU, if Triton is installed and the kernel supports the input
    reference  always PyTorch
    triton     always the kernel, or an error if it cannot run

Modules of kernels, and Triton with them, are imported when a kernel first runs. Kernels do not compute gradients.

To write a kernel: the reference is in `kernels/<name>.py`, the kernel and its launcher in `kernels/<name>_triton.py`.
`limits` receives the same arguments, and returns the reason why the kernel does not support them, or None. Add a case
with the required bytes and FLOPs to `benchmarks/experiments/gpu/kernel_cases.py`.

Without a GPU the tests run kernels in the interpreter of Triton. Set TRITON_INTERPRET=1 before Triton is imported. The
fixture `kernel_device` fills new memory with NaN, so a missing write is detected. The interpreter has limits:

- It is slow per block, so tests use odd shapes of a few dozen elements and small blocks.
- `tl.dot` is wrong for bfloat16, so launchers convert the input to float32 (`target_triton.py`).
- It does not show races, register spills or too little shared memory.

Lengths that change per prompt must be in `do_not_specialize`. Otherwise each length compiles a new kernel.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from tokenprune.errors import OptionError, UnsupportedSetupError

VARIABLE = "TOKENPRUNE_KERNELS"
_CHOICES = ("auto", "triton", "reference")

OPERATIONS: dict[str, Operation] = {}


def list_operations() -> dict[str, Operation]:
    """Return all operations by name. Imports every kernel module."""
    package = importlib.import_module("tokenprune.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.endswith("_triton"):
            importlib.import_module(f"tokenprune.kernels.{module.name}")
    return dict(sorted(OPERATIONS.items()))


def get_backend() -> str:
    """Return the value of TOKENPRUNE_KERNELS. Raises OptionError if it is unknown."""
    value = os.environ.get(VARIABLE, "auto")
    if value not in _CHOICES:
        raise OptionError(f"{VARIABLE}={value!r} is unknown. Set it to one of {', '.join(_CHOICES)}, or unset it.")
    return value


@functools.cache
def has_triton() -> bool:
    """Return True if Triton can be imported. The result is cached."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def uses_kernels(device: torch.device) -> bool:
    """Return True if operations on `device` run Triton kernels, which compile on first use."""
    return get_backend() == "triton" or (get_backend() == "auto" and device.type == "cuda" and has_triton())


@functools.cache
def _is_old(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 0)


def on_device_of_tensors(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `launch` to run with the GPU of its first CUDA tensor as the current device.

    Triton launches on the current GPU, but a model may be spread over several GPUs.
    """

    @functools.wraps(launch)
    def launch_there(*args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_cuda)
        index = next((tensor.device.index for tensor in tensors), None)
        if index is None or index == torch.cuda.current_device():
            return launch(*args, **kwargs)
        with torch.cuda.device(index):
            return launch(*args, **kwargs)

    return launch_there


class Operation:
    """A tensor function with a PyTorch reference and a Triton kernel, created by `@operation`.

    Args:
        reference: The PyTorch implementation.
        kernel: "module:function" that launches the kernel.
        limits: Function that returns why the kernel does not support an input, or None.
    """

    def __init__(self, reference: Callable, kernel: str, limits: Callable[..., str | None] | None) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self._kernel, self._limits = kernel, limits

    @functools.cached_property
    def triton(self) -> Callable:
        """The launch function of the kernel. First access imports its module."""
        module, _, name = self._kernel.partition(":")
        return on_device_of_tensors(getattr(importlib.import_module(module), name))

    def get_unsupported_reason(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why the kernel cannot run on this input, or None."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not has_triton():
            return "Triton is not installed (pip install triton)"
        devices = {tensor.device for tensor in tensors}
        on_gpu = [device for device in devices if device.type == "cuda"]
        if len(on_gpu) < len(devices) and os.environ.get("TRITON_INTERPRET") != "1":
            return "not all tensors are on a GPU (on CPU, kernels need a process started with TRITON_INTERPRET=1)"
        if True in map(_is_old, on_gpu):
            return "this GPU is older than Triton supports (compute capability 8.0)"
        if len(on_gpu) > 1:
            return "the input tensors are on several devices"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "an input requires gradients, which kernels do not compute (use torch.no_grad)"
        return None if self._limits is None else self._limits(*args, **kwargs)

    def accepts(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if the kernel supports the dtypes and sizes of this input, on any device."""
        return self._limits is None or self._limits(*args, **kwargs) is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation chosen by TOKENPRUNE_KERNELS and the input.

        Raises:
            OptionError: If TOKENPRUNE_KERNELS is unknown.
            UnsupportedSetupError: If TOKENPRUNE_KERNELS=triton and the kernel cannot run.
        """
        backend = os.environ.get(VARIABLE, "auto")
        if backend == "reference" or (backend == "auto" and not args[0].is_cuda):
            return self.reference(*args, **kwargs)
        get_backend()  # raises for an unknown value
        reason = self.get_unsupported_reason(*args, **kwargs)
        if reason is None:
            return self.triton(*args, **kwargs)
        if backend == "auto":
            return self.reference(*args, **kwargs)
        raise UnsupportedSetupError(f"{self.name}: {VARIABLE}=triton, but {reason}; or set {VARIABLE}=auto")


def operation(
    *, kernel: str, limits: Callable[..., str | None] | None = None
) -> Callable[[Callable[..., Any]], Operation]:
    """Turn a PyTorch function into an `Operation`, and register it in OPERATIONS under its name.

    Args:
        kernel: "module:function" that launches the Triton kernel. Its first parameters equal those of the reference.
        limits: Function with the same parameters. Returns why the kernel does not support an input (such as its
            dtype), or None.
    """

    def make(reference: Callable[..., Any]) -> Operation:
        operation_ = OPERATIONS[reference.__name__] = Operation(reference, kernel, limits)
        return operation_

    return make
