# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the front end: who chose its setting, and what was made of it.

vLLM hands the value of our key from the endpoint to the processor, in another thread, as it is. So the record of a
request travels there as an attribute of that value, and the endpoint finds in it what the processor has written.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.setting.offer import DEFAULT, PROFILE, Offer
from tokenprune.integrations.vllm.setting.rules import FULL, is_of_input
from tokenprune.integrations.vllm.setting.settings import KEY, ServedSetting

NAME, BY_KEY, CALLER, LOAD = "name", "key", "caller", "load"
CHOSEN_BY = (NAME, BY_KEY, CALLER, LOAD, DEFAULT)
ROLLOUT, FAILURE = "rollout", "failure"  # why a request is served in full, though its setting would reduce it
KEPT, FAILED, INPUT = SHADOWS = ("kept", "failed", "input")  # what a rollout's setting would have done with a request


@dataclass
class Served:
    """The record of a request, and of what serves it.

    by:       who chose the profile: "name" (the model's, in the request), "key" (the request's own), "caller" (the
              server's rule of callers), "load" (its overload policy) or "default".
    request:  the request's id, None where there is none; see log.py.
    lot:      a number in [0, 1) by which a rollout decides; see `lot_of`. Drawn at random for a request without an id.
    full:     `ROLLOUT` or `FAILURE` if a request is served in full, though its setting would reduce it; else None.
    profile, method, keep, images, videos, tokens_in, tokens_out: written by the processor, once it has read the
              request's images and videos. keep: a share, or a whole number of tokens. tokens: visual ones.
    shadow:   visual tokens that a request would have kept without the rollout; None: it would have failed.
    aged:     under a setting by age, images that have another keep than the newest; else None.
    """

    by: str = DEFAULT
    request: str | None = None
    lot: float = field(default_factory=random.random)
    full: str | None = None
    profile: str = DEFAULT
    method: str = "off"
    keep: float | int = 1.0
    images: int = 0
    videos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    shadow: int | None = None
    aged: int | None = None

    @property
    def done(self) -> bool:
        """True once images or videos were read."""
        return self.images + self.videos > 0

    def fields(self) -> dict[str, Any]:
        """Return names and numbers, of which a client wrote none."""
        said = {
            "profile": self.profile,
            "by": self.by,
            "method": self.method,
            "keep": self.keep,
            "images": self.images,
            "videos": self.videos,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
        }
        more = {"aged": self.aged, "full": self.full, "shadow": self.shadow}
        return said | {name: value for name, value in more.items() if value is not None}


class TrackedSetting(dict[str, Any]):
    """A request's value of our key, with its record, and the offer that it chose from: the server's may be replaced
    while the request is on its way, and all steps have to go by one.

    counts: the request's items, by modality. places: of those that a step is about, their indices among these.
    """

    def __init__(self, value: Mapping[str, Any], served: Served, offer: Offer) -> None:
        super().__init__(value)
        self.served, self.offer = served, offer
        self.counts: dict[str, int] = {}
        self.places: dict[str, list[int]] = {}

    def with_items(self, counts: Mapping[str, int]) -> TrackedSetting:
        """Return the setting of a request with so many items, all of them."""
        return self._with(dict(counts), {modality: list(range(count)) for modality, count in counts.items()})

    def without_cached(self, cached: Mapping[str, list[bool]]) -> TrackedSetting:
        """Return the setting with the places of those items that are not cached."""
        places = {
            modality: [place for place, hit in zip(self.places[modality], hits, strict=True) if not hit]
            for modality, hits in cached.items()
        }
        return self._with(self.counts, places)

    def _with(self, counts: dict[str, int], places: dict[str, list[int]]) -> TrackedSetting:
        made = TrackedSetting(self, self.served, self.offer)
        made.counts, made.places = counts, places
        return made

    def of_item(self, setting: ServedSetting, modality: str, index: int) -> ServedSetting:
        """Return what a setting is to one of the items that a step is about."""
        if modality != "image" or setting.age is None:
            return setting.tiers[0]
        return setting.of_image(self.places["image"][index], self.counts["image"])

    @property
    def profile(self) -> str:
        """The name of the profile in force, under a setting of the request's own too."""
        return str(self.get(PROFILE, DEFAULT))

    @property
    def shadow(self) -> ServedSetting | None:
        """The setting that the request would have been served under, if a rollout has it served in full."""
        return self.offer.setting(self) if self.served.full == ROLLOUT else None

    def draw(self) -> None:
        """Settle by the request's lot whether a rollout has it served in full."""
        if self.served.lot >= self.offer.rollout(self.profile) and not self.offer.setting(self).is_off:
            self.served.full = ROLLOUT

    def fall_back(self) -> bool:
        """Have a request that cannot be served under its setting served in full, and return True; False where its
        profile's rule refuses it, and for one that is served in full anyway."""
        in_full = self.served.full is not None or self.offer.setting(self).is_off
        if in_full or self.offer.on_error(self.profile) != FULL:
            return False
        self.served.full = FAILURE
        return True


def followed(value: Any, offer: Offer) -> TrackedSetting:
    """Return a request's value of our key with a record and an offer, which it may bring. It does not from `LLM(...)`
    in Python, and from endpoints that know the key alone. offer: the server's, now."""
    if isinstance(value, TrackedSetting):
        return value
    offer.setting(value)  # raises for what is no mapping
    return TrackedSetting(value, Served(BY_KEY if value else DEFAULT), offer)


def shadow_of(kwargs: Mapping[str, object]) -> ServedSetting | None:
    """Return the setting that a request would have been served under, if a rollout has it served in full."""
    asked = kwargs.get(KEY)
    return asked.shadow if isinstance(asked, TrackedSetting) else None


def item_setting(kwargs: Mapping[str, object], setting: ServedSetting, modality: str, index: int) -> ServedSetting:
    """Return what a request's setting is to one of its items (see `TrackedSetting.of_item`)."""
    asked = kwargs.get(KEY)
    return asked.of_item(setting, modality, index) if isinstance(asked, TrackedSetting) else setting


def shadow_outcome(error: TokenPruneError) -> str:
    """Return one of `SHADOWS` for what the setting of a rollout would have raised."""
    return INPUT if is_of_input(error) else FAILED


def lot_of(given: Any) -> float:
    """Return a number in [0, 1) that follows from a request's id alone: the same in every process and after a restart,
    spread evenly over ids; a random one where there is no id."""
    if given is None:
        return random.random()
    digest = hashlib.sha256(str(given).encode(errors="replace")).digest()
    return int.from_bytes(digest[:6]) / 2**48
