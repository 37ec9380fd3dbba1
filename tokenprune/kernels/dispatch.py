# SPDX-License-Identifier: Apache-2.0
"""One name for each operation, after it a PyTorch reference and a Triton kernel.

    @operation(kernel="tokenprune.kernels.row_max_triton:row_max", limits=_limits)
    def row_max(x: torch.Tensor) -> torch.Tensor:
        \"\"\"What it computes; shapes, dtypes.\"\"\"
        return x.amax(dim=1)

Calling `row_max(x)` runs one of the two, `row_max.reference(x)` and `row_max.triton(x)` ask for one. The environment
variable TOKENPRUNE_KERNELS says which, and is read at every call:

    auto       (default) the kernel for tensors on a GPU, where Triton is installed and the kernel takes such input
    reference  PyTorch, always
    triton     the kernel, or an error that says why it cannot run

The module of a kernel, and Triton with it, is imported when it first runs, never by `import tokenprune`. Kernels have
no gradients.
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
    """Return all operations by name, those of modules that nobody imported yet too."""
    package = importlib.import_module("tokenprune.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.endswith("_triton"):
            importlib.import_module(f"tokenprune.kernels.{module.name}")
    return dict(sorted(OPERATIONS.items()))


def get_backend() -> str:
    """Return what TOKENPRUNE_KERNELS asks for; raise OptionError for what it does not know."""
    value = os.environ.get(VARIABLE, "auto")
    if value not in _CHOICES:
        raise OptionError(f"{VARIABLE}={value!r} is not known: set it to one of {', '.join(_CHOICES)}, or unset it")
    return value


@functools.cache
def has_triton() -> bool:
    """Return whether Triton can be imported; looked up once."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def uses_kernels(device: torch.device) -> bool:
    """Return whether kernels run, and are compiled at first, for tensors on a device."""
    return get_backend() == "triton" or (get_backend() == "auto" and device.type == "cuda" and has_triton())


@functools.cache
def _is_old(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < (8, 0)


def on_device_of_tensors(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return `launch` such that it runs with the GPU of its first CUDA tensor as the current one: Triton launches on
    the current GPU, whatever its tensors are on (those of a model that is spread over several)."""

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
    """A function of tensors with two implementations; see the module's text. Made by `@operation`."""

    def __init__(self, reference: Callable, kernel: str, limits: Callable[..., str | None] | None) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self._kernel, self._limits = kernel, limits

    @functools.cached_property
    def triton(self) -> Callable:
        """The function that launches the kernel, on the GPU of its tensors; its module is imported here."""
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
            return "its tensors are on several devices"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "gradients are wanted, which kernels do not have (use torch.no_grad)"
        return None if self._limits is None else self._limits(*args, **kwargs)

    def accepts(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the kernel takes input of such a kind and size, wherever it is."""
        return self._limits is None or self._limits(*args, **kwargs) is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation that TOKENPRUNE_KERNELS and the input lead to.

        Raises OptionError for a bad TOKENPRUNE_KERNELS, UnsupportedSetupError where it demands a kernel that cannot
        run.
        """
        wanted = os.environ.get(VARIABLE, "auto")
        if wanted == "reference" or (wanted == "auto" and not args[0].is_cuda):
            return self.reference(*args, **kwargs)
        get_backend()  # what is not known raises
        reason = self.get_unsupported_reason(*args, **kwargs)
        if reason is None:
            return self.triton(*args, **kwargs)
        if wanted == "auto":
            return self.reference(*args, **kwargs)
        raise UnsupportedSetupError(f"{self.name}: {VARIABLE}=triton, but {reason}; or set {VARIABLE}=auto")


def operation(
    *, kernel: str, limits: Callable[..., str | None] | None = None
) -> Callable[[Callable[..., Any]], Operation]:
    """Turn a PyTorch function into an `Operation`, listed in OPERATIONS under the function's name.

    kernel: "module:function" of what launches the Triton kernel, with the same parameters. limits: with the same
    parameters too; returns why the kernel does not take such input (a dtype, a width), or None.
    """

    def make(reference: Callable[..., Any]) -> Operation:
        made = OPERATIONS[reference.__name__] = Operation(reference, kernel, limits)
        return made

    return make
