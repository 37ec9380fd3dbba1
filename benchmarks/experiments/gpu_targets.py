# SPDX-License-Identifier: Apache-2.0
"""The GPUs that kernels are compiled for, with the limits that a program must keep.

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

    name: as on its data sheet. backend, arch: what Triton calls it. warp: threads of a warp (of a wavefront).
    shared_block, shared_unit: shared memory (LDS) that a block may have, and that a multiprocessor has. registers: of
    a multiprocessor (NVIDIA) or of a lane of one SIMD unit (AMD). warps, blocks: at once on a multiprocessor. units:
    multiprocessors.
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
        """What compilers call it: sm_80, gfx942."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """Return the share of a multiprocessor's warps that can run at once, from what one block of `warps` takes."""
        blocks = min(self.blocks, self.warps // warps)
        if self.backend == "cuda":
            # Registers go to warps in lots of 256, warps to the four quarters of a multiprocessor.
            of_warp = 256 * math.ceil(max(registers, 1) * self.warp / 256)
            blocks = min(blocks, self.registers // of_warp // 4 * 4 // warps)
            taken = 128 * math.ceil((shared + 1024) / 128)  # 1 KiB of each block is the system's
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
