# SPDX-License-Identifier: Apache-2.0
"""A request with its resolved settings, and its record for metrics, the log and the answer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.vllm.settings.items import get_cache_key, get_label, settings_of_items
from tokenprune.integrations.vllm.settings.keys import DEFAULT, KEY
from tokenprune.settings import Setting

logger = logging.getLogger(__name__)

NAME, BY_KEY, CALLER, LOAD = "name", "key", "caller", "load"


@dataclass
class RequestRecord:
    """Record of a request and of the setting that serves it.

    `profile` and the attributes from `method` to `tokens_out` are set after the request's items were read.

    Attributes:
        by: Who selected the profile: "name" (the model name in the request), "key" (the request's own key), "caller"
            (the server's rule of callers), "load" (the overload policy) or "default".
        request: Id of the request, or None (see log.py).
        full: "rollout" or "failure" if the request is served unpruned although its setting would prune it.
        keep: Share, or number of tokens.
        tokens_in: Visual tokens before pruning.
        tokens_out: Visual tokens after pruning.
        shadow: Visual tokens that the request would have kept without the rollout. None if it would have failed.
        aged: Under a budget by age, the number of images with another keep than the newest image.
    """

    by: str = DEFAULT
    request: str | None = None
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
    def has_items(self) -> bool:
        """True if images or videos were read."""
        return self.images + self.videos > 0

    def fields(self) -> dict[str, Any]:
        """Return the fields to show. They contain no text from the client."""
        names = ("profile", "by", "method", "keep", "images", "videos", "tokens_in", "tokens_out")
        more = {"aged": self.aged, "full": self.full, "shadow": self.shadow}
        fields = {name: getattr(self, name) for name in names}
        return fields | {name: value for name, value in more.items() if value is not None}

    def request_id(self) -> dict[str, str]:
        """Return the log field with the request's id, or no field without an id."""
        return {} if self.request is None else {"request": self.request}


class MethodError(OptionError):
    """A method's own code failed on a request with a valid setting and input."""


def is_input_error(error: Exception) -> bool:
    """Return True if a request failed because of its input, False if the method failed.

    Clients can cause input errors at will, so input errors should not raise alerts.
    """
    return isinstance(error, ValueError) and not isinstance(error, MethodError)


@contextmanager
def wrap_method_errors(setting: Setting) -> Iterator[None]:
    """Convert errors of a method's own code to MethodError, which is answered with HTTP 400 or handled by `on_error`.

    The log shows the original traceback.
    """
    try:
        yield
    except TokenPruneError:
        raise
    except Exception as error:
        name = get_label(setting)[0]
        logger.warning("%s failed on a request", name, exc_info=error)
        raise MethodError(
            f"{KEY}: {name} failed on this request ({type(error).__name__}). Switch it off with "
            f'{{"{KEY}": {{"off": true}}}}, or select another profile.'
        ) from error


@dataclass(frozen=True)
class ServedRequest:
    """A request with its resolved settings.

    Args:
        setting: Setting of the request.
        items: Setting of each item, by modality.
        served: Record of the request.
        full: See `RequestRecord`.
        fallback: Request that is served instead if this one fails. None: the request is refused.
    """

    setting: Setting
    items: Mapping[str, tuple[Setting, ...]]
    served: RequestRecord
    full: str | None = None
    fallback: ServedRequest | None = None

    @classmethod
    def build(cls, setting: Setting, counts: Mapping[str, int], served: RequestRecord, **more: Any) -> ServedRequest:
        """Resolve a setting for a request with these numbers of items by modality."""
        items = {modality: settings_of_items(setting, modality, count) for modality, count in counts.items()}
        return cls(setting, items, served, **more)

    def without_cached(self, cached: Mapping[str, list[bool]]) -> ServedRequest:
        """Return the request with only the uncached items. vLLM numbers these from 0."""
        items = {
            modality: tuple(setting for setting, hit in zip(self.items.get(modality, ()), hits, strict=True) if not hit)
            for modality, hits in cached.items()
        }
        return dataclasses.replace(self, items=items)

    def cache_key(self, modality: str, index: int) -> dict[str, Any]:
        """Return the fields that distinguish an item under its setting from the item under other settings."""
        return dict(get_cache_key(self.items[modality][index]))

    def get_shadow(self, item: Any) -> Any:
        """Return the additional record of a `PromptItem`. None, except for rollouts."""
