# SPDX-License-Identifier: Apache-2.0
"""The setting of a request, resolved once; and the record of it, which metrics, the log and the answer show."""

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
    """The record of a request, and of what serves it.

    by:       who chose the profile: "name" (the model's, in the request), "key" (the request's own), "caller" (the
              server's rule of callers), "load" (its overload policy) or "default".
    request:  the request's id, None where there is none; see log.py.
    profile, full, method, keep, images, videos, tokens_in, tokens_out: written once the request's images and videos
              were read. full: "rollout" or "failure" if it is served in full, though its setting would reduce it;
              else None. keep: a share, or a whole number of tokens. tokens: visual ones.
    shadow:   visual tokens that a request would have kept without the rollout; None: it would have failed.
    aged:     under a setting by age, images that have another keep than the newest; else None.
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
        """True once images or videos were read."""
        return self.images + self.videos > 0

    def fields(self) -> dict[str, Any]:
        """Return names and numbers, of which a client wrote none."""
        names = ("profile", "by", "method", "keep", "images", "videos", "tokens_in", "tokens_out")
        more = {"aged": self.aged, "full": self.full, "shadow": self.shadow}
        said = {name: getattr(self, name) for name in names}
        return said | {name: value for name, value in more.items() if value is not None}

    def request_id(self) -> dict[str, str]:
        """Return the field of the log that tells requests apart; none for a request without an id."""
        return {} if self.request is None else {"request": self.request}


class MethodError(OptionError):
    """A method's own code fails on a request, whose setting and input are right as far as is known."""


def is_input_error(error: Exception) -> bool:
    """Return True for what is wrong with a request whose setting is right, False where its method failed: clients can
    bring the first about at will, and nobody has to be called for it."""
    return isinstance(error, ValueError) and not isinstance(error, MethodError)


@contextmanager
def wrap_method_errors(setting: Setting) -> Iterator[None]:
    """Turn an error of a method's own code into ours: it is answered with HTTP 400, or by what `on_error` says. The log
    has where it came from."""
    try:
        yield
    except TokenPruneError:
        raise
    except Exception as error:
        name = get_label(setting)[0]
        logger.warning("%s failed on a request", name, exc_info=error)
        raise MethodError(
            f"{KEY}: {name} failed on this request ({type(error).__name__}): switch it off, "
            f'{{"{KEY}": {{"off": true}}}}, or ask for another profile'
        ) from error


@dataclass(frozen=True)
class ServedRequest:
    """A request as it is served.

    setting: in force for the request. items: what it is to each of its items, by modality and in their order.
    served:  the record of the request. full: see `RequestRecord`.
    fallback: what serves the request where this fails; None: it is refused then.
    """

    setting: Setting
    items: Mapping[str, tuple[Setting, ...]]
    served: RequestRecord
    full: str | None = None
    fallback: ServedRequest | None = None

    @classmethod
    def build(cls, setting: Setting, counts: Mapping[str, int], served: RequestRecord, **more: Any) -> ServedRequest:
        """Resolve a setting for a request with so many items of each modality."""
        items = {modality: settings_of_items(setting, modality, count) for modality, count in counts.items()}
        return cls(setting, items, served, **more)

    def without_cached(self, cached: Mapping[str, list[bool]]) -> ServedRequest:
        """Return the same for those items alone that are not cached, which vLLM counts anew."""
        items = {
            modality: tuple(one for one, hit in zip(self.items.get(modality, ()), hits, strict=True) if not hit)
            for modality, hits in cached.items()
        }
        return dataclasses.replace(self, items=items)

    def cache_key(self, modality: str, index: int) -> dict[str, Any]:
        """Return what tells an item under its setting from the same item under others."""
        return dict(get_cache_key(self.items[modality][index]))

    def get_shadow(self, item: Any) -> Any:
        """Return what else is counted of a `PromptItem`: nothing, here."""
