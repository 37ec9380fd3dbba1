# SPDX-License-Identifier: Apache-2.0
"""Queries of kernels about the GPU that they are compiled for, or about the interpreter in its place."""

from __future__ import annotations

import functools
import os

import torch
import triton
from torch import Tensor


def is_interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cast_for_dot(x: Tensor) -> Tensor:
    """`x`, in a dtype that `tl.dot` can take: the interpreter (Triton 3.9) multiplies the bits of bfloat16 instead."""
    return x.float() if is_interpreted() and x.dtype == torch.bfloat16 else x


def get_shared_memory() -> int:
    """Bytes of shared memory that a block may have."""
    if is_interpreted():
        return 2**17
    return _shared_memory(triton.runtime.driver.active.get_current_device())


@functools.cache  # the driver takes a millisecond to say it
def _shared_memory(device: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def get_dot_precision(x: Tensor) -> str:
    """Return the precision of `tl.dot` on float32: exact where there are instructions for it (AMD), else three products
    of TF32, which leaves an error of about 2^-22. Products of halves are exact in either."""
    if (
        x.dtype != torch.float32
        or is_interpreted()
        or triton.runtime.driver.active.get_current_target().backend == "hip"
    ):
        return "ieee"
    return "tf32x3"
