# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for GPUs that are not there, through the functions that launch them, and launch nothing.

    driver = OfflineDriver()          # in a process that was started without TRITON_INTERPRET
    with driver.compiling(GPUS["sm_90"]) as launches:
        best_match.triton(a, b)       # on meta tensors: shapes, no data
    launches[0].binary.registers

The compiler's code is the same that a machine with the GPU runs: the driver only says which GPU that is.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
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
class Binary:
    """A compiled kernel. registers: of a thread. spills: bytes of a thread's stack and of spilled registers. shared:
    bytes of a block. size: bytes of the program. warps: of a block."""

    kernel: str
    registers: int
    spills: int
    shared: int
    size: int
    warps: int


@dataclass(frozen=True)
class Launch:
    """A launch that was asked for: of which program, with which grid and arguments."""

    binary: Binary
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class OfflineDriver:
    """What Triton asks of a driver, answered for the GPU that `compiling` names."""

    def __init__(self) -> None:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise RuntimeError("start the process without TRITON_INTERPRET: kernels are compiled here")
        self.gpu = next(iter(GPUS.values()))
        self.launches: list[Launch] = []
        self.binaries: dict[tuple[str, str], Binary] = {}
        self.utils = self  # Triton asks an object of that name for what follows
        self.launcher_cls = self._launcher
        self._files: dict[str, Path] = {}
        knobs.runtime.kernel_load_start_hook = lambda module, function, name, files, hash: self._files.update(
            {Path(path).suffix: Path(path) for path in files.values()}
        )
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

    def load_binary(self, name: str, program: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Read what a program needs, which is what Triton wants of loading it (registers, and words spilled)."""
        read = _of_cubin if self.gpu.backend == "cuda" else _of_amdgcn
        registers, spills = read(self._files)
        return None, (name, registers, spills, shared, len(program)), registers, spills // 4, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def _launcher(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: tuple, *rest: Any) -> None:
            # rest: metadata, what a profiler wants, hooks on either side; then the kernel's arguments.
            self.launches.append(Launch(Binary(*function, metadata.num_warps), (x, y, z), rest[4:]))

        return launch


def _of_cubin(files: dict[str, Path]) -> tuple[int, int]:
    """Registers and spilled bytes of a thread: the stack is where NVIDIA's compiler spills to."""
    said = subprocess.run([_CUOBJDUMP, "--dump-resource-usage", files[".cubin"]], capture_output=True, text=True, check=True)
    use = dict(re.findall(r"(\w+):(\d+)", said.stdout.splitlines()[-1]))
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
