# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for GPUs that are not present, through their launch functions, without launching them.

    driver = OfflineDriver()          # in a process that was started without TRITON_INTERPRET
    with driver.compiling(GPUS["sm_90"]) as launches:
        best_match.triton(a, b)       # on meta tensors: shapes, no data
    driver.programs[launches[0].program].registers

The compiler is the same as on a machine with the GPU. Only the driver, which names the GPU, is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from gpu_targets import GPU, GPUS
from triton import knobs
from triton.backends.compiler import GPUTarget

_CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Program:
    """A kernel specialized for a GPU.

    Attributes:
        types: Types of the arguments.
        divided: Arguments that are known to be multiples of 16.
        constants: Values of compile-time arguments.
    """

    kernel: str
    gpu: str
    types: tuple[str, ...]
    divided: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int


@dataclass(frozen=True)
class Binary:
    """Resources of a compiled program.

    Attributes:
        registers: Registers per thread.
        spills: Bytes per thread of stack and spilled registers.
        shared: Bytes of shared memory per block.
        size: Bytes of the program.
    """

    registers: int
    spills: int
    shared: int
    size: int


@dataclass(frozen=True)
class Launch:
    """A requested launch of a compiled program."""

    program: Program
    grid: tuple[int, int, int]


class OfflineDriver:
    """Triton driver for the GPU that `compiling` sets."""

    def __init__(self, is_wanted: Callable[[Program], bool] = lambda program: True) -> None:
        """Set the driver. Programs for which `is_wanted` is false are neither compiled nor launched."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise RuntimeError("TRITON_INTERPRET is set, but kernels are compiled here. Start the process without it.")
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default until 3.10, without its warning
        self.gpu, self.is_wanted = next(iter(GPUS.values())), is_wanted
        self.launches: list[Launch] = []
        self.programs: dict[Program, Binary | None] = {}  # all requested programs; None: not compiled
        self.utils = self  # Triton looks up the methods below on this attribute
        self.launcher_cls = self._launcher
        self._files: dict[str, Path] = {}
        knobs.runtime.jit_cache_hook = self._asked
        knobs.runtime.kernel_load_start_hook = self._loads
        triton.runtime.driver.set_active(self)

    @contextlib.contextmanager
    def compiling(self, gpu: GPU) -> Iterator[list[Launch]]:
        """Compile the kernels of a `with` block for `gpu` and collect their launches."""
        self.gpu, self.launches = gpu, []
        yield self.launches

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.gpu.backend, self.gpu.arch, self.gpu.warp)

    def get_current_device(self) -> int:
        return list(GPUS).index(self.gpu.target)  # Triton caches compiled kernels by device

    def set_current_device(self, device: int) -> None:
        """Keep the GPU that `compiling` sets."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.gpu.shared_block, "max_num_regs": 65536, "multiprocessor_count": self.gpu.units,
            "warpSize": self.gpu.warp,
        }  # fmt: skip

    def _asked(self, **event: Any) -> bool:
        """Record a program before compilation. Return True to skip it."""
        kernel, data = event["fn"].jit_function, json.loads(event["compile"]["specialization_data"])
        names = [parameter.name for parameter in kernel.params]
        values = zip(data["constant_keys"], data["constant_vals"], strict=True)
        constants = {names[path[0]]: value["constexpr"] if isinstance(value, dict) else value for path, value in values}
        attributes = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
        divided = [names[path[0]] for path, value in attributes if value]
        self._next = Program(
            kernel.__name__, self.gpu.target, tuple(map(str, data["signature"].values())), tuple(sorted(divided)),
            tuple(sorted(constants.items())), data["options"]["num_warps"], data["options"]["num_stages"],
        )  # fmt: skip
        self.programs.setdefault(self._next, None)
        return not self.is_wanted(self._next)

    def _loads(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        self._files = {Path(path).suffix: Path(path) for path in files.values()}

    def load_binary(self, name: str, program: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Read the resources of a program. Triton expects registers and spilled words."""
        read = _of_cubin if self.gpu.backend == "cuda" else _of_amdgcn
        registers, spills = read(self._files)
        self.programs[self._next] = Binary(registers, spills, shared, len(program))
        # The first value must be truthy: otherwise Triton loads the program again at every launch.
        return self._next, self._next, registers, spills // 4, 1024

    def unload_module(self, module: Any) -> None:
        """Do nothing: no module was loaded."""

    def _launcher(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
            self.launches.append(Launch(program, (x, y, z)))

        return launch


def _of_cubin(files: dict[str, Path]) -> tuple[int, int]:
    """Return registers and spilled bytes per thread. NVIDIA's compiler spills to the stack."""
    command = [_CUOBJDUMP, "--dump-resource-usage", files[".cubin"]]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    use = dict(re.findall(r"(\w+):(\d+)", next(line for line in output.splitlines()[::-1] if "REG:" in line)))
    return int(use["REG"]), int(use["STACK"]) + int(use.get("LOCAL", 0))


def _of_amdgcn(files: dict[str, Path]) -> tuple[int, int]:
    """Return vector registers (including accumulation registers) and bytes of scratch memory per thread."""
    text = files[".amdgcn"].read_text()
    values = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return values["vgpr_count"], values["private_segment_fixed_size"]


def fresh_cache() -> tempfile.TemporaryDirectory:
    """Let Triton use an empty cache. The cache is deleted with the returned object."""
    folder = tempfile.TemporaryDirectory(prefix="triton-")
    os.environ["TRITON_CACHE_DIR"] = folder.name
    return folder
