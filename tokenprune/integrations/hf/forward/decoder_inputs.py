# SPDX-License-Identifier: Apache-2.0
"""The arguments of a decoder's forward, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokenprune.integrations.hf import compat

# Names of the arguments that the first fields are; the cache goes by the name that it came with.
_NAMES = ("inputs_embeds", "attention_mask", "position_ids")
_OWN = (*_NAMES, *compat.CACHE_NAMES)


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
        own: dict[str, Any] = dict.fromkeys(_OWN)
        extras: dict[str, Any] = {}
        for name, value in arguments.items():
            (own if name in own else extras)[name] = value
        cache, given = own[compat.CACHE if compat.CACHE in arguments else compat.EARLIER_CACHE], frozenset(arguments)
        return DecoderInputs(own["inputs_embeds"], own["attention_mask"], own["position_ids"], cache, extras, given)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, for the decoder; a dictionary of the caller's own."""
        found, given = {**self.extras}, self.given
        earlier = compat.EARLIER_CACHE in given and compat.CACHE not in given
        cache = compat.EARLIER_CACHE if earlier else compat.CACHE
        values = (self.embeds, self.mask, self.positions, self.cache)
        for name, value in zip((*_NAMES, cache), values, strict=True):
            if value is not None or name in given:
                found[name] = value
        return found
