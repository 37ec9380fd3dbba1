# SPDX-License-Identifier: Apache-2.0
"""Operations in plain PyTorch that several methods share; those with a kernel are in kernels/."""
