# SPDX-License-Identifier: Apache-2.0
"""The front end's cache of processed images, synchronized with the engine's cache.

vLLM's front end sends only the hash of an image that it has processed before, and assumes that the engine still holds
the image. That may be wrong: a request with the image was refused or its client disconnected, or requests were sent
and processed in different orders, so that the two caches evicted different images. vLLM answers such a request with an
error, in a stream after HTTP 200.

This module tracks the engine's cache in the order of sent requests. It processes a missing image again just before its
request is sent.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from vllm.multimodal.cache.base import MultiModalCache, MultiModalCacheMissError
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.utils.cache import LRUCache

from tokenprune.integrations.shared.attachable import swap_class
from tokenprune.integrations.vllm.compat import on_start
from tokenprune.integrations.vllm.settings.configuration import get_server_setting

logger = logging.getLogger(__name__)
Items = Mapping[str, list[Any]]  # items of a request by modality


class EngineAccount(LRUCache):
    """Model of the engine's cache: bytes of each item by hash, with the same eviction order.

    Attributes:
        certain: Hashes of items that the engine holds. Other items of the account may be there, and use memory.
    """

    def __init__(self, capacity: float) -> None:
        super().__init__(capacity, getsizeof=lambda size: size)
        self.certain: set[str] = set()

    def _on_remove(self, key: str, value: int | None) -> None:
        self.certain.discard(key)

    def add(self, key: str, item: Any) -> None:
        """Record an item that is sent. The engine replaces an item with the same hash."""
        self.pop(key, None)
        if self.put_if_fits(key, MultiModalCache.get_item_size(item)):
            self.certain.add(key)


class Reprocessing:
    """The items of a request, processed again on first access."""

    def __init__(self, process: Callable[[], Items]) -> None:
        self._process = process

    @cached_property
    def items(self) -> Items | None:
        """The items, or None if processing fails, as for an item that the client sent by name only."""
        try:
            return self._process()
        except Exception as error:
            logger.warning("cannot process an image again that the engine no longer holds", exc_info=error)
            return None


class PromisedItem(MultiModalKwargsItem):
    """An item in place of a processed image: sent as a hash if the engine holds the image, else processed again."""

    def __init__(self, reprocessing: Reprocessing, modality: str, index: int) -> None:
        self._reprocessing: Reprocessing | None = reprocessing
        self._key = modality, index

    def make(self) -> Any:
        """Return the processed item, or None if that fails or the item was released."""
        items = None if self._reprocessing is None else self._reprocessing.items
        return None if items is None else items[self._key[0]][self._key[1]]

    def forget(self) -> None:
        """Release the request's images. vLLM keeps this object until the request is answered."""
        self._reprocessing = None

    @property
    def data(self) -> Any:
        return self.make() or {}


class SenderCache(LruKeyReplicatedSenderCache):
    """Mixin for vLLM's cache, which follows the order of processed requests."""

    _held: EngineAccount  # items that the engine holds

    def promise(self, items: Any, process: Callable[[], Items]) -> None:
        """Replace items that would be sent by hash by promised items. `process` returns all items again."""
        reprocessing = Reprocessing(process)
        for modality, of_modality in items.items():
            items[modality] = [
                PromisedItem(reprocessing, modality, index) if item is None else item
                for index, item in enumerate(of_modality)
            ]

    def find_missing(self, request: Any) -> list[PromisedItem]:
        """Return the promised items of a request that the engine does not hold now."""
        features = request.mm_features or ()
        promised = [(feature.data, _key(feature)) for feature in features if isinstance(feature.data, PromisedItem)]
        return [item for item, key in promised if key not in self._held.certain]

    def settle(self, request: Any) -> None:
        """Resolve the promised items of a request that is sent now, and record the items that the engine then holds."""
        features = request.mm_features or ()
        for feature in features:  # the engine also touches all items before it evicts one
            self._held.touch(_key(feature))
        for feature in features:
            key, item = _key(feature), feature.data
            if isinstance(item, PromisedItem):
                feature.data = None if key in self._held.certain else item.make()
                item.forget()
            if feature.data is None:
                self._held.touch(key)
            else:
                self._held.add(key, feature.data)

    @contextmanager
    def track_sending(self, request: Any) -> Iterator[None]:
        """Send a settled request in this context. If sending fails, the request's items become uncertain."""
        try:
            yield
        except MultiModalCacheMissError:  # raised by an engine in this process
            self.distrust()
            raise
        except BaseException:
            self._held.certain.difference_update(_key(feature) for feature in request.mm_features or ())
            raise

    def distrust(self) -> None:
        """Mark every item of the account as uncertain, because the engine missed an item or dropped all items."""
        self._held.certain.clear()

    def read_misses(self, outputs: Any) -> None:
        """Distrust the account if the engine reports a miss in `outputs`, an `EngineCoreOutputs`.

        vLLM's own handling is not enough: 0.33 calls `invalidate` only when it processes the next image, and not for an
        item that the front end's cache has evicted.
        """
        if any(output.mm_cache_miss_hashes for output in outputs.outputs):
            self.distrust()

    def invalidate(self, mm_hash: str) -> None:
        super().invalidate(mm_hash)
        self.distrust()

    def clear_cache(self) -> None:
        super().clear_cache()
        self.distrust()


def _key(feature: Any) -> str:
    return feature.mm_hash or feature.identifier


def sync_sender_caches() -> None:
    """Synchronize the cache of each new engine whose server has a setting."""
    on_start(_note)


def _note(engine: Any) -> None:
    if get_server_setting(engine.vllm_config.model_config) is not None:
        # vLLM processes images here, one request at a time.
        executor = getattr(engine.renderer, "_mm_executor", None)
        _follow(engine.renderer.mm_processor_cache, engine.engine_core, executor)


def _follow(cache: Any, client: Any, executor: Executor | None = None) -> None:
    """Track the engine's cache by wrapping methods of the engine's client (an `EngineCoreClient`).

    Other kinds of caches send or share images in full and are not tracked. A server processes images in `executor`.
    """
    if type(cache) is not LruKeyReplicatedSenderCache:
        return
    swap_class(cache, SenderCache)
    cache._held = EngineAccount(cache._cache.maxsize)
    send, send_async, receive, receive_async = (
        client.add_request, client.add_request_async, client.get_output, client.get_output_async
    )  # fmt: skip

    @functools.wraps(send)
    def add_request(request: Any) -> None:
        cache.settle(request)
        with cache.track_sending(request):
            send(request)

    @functools.wraps(send_async)
    async def add_request_async(request: Any) -> None:
        for item in cache.find_missing(request):
            await asyncio.get_running_loop().run_in_executor(executor, item.make)
        cache.settle(request)  # no other task runs until the request is sent
        with cache.track_sending(request):
            await send_async(request)

    @functools.wraps(receive)
    def get_output() -> Any:
        outputs = receive()
        cache.read_misses(outputs)
        return outputs

    @functools.wraps(receive_async)
    async def get_output_async() -> Any:
        outputs = await receive_async()
        cache.read_misses(outputs)
        return outputs

    client.add_request, client.add_request_async = add_request, add_request_async
    client.get_output, client.get_output_async = get_output, get_output_async
