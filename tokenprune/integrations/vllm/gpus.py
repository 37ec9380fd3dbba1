# SPDX-License-Identifier: Apache-2.0
"""Data sheets of GPUs.

Peaks are without sparsity. Sources: NVIDIA data sheets of A10, A100, L4, L40S, H100, H200 (SXM modules if available)
and HGX B200, AMD Instinct MI300X data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from tokenprune.errors import OptionError


@dataclass(frozen=True)
class GPU:
    """Data sheet of a GPU: bytes, bytes per second, and FLOPs per second of 16-bit and exact float32 products."""

    name: str
    memory: float
    bandwidth: float
    half: float
    single: float

    def flops(self, dtype: str) -> float:
        """Return the peak FLOPs per second of a dtype."""
        return self.single if dtype == "float32" else self.half


GPUS = {
    "A10": GPU("A10", 24e9, 0.6e12, 125e12, 31.2e12),
    "A100": GPU("A100 SXM 80 GB", 80e9, 2.039e12, 312e12, 19.5e12),
    "L4": GPU("L4", 24e9, 0.3e12, 121e12, 30.3e12),
    "L40S": GPU("L40S", 48e9, 0.864e12, 362e12, 91.6e12),
    "H100": GPU("H100 SXM", 80e9, 3.35e12, 989.4e12, 67e12),
    "H200": GPU("H200 SXM", 141e9, 4.8e12, 989.4e12, 67e12),
    "B200": GPU("B200", 180e9, 7.7e12, 2.25e15, 75e12),
    "MI300X": GPU("MI300X", 192e9, 5.3e12, 1307.4e12, 163.4e12),
}


def find_gpu(name: str) -> GPU:
    """Return a GPU by its name in the table, ignoring case; raise OptionError if it is unknown."""
    by_name = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    close = get_close_matches(name.upper(), GPUS, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise OptionError(f"GPU {name!r} is not known. {hint}Known GPUs: {', '.join(GPUS)}")
