# SPDX-License-Identifier: Apache-2.0
"""Tell whether what was fitted to one model is used with another."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 8


@torch.no_grad()
def fingerprint(module: nn.Module) -> str:
    """Return the sha256, in hex, of the names, shapes, dtypes and a few values of all parameters of `module`."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        flat, count = parameter.detach().reshape(-1), parameter.numel()
        if count:
            places = [place * (count - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)]
            digest.update(flat[places].float().cpu().numpy().tobytes())
    return digest.hexdigest()
