# SPDX-License-Identifier: Apache-2.0
"""A model of the time that a computation takes on a GPU: its launches, each with the bytes and FLOPs that it needs.

    with OfflineDriver().compiling(H100), Counter() as counter:
        method.select(tokens)         # on meta tensors: no data, no GPU, nothing compiled
    counter.seconds(H100)

A launch takes as long as the slowest of four: its bytes at the memory's peak, its FLOPs at the peak of their dtype, its
steps that wait for one another, and what a launch takes at least. What the host does meanwhile is left out: in a
prefill it runs ahead of the GPU, and nothing here waits for it. Caches, tiles that hang over and clocks below the data
sheet's are left out too, so that times are what must be spent; `experiments/selection_cost.py --measure` tells how much
more is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from gpu_targets import GPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tokenprune.kernels.dispatch import Operation

# Of a launch behind others in a stream, with a kernel that does next to nothing: NVIDIA's blog, "Getting Started with
# CUDA Graphs" (2019): 3.8 µs each.
LAUNCH = 3.8e-6
# Of a step that waits for the one before it, within one program: a trip to memory and a sum over the block. Our guess.
STEP = 0.5e-6
# Operations of PyTorch that are several launches on a GPU.
SEVERAL = {"sort": 4, "topk": 3, "cumsum": 2, "nonzero": 3, "index_put_": 3, "searchsorted": 1}


@dataclass(frozen=True)
class Work:
    """Launches of one operation, and what they need together. kernel: whether it is one of Triton's."""

    name: str
    bytes: int
    flops: int = 0
    steps: int = 0
    launches: int = 1
    dtype: str = "float32"
    kernel: bool = False

    def seconds(self, gpu: GPU) -> float:
        arithmetic = self.flops / gpu.flops.get(self.dtype, gpu.flops["float32"])
        return max(self.launches * LAUNCH, self.bytes / gpu.bandwidth, arithmetic, self.steps * STEP)


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


# By kernel: (bytes, FLOPs, steps) from its arguments and those of the operation that launches it.


def _row_logits(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    rows = a["query"].shape[0] * a["heads"] * a["rows"]
    moved = size(a["key"], a["logits"]) + rows * a["width"] * a["query"].element_size()
    return moved, 2 * rows * a["keys"] * a["width"], 0


def _columns(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    pairs = a["query"].shape[0] * a["heads"] * a["queries"] * a["keys"] // (2 if a["CAUSAL"] else 1)
    return size(a["query"], a["key"], a["sums"]), 2 * pairs * a["width"], 0


def _best(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    return size(a["a"], a["b"], a["value"], a["place"]), 2 * len(a["a"]) * a["A"] * a["B"] * a["D"], 0


def _table(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    return size(a["x"], a["table"]), 2 * len(a["x"]) * a["N"] ** 2 * a["D"], 0


def _walk(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    return 4 * len(a["mask"]) * a["N"] * call[3], 0, 2 * call[3]  # a row of the table for each pick


def _step(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    return size(a["x"]) if a["step"] >= 0 else size(a["nearest"]), 2 * a["x"].numel(), 0


def _take(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    return size(a["score"], a["mask"], a["taken"]), 0, 35 * a["P"] * math.ceil(a["N"] / a["BLOCK"])


def _join(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    row = a["D"] * a["x"].element_size()
    return (len(a["source"]) + 2 * len(a["own"])) * row, 2 * len(a["source"]) * a["D"], 0


def _join_few(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    moved, flops, _ = _join(a, call)
    programs = len(a["own"]) * math.ceil(a["D"] / a["BLOCK"])
    return moved + size(a["target"]) * programs, flops, 2 * math.ceil(a["R"] / a["CHUNK"])


def _pair(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    moved = size(a["best"], a["partner"], a["keep"], a["source"], a["target"])
    return moved, 2 * len(a["best"]) * a["A"] ** 2, 1 if a["RANKED"] else math.ceil(a["A"] / a["CHUNK"])


def _rank(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    keys = size(a["group"], a["first"], a["second"])
    rows = math.ceil(a["N"] / a["BLOCK_I"])
    return keys * rows + size(a["out"]), 4 * len(a["group"]) * a["N"] ** 2, math.ceil(a["N"] / a["BLOCK_J"])


def _cover(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    return size(a["table"]), 2 * a["table"].numel(), 0


def _factor_row(a: dict[str, Any], call: tuple) -> tuple[int, int, int]:
    step, rows = max(0, a["step"]), len(a["b"]) * a["N"]
    return 4 * rows * (a["D"] + step), 2 * rows * (a["D"] + step), 0


COSTS: dict[str, Callable[[dict[str, Any], tuple], tuple[int, int, int]]] = {
    "_row_logits_kernel": _row_logits,
    "_row_weights_kernel": lambda a, call: (size(a["logits"], a["out"]), 0, 0),
    "_row_sums_kernel": _columns,
    "_column_means_kernel": _columns,
    "_best": _best,
    "_table": _table,
    "_walk": _walk,
    "_step": _step,
    "_take": _take,
    "_join": _join,
    "_join_few": _join_few,
    "_pair": _pair,
    "_rank": _rank,
    "_inverse_norm": lambda a, call: (size(a["x"], a["out"]), 2 * a["x"].numel(), 0),
    "_combine": lambda a, call: (size(a["value"], a["place"], a["best"], a["where"]), 0, a["parts"]),
    "_cosines": lambda a, call: (size(a["a"], a["b"], a["out"]), 2 * a["out"].numel() * a["D"], 0),
    "_destinations": lambda a, call: (size(a["assign"], a["mask"], a["places"], a["target"], a["out"]), 0, 0),
    "_sources": lambda a, call: (2 * size(a["value"], a["place"]), 0, 0),
    "_gain": _cover,
    "_cover": _cover,
    "_factor_row": _factor_row,
    "_partition": lambda a, call: (size(a["first"], a["order"]), 0, 2 * math.ceil(a["W"] / a["BLOCK"])),
    "_gather": lambda a, call: (2 * size(a["out"]), 0, 0),
}


class Counter(TorchDispatchMode):
    """Notes what would be launched on a GPU, by PyTorch and by our kernels, of what is computed in a `with` block."""

    def __enter__(self) -> Counter:
        self.works: list[Work] = []
        self._call: tuple = ()
        self._of_operation, self._of_kernel = Operation.__call__, triton.runtime.jit.JITFunction.run
        counter = self

        def operation(op: Operation, *args: Any, **kwargs: Any) -> Any:
            counter._call = args
            return (op.triton if op.takes(*args, **kwargs) else op.reference)(*args, **kwargs)

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            names = [parameter.name for parameter in kernel.params]
            counter._launched(kernel.__name__, dict(zip(names, args, strict=False)) | kwargs)

        Operation.__call__, triton.runtime.jit.JITFunction.run = operation, run
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        Operation.__call__, triton.runtime.jit.JITFunction.run = self._of_operation, self._of_kernel
        super().__exit__(*failure)

    def _launched(self, name: str, arguments: dict[str, Any]) -> None:
        moved, flops, steps = COSTS[name](arguments, self._call)
        first = next(value for value in arguments.values() if isinstance(value, Tensor))
        dtype = str(first.dtype).removeprefix("torch.")
        self.works.append(Work(name.strip("_"), moved, flops, steps, dtype=dtype, kernel=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if views or "empty" in name or name in ("detach", "_unsafe_view", "lift_fresh", "alias"):
            return out
        given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(one, Tensor)]
        if all(one.device.type == "cpu" for one in given):
            return out  # what the host plans by itself
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        dtype = str(given[0].dtype).removeprefix("torch.") if given else "float32"
        self.works.append(Work(name, size(*given), flops, 0, SEVERAL.get(name, 1), dtype))
        return out

    @property
    def launches(self) -> int:
        return sum(work.launches for work in self.works)

    def seconds(self, gpu: GPU) -> float:
        return sum(work.seconds(gpu) for work in self.works)
