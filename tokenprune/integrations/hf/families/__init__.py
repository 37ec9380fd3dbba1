# SPDX-License-Identifier: Apache-2.0
"""How model families hand images to their decoder: `base` has the common contract, the other files what differs."""

from tokenprune.integrations.hf.families import plain, qformer, special
from tokenprune.integrations.hf.families.base import (
    Adapter,
    adapter_for,
    how_to_add,
    register_adapter,
    supported_families,
)

__all__ = [
    "Adapter",
    "adapter_for",
    "how_to_add",
    "plain",
    "qformer",
    "register_adapter",
    "special",
    "supported_families",
]
