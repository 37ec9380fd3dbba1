# SPDX-License-Identifier: Apache-2.0
"""The arguments of a decoder's forward, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokenprune.integrations.hf import compat

# Names of the fields, and of the arguments that they are; the cache goes by the name that it came with.
_NAMES = {"embeds": "inputs_embeds", "mask": "attention_mask", "positions": "position_ids"}
_OWN = {*_NAMES.values(), *compat.CACHE_NAMES}


@dataclass(frozen=True)
class DecoderInputs:
    """Arguments of one call of a decoder. A component that changes one returns a changed copy.

    embeds: `[B, L, D]`. mask: in any form that the decoder takes, or None. positions: long `[..., B or 1, L]`, or None,
    where the decoder counts them. cache: the key/value cache, or None. extras: all other arguments, by name. given:
    names of all arguments, those that are None too.
    """

    embeds: Tensor
    mask: Any
    positions: Tensor | None
    cache: Any
    extras: dict[str, Any]
    given: frozenset[str]

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> DecoderInputs:
        """Return the inputs that a call by name with `arguments` has."""
        extras = {name: value for name, value in arguments.items() if name not in _OWN}
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        cache, given = arguments.get(compat.CACHE, arguments.get(compat.EARLIER_CACHE)), frozenset(arguments)
        return DecoderInputs(arguments["inputs_embeds"], mask, positions, cache, extras, given)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, for the decoder; a dictionary of the caller's own."""
        found = dict(self.extras)
        earlier = compat.EARLIER_CACHE in self.given and compat.CACHE not in self.given
        cache = compat.EARLIER_CACHE if earlier else compat.CACHE
        for field, name in (*_NAMES.items(), ("cache", cache)):
            value = getattr(self, field)
            if value is not None or name in self.given:
                found[name] = value
        return found
