# SPDX-License-Identifier: Apache-2.0
"""Tensor operations of the methods. Most have a PyTorch reference and a Triton kernel.

The PyTorch reference defines the operation, runs on CPU, and is what the kernel is tested against. `dispatch.py`
chooses between the two. docs/results/kernels.md lists the cost of each kernel.

Conventions: S segments (images or videos), N visual tokens per segment, D features, B batch rows. Masks are bool and
False at padding. Ties go to the lower index unless a docstring says otherwise.
"""
