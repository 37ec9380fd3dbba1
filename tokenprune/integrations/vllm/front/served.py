# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the front end: who chose its setting, and what was made of it.

vLLM hands the value of our key from the endpoint to the processor, in another thread, as it is. So the record of a
request travels there as an attribute of that value, and the endpoint finds in it what the processor has written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.integrations.vllm.setting.offer import DEFAULT, Offer

NAME, BY_KEY, CALLER, LOAD = "name", "key", "caller", "load"
CHOSEN_BY = (NAME, BY_KEY, CALLER, LOAD, DEFAULT)
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


@dataclass
class Served:
    """The record of a request, and of what serves it.

    by:       who chose the profile: "name" (the model's, in the request), "key" (the request's own), "caller" (the
              server's rule of callers), "load" (its overload policy) or "default".
    request:  the request's id, None where there is none; see `clean_id`.
    profile, method, keep, images, videos, tokens_in, tokens_out: written by the processor, once it has read the
              request's images and videos. keep: a share, or a whole number of tokens. tokens: visual ones.
    """

    by: str = DEFAULT
    request: str | None = None
    profile: str = DEFAULT
    method: str = "off"
    keep: float | int = 1.0
    images: int = 0
    videos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def done(self) -> bool:
        """True once images or videos were read."""
        return self.images + self.videos > 0

    def fields(self) -> dict[str, Any]:
        """Return names and numbers, of which a client wrote none."""
        return {
            "profile": self.profile,
            "by": self.by,
            "method": self.method,
            "keep": self.keep,
            "images": self.images,
            "videos": self.videos,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
        }


class TrackedSetting(dict[str, Any]):
    """A request's value of our key, with its record, and the offer that it chose from: the server's may be replaced
    while the request is on its way, and all steps have to go by one."""

    def __init__(self, value: Mapping[str, Any], served: Served, offer: Offer) -> None:
        super().__init__(value)
        self.served, self.offer = served, offer


def followed(value: Any, offer: Offer) -> TrackedSetting:
    """Return a request's value of our key with a record and an offer, which it may bring. It does not from `LLM(...)`
    in Python, and from endpoints that know the key alone. offer: the server's, now."""
    if isinstance(value, TrackedSetting):
        return value
    offer.setting(value)  # raises for what is no mapping
    return TrackedSetting(value, Served(BY_KEY if value else DEFAULT), offer)


def clean_id(given: Any) -> str | None:
    """Return a request's id if it is one that a log may hold, of 64 letters, digits, '.', '_', ':' and '-' at most;
    "unreadable" for others, since clients may choose theirs."""
    if given is None:
        return None
    return given if isinstance(given, str) and _ID.fullmatch(given) else "unreadable"
