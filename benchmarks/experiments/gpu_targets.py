# SPDX-License-Identifier: Apache-2.0
"""Target GPUs of the compiled kernels, with their limits.

Limits per block and per multiprocessor: table "Technical Specifications per Compute Capability" of the CUDA C++
Programming Guide; for the MI300X the "AMD Instinct MI300" CDNA3 instruction set guide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenprune.integrations.vllm import gpus


@dataclass(frozen=True)
class GPU:
    """Limits of a GPU. Memory in bytes.

    Attributes:
        name: Name on the data sheet.
        backend: Triton's name of the backend.
        arch: Triton's name of the architecture.
        warp: Threads per warp (or wavefront).
        shared_block: Shared memory (LDS) available to a block.
        shared_unit: Shared memory of a multiprocessor.
        registers: Registers of a multiprocessor (NVIDIA), or of a lane of a SIMD unit (AMD).
        warps: Maximum number of resident warps per multiprocessor.
        blocks: Maximum number of resident blocks per multiprocessor.
        units: Number of multiprocessors.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared_block: int
    shared_unit: int
    registers: int
    warps: int
    blocks: int
    units: int

    @property
    def target(self) -> str:
        """Return the compiler's name of the GPU, such as sm_80 or gfx942."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """Return the share of a multiprocessor's warps that are resident, if each block has `warps` warps."""
        blocks = min(self.blocks, self.warps // warps)
        if self.backend == "cuda":
            # Registers are allocated in units of 256 per warp. Warps are distributed over four partitions.
            of_warp = 256 * math.ceil(max(registers, 1) * self.warp / 256)
            blocks = min(blocks, self.registers // of_warp // 4 * 4 // warps)
            taken = 128 * math.ceil((shared + 1024) / 128)  # the system reserves 1 KiB per block
        else:
            of_lane = 8 * math.ceil(max(registers, 1) / 8)
            blocks = min(blocks, 4 * min(8, self.registers // of_lane) // warps)
            taken = 512 * math.ceil(max(shared, 1) / 512)
        return min(blocks, self.shared_unit // taken) * warps / self.warps


def _nvidia(name: str, arch: int, shared_kib: int, units: int) -> GPU:
    shared = shared_kib * 1024
    return GPU(gpus.GPUS[name].name, "cuda", arch, 32, shared, shared + 1024, 65536, 64, 32, units)


GPUS = {
    gpu.target: gpu
    for gpu in (
        _nvidia("A100", 80, 163, 108),
        _nvidia("H100", 90, 227, 132),
        _nvidia("B200", 100, 227, 148),
        GPU("MI300X", "hip", "gfx942", 64, 65536, 65536, 512, 32, 32, 304),
    )
}
