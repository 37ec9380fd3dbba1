# SPDX-License-Identifier: Apache-2.0
"""Bases of methods by site, beside `Pruner`; and the order in which methods of several sites act."""

from __future__ import annotations

from collections.abc import Sequence

from tokenprune.errors import OptionError
from tokenprune.selection.method import Method, Site


def composition_key(method: Method) -> tuple[int, int]:
    """Return where a method acts, as something that sorts in the order in which data flows."""
    # What acts while decoding makes its first cut like a method inside the decoder.
    site = Site.IN_LLM if method.site is Site.DECODE else method.site
    return site.order, method.cut_layer


def check_sites(methods: Sequence[Method]) -> None:
    """Raise OptionError if two methods act at the same place."""
    seen: dict[tuple[int, int], Method] = {}
    for one in methods:
        first = seen.setdefault(composition_key(one), one)
        if first is not one:
            raise OptionError(
                f"{first.name} and {one.name} act at the same place ({one.site}, layer {one.cut_layer}): composed "
                "methods must act at different sites or layers"
            )
