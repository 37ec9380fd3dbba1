# SPDX-License-Identifier: Apache-2.0
"""The front end's cache of processed images, in step with the engine's.

vLLM's front end takes an image for one that the engine holds as soon as it has processed it, and from then on sends its
hash alone. A request that is refused later, or whose client leaves, never takes the image along; the next one with it
would be answered with HTTP 500. So an image stays here until it was sent, and goes with each request until then.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

from tokenprune.integrations.shared.attachable import swap_class
from tokenprune.integrations.vllm.front.engines import on_start
from tokenprune.integrations.vllm.setting.configuration import configured

logger = logging.getLogger(__name__)
# Bytes of images that were processed and not sent. Those of requests under way are in memory anyway; the others wait
# for a request that may never come.
MOST = 256 * 2**20


class SenderCache(LruKeyReplicatedSenderCache):
    """Mixed into vLLM's cache. `_unsent`: by hash, an image that is noted as held and was not sent, and its bytes."""

    _unsent: dict[str, tuple[Any, int]]

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        item, updates = super().get_and_update_item(mm_item, mm_hash)
        if item is None:
            return self._unsent.get(mm_hash, (None, 0))[0], updates
        if self.is_cached_item(mm_hash):
            self._unsent[mm_hash] = item, MultiModalCache.get_item_size(item)
        return item, updates

    def delivered(self, request: Any) -> None:
        """Note that the engine has the images of a request."""
        for feature in request.mm_features or ():
            if feature.data is not None:
                self._unsent.pop(feature.mm_hash or feature.identifier, None)

    def release_sender_touches(self) -> None:
        """Forget the oldest images beyond `MOST`. vLLM calls it when a request's images are in the cache."""
        super().release_sender_touches()
        unsent = list(self._unsent.items())  # at once: requests are sent from another thread
        held = sum(size for _, (_, size) in unsent)
        for mm_hash, (_, size) in unsent:
            if held <= MOST:
                break
            self.invalidate(mm_hash)
            held -= size

    def invalidate(self, mm_hash: str) -> None:
        super().invalidate(mm_hash)
        self._unsent.pop(mm_hash, None)

    def clear_cache(self) -> None:
        super().clear_cache()
        self._unsent.clear()


def keep_in_step() -> None:
    """Make each new engine note in its front end's cache the images that were sent. A server without a setting behaves
    as before."""
    on_start(_note)


def _note(engine: Any) -> None:
    if configured(engine.vllm_config.model_config) is not None:
        _follow(engine.renderer.mm_processor_cache, engine.engine_core)


def _follow(cache: Any, client: Any) -> None:
    """Note sent images in the front end's `cache`; caches of other kinds send images whole, or share them. client: of
    the engine."""
    if type(cache) is not LruKeyReplicatedSenderCache:
        return
    swap_class(cache, SenderCache)
    cache._unsent = {}
    send, send_async = client.add_request, client.add_request_async

    @functools.wraps(send)
    def add_request(request: Any) -> None:
        send(request)
        cache.delivered(request)

    @functools.wraps(send_async)
    async def add_request_async(request: Any) -> None:
        await send_async(request)
        cache.delivered(request)

    client.add_request, client.add_request_async = add_request, add_request_async
