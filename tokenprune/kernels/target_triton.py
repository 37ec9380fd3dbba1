# SPDX-License-Identifier: Apache-2.0
"""Properties of the GPU (or interpreter) that kernels are compiled for."""

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
    """Return `x` in a dtype that `tl.dot` supports. The interpreter (Triton 3.9) multiplies the bits of bfloat16."""
    return x.float() if is_interpreted() and x.dtype == torch.bfloat16 else x


def get_shared_memory() -> int:
    """Return the bytes of shared memory per block."""
    if is_interpreted():
        return 2**17
    return _get_shared_memory(triton.runtime.driver.active.get_current_device())


@functools.cache  # the driver call takes a millisecond
def _get_shared_memory(device: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def get_dot_precision(x: Tensor) -> str:
    """Return the precision of `tl.dot` for float32.

    AMD GPUs have exact instructions. Others use three TF32 products, with an error of about 2^-22. Products of half
    precision are exact in both.
    """
    if (
        x.dtype != torch.float32
        or is_interpreted()
        or triton.runtime.driver.active.get_current_target().backend == "hip"
    ):
        return "ieee"
    return "tf32x3"
