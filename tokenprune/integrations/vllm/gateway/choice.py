# SPDX-License-Identifier: Apache-2.0
"""Choices of requests, and how they are served: by a profile's setting, by the age of each image, or in full.

Under a setting by age each image of a request has a setting of its own, by its place there. An image at its age is to
all caches what it would be under a setting that says the same of every image. So one that ages is another image to
them, and the others of its request stay what they were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.vllm.frontend.served import (
    RequestRecord,
    ServedRequest,
    is_input_error,
    wrap_method_errors,
)
from tokenprune.integrations.vllm.settings.items import OFF, get_label
from tokenprune.integrations.vllm.settings.keys import DEFAULT, KEY, PROFILE
from tokenprune.integrations.vllm.settings.rules import FULL
from tokenprune.integrations.vllm.settings.server_config import ServerConfig
from tokenprune.settings import Setting

ROLLOUT, FAILURE = "rollout", "failure"  # why a request is served in full, though its setting would reduce it
KEPT, FAILED, INPUT = SHADOWS = ("kept", "failed", "input")  # what a rollout's setting would have done with a request
_INSTEAD = f'ask for a profile without age=, or switch it off for the request, {{"{KEY}": {{"off": true}}}}'


@dataclass(frozen=True)
class Choice:
    """A request's value of our key, and all that was settled when it came.

    An endpoint puts it into `mm_processor_kwargs` in the value's place: that is all that vLLM hands from there to the
    processor, in another thread, and it hands values on as they are. So a request goes by the config that it chose
    from, whatever replaces it meanwhile, and the endpoint finds in `served` what the processor has written.

    setting: what the value asks for. lot: a number in [0, 1) by which a rollout decides; see `draw_lot`.
    """

    asked: Mapping[str, Any]
    server: ServerConfig = field(repr=False)
    setting: Setting
    served: RequestRecord
    lot: float = field(default_factory=random.random)

    @property
    def profile(self) -> str:
        """The name of the profile in force, under a setting of the request's own too."""
        return str(self.asked.get(PROFILE, DEFAULT))

    def resolve(self, counts: Mapping[str, int]) -> ServedRequest:
        """Return what serves a request with so many items of each modality: its setting, or all in full where a rollout
        leaves it out; and the same where that fails, if its profile says so."""
        self.served.profile = self.server.label(self.asked)
        request = ServedRequest.build(self.setting, counts, self.served)
        if self.setting.off:
            return request
        full = ServedRequest.build(OFF, counts, self.served, full=FAILURE)
        if self.lot >= self.server.rollout(self.profile):
            return HeldBack(full.setting, full.items, self.served, full=ROLLOUT, shadow=request)
        return dataclasses.replace(request, fallback=full) if self.server.on_error(self.profile) == FULL else request


@dataclass(frozen=True)
class Shadow:
    """An item that is served in full, and what a setting would have made of it.

    label: of the setting, in metrics. tokens: visual ones that it would have kept, None if it fails. outcome: one of
    `SHADOWS`.
    """

    label: tuple[str, str]
    tokens: int | None
    outcome: str = KEPT


@dataclass(frozen=True)
class HeldBack(ServedRequest):
    """A request that a rollout serves in full. shadow: what would serve it otherwise."""

    shadow: ServedRequest = field(kw_only=True)

    def without_cached(self, cached: Mapping[str, list[bool]]) -> HeldBack:
        items = super().without_cached(cached).items
        return dataclasses.replace(self, items=items, shadow=self.shadow.without_cached(cached))

    def cache_key(self, modality: str, index: int) -> dict[str, Any]:
        # The shadow is counted when the item is processed, and cached with it.
        return super().cache_key(modality, index) | {"shadow": self.shadow.cache_key(modality, index)}

    def get_shadow(self, item: Any) -> Shadow:
        """Return what the setting of the shadow would leave of an item. Nothing is refused."""
        setting = self.shadow.items[item.modality][item.index]
        try:
            with wrap_method_errors(setting):
                return Shadow(get_label(setting), item.count_kept_under(setting))
        except TokenPruneError as error:
            return Shadow(get_label(setting), None, INPUT if is_input_error(error) else FAILED)

    def outcome(self, run: Any, items: Sequence[Any]) -> str:
        """Return one of `SHADOWS` for the whole request. run: its `RequestRun`. items: details of each."""
        try:
            run.check(self.shadow)
            check_age(self.shadow.setting, run.counts, (one.segments for one in items))
        except TokenPruneError as error:
            return INPUT if is_input_error(error) else FAILED
        outcomes = {one.more.outcome for one in items}
        return next((one for one in (FAILED, INPUT) if one in outcomes), KEPT)


def draw_lot(given: Any) -> float:
    """Return a number in [0, 1) that follows from a request's id alone: the same in every process and after a restart,
    spread evenly over ids; a random one where there is no id."""
    if given is None:
        return random.random()
    digest = hashlib.sha256(str(given).encode(errors="replace")).digest()
    return int.from_bytes(digest[:6]) / 2**48


def check_age(setting: Setting, counts: Mapping[str, int], segments: Iterable[int] = ()) -> None:
    """Raise OptionError for a request with videos, of which nothing tells where they stand among its images, and for
    one in which an image has several budgets. counts: of its items, by modality. segments: of each, how many."""
    if setting.budget.ages is None:
        return
    if counts.get("video"):
        raise OptionError(f"age= counts the images of a request, and this one has videos: {_INSTEAD}")
    if any(count > 1 for count in segments):
        raise OptionError(
            "age= counts images, and an image of this request is cut into tiles or crops with a budget each: have the "
            f"processor make one of it, or {_INSTEAD}"
        )
