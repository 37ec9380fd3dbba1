# SPDX-License-Identifier: Apache-2.0
"""Base classes of methods by site, and the order in which methods of several sites act."""

from __future__ import annotations

from collections.abc import Sequence

from tokenprune.errors import OptionError
from tokenprune.selection.method import Method, Site


def composition_key(method: Method) -> tuple[int, int]:
    """Return a sort key for methods in the order of the data flow: the site and the decoder layer."""
    # A DECODE method makes its first cut in prefill, like an IN_LLM method.
    site = Site.IN_LLM if method.site is Site.DECODE else method.site
    return site.order, method.cut_layer


def check_sites(methods: Sequence[Method]) -> None:
    """Raise OptionError if two methods act at the same site and layer."""
    by_key: dict[tuple[int, int], Method] = {}
    for method in methods:
        first = by_key.setdefault(composition_key(method), method)
        if first is not method:
            raise OptionError(
                f"{first.name} and {method.name} both act at {method.site}, layer {method.cut_layer}. "
                "Combine methods of different sites or layers."
            )
