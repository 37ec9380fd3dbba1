# SPDX-License-Identifier: Apache-2.0
"""Tensor operations of the methods; most have a PyTorch reference and a Triton kernel.

The PyTorch function is what the operation means, what the kernel is tested against, and what runs on CPU. See
`dispatch.py` for how one of the two is picked, and docs/results/kernels.md for what each kernel costs.
"""
