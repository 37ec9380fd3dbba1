# SPDX-License-Identifier: Apache-2.0
"""The setting of each request and item: by profile, by the age of an image, or unpruned under a rollout.

Under a budget by age each image of a request has its own setting, which depends on its index. Caches treat an image at
its age like an image under an equal setting without ages. An aging image is therefore a new image to the caches, and
the other images of the request are unchanged.
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

ROLLOUT, FAILURE = "rollout", "failure"  # reasons to serve a request unpruned
KEPT, FAILED, INPUT = SHADOWS = ("kept", "failed", "input")  # outcomes of the setting in a rollout
_REMEDY = f'select a profile without age=, or switch it off with {{"{KEY}": {{"off": true}}}}'


@dataclass(frozen=True)
class Choice:
    """A request's value of `KEY` with everything that was decided on arrival.

    An endpoint replaces the value in `mm_processor_kwargs` by this object. vLLM passes no other data to the processor,
    which runs in another thread. A request therefore keeps the config that it was resolved with, also after a reload,
    and the endpoint reads from `served` the record that the processor has written.

    Args:
        requested: The request's value of `KEY`.
        server: Config of the server on arrival.
        setting: The resolved setting.
        served: Record of the request.
        lot: Number in [0, 1) that decides a rollout (see `draw_lot`).
    """

    requested: Mapping[str, Any]
    server: ServerConfig = field(repr=False)
    setting: Setting
    served: RequestRecord
    lot: float = field(default_factory=random.random)

    @property
    def profile(self) -> str:
        """Name of the profile, also if the request overrides it."""
        return str(self.requested.get(PROFILE, DEFAULT))

    def resolve(self, counts: Mapping[str, int]) -> ServedRequest:
        """Return the settings of a request with these numbers of items by modality.

        All items are unpruned if a rollout excludes the request. If the profile's `on_error` is `FULL`, the unpruned
        request is the fallback.
        """
        self.served.profile = self.server.label(self.requested)
        request = ServedRequest.build(self.setting, counts, self.served)
        if self.setting.off:
            return request
        full = ServedRequest.build(OFF, counts, self.served, full=FAILURE)
        if self.lot >= self.server.rollout(self.profile):
            return HeldBack(full.setting, full.items, self.served, full=ROLLOUT, shadow=request)
        return dataclasses.replace(request, fallback=full) if self.server.on_error(self.profile) == FULL else request


@dataclass(frozen=True)
class Shadow:
    """The result of a setting for an item that is served unpruned.

    `tokens` are the visual tokens that it would have kept, or None if it fails. `outcome` is one of `SHADOWS`.
    """

    label: tuple[str, str]
    tokens: int | None
    outcome: str = KEPT


@dataclass(frozen=True)
class HeldBack(ServedRequest):
    """A request that a rollout serves unpruned. shadow: the request under its setting."""

    shadow: ServedRequest = field(kw_only=True)

    def without_cached(self, cached: Mapping[str, list[bool]]) -> HeldBack:
        items = super().without_cached(cached).items
        return dataclasses.replace(self, items=items, shadow=self.shadow.without_cached(cached))

    def cache_key(self, modality: str, index: int) -> dict[str, Any]:
        # The shadow is counted when the item is processed, and cached with the item.
        return super().cache_key(modality, index) | {"shadow": self.shadow.cache_key(modality, index)}

    def get_shadow(self, item: Any) -> Shadow:
        """Return the result of the shadow's setting for an item. Errors become outcomes."""
        setting = self.shadow.items[item.modality][item.index]
        try:
            with wrap_method_errors(setting):
                return Shadow(get_label(setting), item.count_kept_under(setting))
        except TokenPruneError as error:
            return Shadow(get_label(setting), None, INPUT if is_input_error(error) else FAILED)

    def outcome(self, run: Any, items: Sequence[Any]) -> str:
        """Return the outcome of the whole request, one of `SHADOWS`."""
        try:
            run.check(self.shadow)
            check_age(self.shadow.setting, run.counts, (item.segments for item in items))
        except TokenPruneError as error:
            return INPUT if is_input_error(error) else FAILED
        outcomes = {item.more.outcome for item in items}
        return next((outcome for outcome in (FAILED, INPUT) if outcome in outcomes), KEPT)


def draw_lot(request_id: Any) -> float:
    """Return a number in [0, 1) from a request's id, uniformly distributed and the same in every process.

    Without an id the number is random.
    """
    if request_id is None:
        return random.random()
    digest = hashlib.sha256(str(request_id).encode(errors="replace")).digest()
    return int.from_bytes(digest[:6]) / 2**48


def check_age(setting: Setting, counts: Mapping[str, int], segments: Iterable[int] = ()) -> None:
    """Raise OptionError if the age of an image of the request is not defined.

    Videos have no index among the images, and each image needs a single budget (`segments`).
    """
    if setting.budget.ages is None:
        return
    if counts.get("video"):
        raise OptionError(f"age= counts the images of a request, and this request has videos: {_REMEDY}")
    if any(count > 1 for count in segments):
        raise OptionError(
            "age= needs one budget per image, and an image of this request is split into tiles or crops. Configure the "
            f"processor to use one tile, or {_REMEDY}"
        )
