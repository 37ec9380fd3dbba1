# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for GPUs that are not there, through the functions that launch them, and launch nothing.

    driver = OfflineDriver()          # in a process that was started without TRITON_INTERPRET
    with driver.compiling(GPUS["sm_90"]) as launches:
        best_match.triton(a, b)       # on meta tensors: shapes, no data
    driver.programs[launches[0].program].registers

The compiler's code is the same that a machine with the GPU runs: the driver only says which GPU that is.
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
    """A kernel as it is specialised for a GPU.

    types: of its arguments. divided: arguments that are known to be multiples of 16. constants: values of others.
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
    """What a compiled program needs. registers: of a thread. spills: bytes of a thread's stack and of registers that
    were spilled. shared: bytes of a block. size: bytes of the program."""

    registers: int
    spills: int
    shared: int
    size: int


@dataclass(frozen=True)
class Launch:
    """A launch that was asked for, of a program that was compiled."""

    program: Program
    grid: tuple[int, int, int]


class OfflineDriver:
    """What Triton asks of a driver, answered for the GPU that `compiling` names."""

    def __init__(self, wanted: Callable[[Program], bool] = lambda program: True) -> None:
        """wanted: whether a program is to be compiled; the launches of others are not heard of."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise RuntimeError("start the process without TRITON_INTERPRET: kernels are compiled here")
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default until 3.10, without its warning
        self.gpu, self.wanted = next(iter(GPUS.values())), wanted
        self.launches: list[Launch] = []
        self.programs: dict[Program, Binary | None] = {}  # all that were asked for; None: not compiled
        self.utils = self  # Triton asks an object of that name for what follows
        self.launcher_cls = self._launcher
        self._files: dict[str, Path] = {}
        knobs.runtime.jit_cache_hook = self._asked
        knobs.runtime.kernel_load_start_hook = self._loads
        triton.runtime.driver.set_active(self)

    @contextlib.contextmanager
    def compiling(self, gpu: GPU) -> Iterator[list[Launch]]:
        """Collect the launches of a `with` block, whose kernels are compiled for `gpu`."""
        self.gpu, self.launches = gpu, []
        yield self.launches

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.gpu.backend, self.gpu.arch, self.gpu.warp)

    def get_current_device(self) -> int:
        return list(GPUS).index(self.gpu.target)  # compiled kernels are remembered by it

    def set_current_device(self, device: int) -> None:
        """Stay with the GPU that `compiling` names."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self.gpu.shared_block, "max_num_regs": 65536, "multiprocessor_count": self.gpu.units,
            "warpSize": self.gpu.warp,
        }  # fmt: skip

    def _asked(self, **what: Any) -> bool:
        """Note what a launch wants to have compiled; True: leave it."""
        kernel, said = what["fn"].jit_function, json.loads(what["compile"]["specialization_data"])
        names = [parameter.name for parameter in kernel.params]
        values = zip(said["constant_keys"], said["constant_vals"], strict=True)
        constants = {names[at[0]]: value["constexpr"] if isinstance(value, dict) else value for at, value in values}
        attributes = zip(said["attrs_keys"], said["attrs_vals"], strict=True)
        divided = [names[at[0]] for at, value in attributes if value]
        self._next = Program(
            kernel.__name__, self.gpu.target, tuple(map(str, said["signature"].values())), tuple(sorted(divided)),
            tuple(sorted(constants.items())), said["options"]["num_warps"], said["options"]["num_stages"],
        )  # fmt: skip
        self.programs.setdefault(self._next, None)
        return not self.wanted(self._next)

    def _loads(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        self._files = {Path(path).suffix: Path(path) for path in files.values()}

    def load_binary(self, name: str, program: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Read what a program needs, which is what Triton wants of loading it (registers, and words spilled)."""
        read = _of_cubin if self.gpu.backend == "cuda" else _of_amdgcn
        registers, spills = read(self._files)
        self.programs[self._next] = Binary(registers, spills, shared, len(program))
        # The first, a handle of what was loaded, must be something: Triton would load again with every launch.
        return self._next, self._next, registers, spills // 4, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def _launcher(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
            self.launches.append(Launch(program, (x, y, z)))

        return launch


def _of_cubin(files: dict[str, Path]) -> tuple[int, int]:
    """Registers and spilled bytes of a thread: the stack is where NVIDIA's compiler spills to."""
    command = [_CUOBJDUMP, "--dump-resource-usage", files[".cubin"]]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    use = dict(re.findall(r"(\w+):(\d+)", next(line for line in said.splitlines()[::-1] if "REG:" in line)))
    return int(use["REG"]), int(use["STACK"]) + int(use.get("LOCAL", 0))


def _of_amdgcn(files: dict[str, Path]) -> tuple[int, int]:
    """Vector registers, those for sums of products with them, and bytes of scratch memory of a thread."""
    text = files[".amdgcn"].read_text()
    say = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return say["vgpr_count"], say["private_segment_fixed_size"]


def fresh_cache() -> tempfile.TemporaryDirectory:
    """Have Triton forget what it compiled before; hold on to what is returned."""
    folder = tempfile.TemporaryDirectory(prefix="triton-")
    os.environ["TRITON_CACHE_DIR"] = folder.name
    return folder
