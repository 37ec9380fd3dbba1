# SPDX-License-Identifier: Apache-2.0
"""Profiles that a reload has removed: for a minute, requests that name one are served by what held before.

Clients hear of a change later than a server, and a request may have been sent before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.integrations.vllm.log import SERVER
from tokenprune.integrations.vllm.setting.configuration import offered
from tokenprune.integrations.vllm.setting.offer import PROFILE, Offer
from tokenprune.integrations.vllm.setting.settings import KEY

logger = logging.getLogger(SERVER)
SECONDS = 60.0
_LEFT = f"{KEY}_left"


@dataclass
class _Left:
    """An offer that a reload has replaced, and until when its profiles are served. said: those that the log names."""

    offer: Offer
    until: float
    said: set[str] = field(default_factory=set)


def begin(model_config: Any, before: Offer) -> None:
    """Serve the profiles of `before` that the server no longer has for `SECONDS` from now."""
    now = time.monotonic()
    kept = [one for one in _left(model_config) if one.until > now]
    setattr(model_config.multimodal_config, _LEFT, [_Left(before, now + SECONDS), *kept])


def offer_of(model_config: Any, named: Callable[[Offer], Any]) -> Offer:
    """Return what a request goes by: the server's offer, or the last one that had the profile that it names.

    named: the name that the request gives, where the server has this offer; of any type.
    """
    offer = offered(model_config)
    for one in _left(model_config):
        name = named(one.offer)
        if isinstance(name, str) and name in one.offer.profiles and name not in offer.profiles:
            if (seconds := one.until - time.monotonic()) <= 0:
                break
            if name not in one.said:
                one.said.add(name)
                text = (
                    "tokenprune: profile %s has left with a reload, and requests name it: served as before, %.0f s more"
                )
                logger.warning(text, name, seconds)
            return one.offer
    return offer


def by_key(asked: Any) -> Any:
    """Return the profile that a request's value of our key names; None if it names none."""
    return asked.get(PROFILE) if isinstance(asked, Mapping) else None


def _left(model_config: Any) -> list[_Left]:
    return getattr(model_config.multimodal_config, _LEFT, [])
