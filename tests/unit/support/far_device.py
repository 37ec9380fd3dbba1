# SPDX-License-Identifier: Apache-2.0
"""A simulated accelerator: tensors report another device but are computed on the CPU.

All operations that would make the host wait for a real device are counted: reading a value (`item`, `int`, `bool`,
`tolist`, `equal`), a result whose size depends on values (`nonzero`, boolean indexing, `unique`), every copy from or to
the host without `non_blocking`, and writing a number to one entry or by an index (`x[0] = 1`), which CUDA copies from
the host. Mixing devices raises, as on a real device.

The device is named "far", on a backend key that torch reserves for Python backends. After its first use torch treats it
as the machine's accelerator, so tests that use it skip on machines with a real accelerator.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import tokenprune

aten = torch.ops.aten
# Compare folders instead of names in a path: the checkout or its environment may be inside a folder of that name.
_LIBRARY, _TRANSFORMERS = (os.path.join(os.path.dirname(module.__file__), "") for module in (tokenprune, transformers))
# Operations whose results, or result sizes, depend on values on the device.
_READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.item}
_SIZED = {
    aten.nonzero, aten.masked_select, aten.unique_consecutive, aten.unique_dim, aten._unique2, aten._unique,
    aten.bincount, aten.nonzero_numpy,
}  # fmt: skip
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


@cache
def device() -> torch.device:
    """Return the simulated device. Skip the test if a real accelerator exists."""
    if torch.cuda.is_available():
        pytest.skip("the simulated device would replace the GPU as this process's accelerator")
    _setup_privateuseone_for_python_backend("far")
    # Code that saves the autocast state, such as gradient checkpointing, calls this.
    torch.get_device_module("far").get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return torch.device("far", 0)


class Far(Tensor):
    """A tensor on the simulated device; `near` holds its values."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Far:
        tensor = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=device(), requires_grad=values.requires_grad,
        )  # fmt: skip
        tensor.near = values
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Far({self.near!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __setitem__(self, index: Any, value: Any) -> None:
        indices = index if isinstance(index, tuple) else (index,)
        by_index = any(isinstance(item, (Tensor, list)) and not _is_bool(item) for item in indices)
        if not isinstance(value, Tensor) and (
            by_index or (len(indices) == self.ndim and set(map(type, indices)) <= {int})
        ):
            _watching[-1].note("copy to the device")
        super().__setitem__(index, value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.cpu().numpy(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise RuntimeError(f"{func} of a far tensor outside `counting()`")


class Syncs(TorchDispatchMode):
    """Runs operations of far tensors and records the operations that make the host wait, each as (operation, caller in
    tokenprune)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        far = any(isinstance(x, Far) for x in flat)
        target = kwargs.get("device")
        packet = func.overloadpacket
        if packet is aten._to_copy and target is not None and (target.type == "far") != far:
            if not kwargs.get("non_blocking"):
                self.note("copy to the host" if far else "copy to the device")
        elif far and packet is aten.copy_ and isinstance(args[0], Far) != isinstance(args[1], Far):
            self.note("copy")
        elif far and (
            packet in _READS | _SIZED or (packet is aten.repeat_interleave and kwargs.get("output_size") is None)
        ):
            self.note(str(packet))
        elif far and packet in _INDEXING and any(_is_bool(x) for x in args[1] if x is not None):
            # A mask with a single fill value becomes masked_fill, which does not wait.
            filled = packet not in (aten.index, aten._unsafe_index) and args[2].numel() == 1
            self.note(f"{packet} by booleans", 1 - filled)
        if far and packet is not aten._to_copy and packet is not aten.copy_:
            mixed = [x for x in flat if not isinstance(x, Far) and x.ndim]
            if mixed and not (packet in _INDEXING and all(any(x is y for y in args[1]) for x in mixed)):
                raise RuntimeError(f"{func}: tensors on the host and on the device")
            if mixed:
                self.note("copy to the device")  # an index on the host
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        result_is_far = target.type == "far" if target is not None else far
        near_args, near_kwargs = tree_map(_near, (args, kwargs))
        result = func(*near_args, **near_kwargs)
        if not result_is_far:
            return result

        def wrap_result(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            original = next((y for y in flat if isinstance(y, Far) and y.near is x), None)
            return Far(x) if original is None else original

        return tree_map(wrap_result, result)

    def note(self, operation: str, times: int = 1) -> None:
        frame = sys._getframe(1)  # traceback.extract_stack is too slow: it reads the source lines of every frame
        while frame is not None and not frame.f_code.co_filename.startswith((_LIBRARY, _TRANSFORMERS)):
            frame = frame.f_back
        ours = frame is not None and frame.f_code.co_filename.startswith(_LIBRARY)
        caller = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if ours else "the model"
        self.found += [(operation, caller)] * times

    @property
    def ours(self) -> Counter[tuple[str, str]]:
        """Return the counts of the library's syncs, by operation and caller."""
        return Counter(sync for sync in self.found if sync[1] != "the model")


_watching: list[Syncs] = []


def _is_bool(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _near(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


@contextmanager
def counting() -> Iterator[Syncs]:
    """Run operations of far tensors in a block and record its syncs."""
    device()
    syncs = Syncs()
    # Make torch.tensor(..., device=) dispatch its copy.
    before, original = torch._C._only_lift_cpu_tensors(), torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        # torch reads a list of device scalars one by one without dispatch.
        return original(tree_map(lambda x: x.item() if isinstance(x, Far) else x, data), *args, **kwargs)

    torch._C._set_only_lift_cpu_tensors(True)
    torch.tensor = tensor
    _watching.append(syncs)
    try:
        with syncs:
            yield syncs
    finally:
        torch.tensor = original
        _watching.remove(syncs)
        torch._C._set_only_lift_cpu_tensors(before)


def to_far(model: nn.Module) -> nn.Module:
    """Move the parameters and buffers of a model to the far device without a copy of the model."""
    with Syncs():
        _move(model)
    return model


def _move(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = nn.Parameter(Far(value.detach()), requires_grad=False)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = Far(value)


def far_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: Far(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
