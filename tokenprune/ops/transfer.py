# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way to a device, without the host waiting for it.

Between a host and an accelerator everything is cheap but waiting: a plain copy, or the question for one number, lets
the device run dry. docs/performance.md lists the few times that the library does wait; tests count them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: Sequence | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return numbers of the host as a tensor on `device`. They must not be changed afterwards.

    dtype: of fractions in a list, which a process's default dtype would round.
    """
    values = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    return values.to(device, non_blocking=True)
