# SPDX-License-Identifier: Apache-2.0
"""The front end's cache of processed images, in step with the engine's.

vLLM's front end sends an image that it has processed before by its hash alone, and takes for granted that the engine
still holds it. The engine may not: the request that should have taken the image along was refused, or its client left;
or requests were sent in another order than they were processed in, or some not at all, so that the two caches let go of
different images. vLLM answers such a request with an error, in a stream behind HTTP 200.

So we keep account of the engine's cache in the order in which it gets requests, and an image that is not there is
processed once more just before its request is sent.
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
Items = Mapping[str, list[Any]]  # of a request, by modality


class EngineAccount(LRUCache):
    """Account of the engine's cache: bytes of each item, by its hash, in the same order of eviction.

    certain: hashes of the items that are there. Others of the account may be, and count as far as room goes.
    """

    def __init__(self, capacity: float) -> None:
        super().__init__(capacity, getsizeof=lambda size: size)
        self.certain: set[str] = set()

    def _on_remove(self, key: str, value: int | None) -> None:
        self.certain.discard(key)

    def add(self, key: str, item: Any) -> None:
        """Note an item that is sent; the engine puts it in place of what it has under its hash."""
        self.pop(key, None)
        if self.put_if_fits(key, MultiModalCache.get_item_size(item)):
            self.certain.add(key)


class Reprocessing:
    """The items of a request, processed once more when one of them is asked for."""

    def __init__(self, process: Callable[[], Items]) -> None:
        self._process = process

    @cached_property
    def items(self) -> Items | None:
        """None if that fails, as for an item of which the client sent a name alone."""
        try:
            return self._process()
        except Exception as error:
            logger.warning("an image that the engine has lost was not processed again", exc_info=error)
            return None


class PromisedItem(MultiModalKwargsItem):
    """An item that goes by its hash alone if the engine holds it when its request is sent."""

    def __init__(self, again: Reprocessing, modality: str, index: int) -> None:
        self._again: Reprocessing | None = again
        self._place = modality, index

    def make(self) -> Any:
        """Return the item itself; None if it cannot be made, or is no longer promised."""
        items = None if self._again is None else self._again.items
        return None if items is None else items[self._place[0]][self._place[1]]

    def forget(self) -> None:
        """Let go of the request's images: vLLM keeps the object until the request is answered."""
        self._again = None

    @property
    def data(self) -> Any:
        return self.make() or {}


class SenderCache(LruKeyReplicatedSenderCache):
    """Mixed into vLLM's cache, which goes by the order in which requests are processed. `_held`: the account."""

    _held: EngineAccount

    def promise(self, items: Any, process: Callable[[], Items]) -> None:
        """Put a promise in place of each item of a request that would be sent by its hash alone. process: returns all
        items of the request, processed once more."""
        again = Reprocessing(process)
        for modality, own in items.items():
            items[modality] = [
                PromisedItem(again, modality, index) if item is None else item for index, item in enumerate(own)
            ]

    def find_missing(self, request: Any) -> list[PromisedItem]:
        """Return the promised items of a request that the engine does not hold now."""
        features = request.mm_features or ()
        promised = [(one.data, _key(one)) for one in features if isinstance(one.data, PromisedItem)]
        return [item for item, key in promised if key not in self._held.certain]

    def settle(self, request: Any) -> None:
        """Replace the promised items of a request that is sent now, and note what the engine holds then."""
        features = request.mm_features or ()
        for feature in features:  # the engine, too, touches all before it lets go of any
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
        """Send a settled request within. If sending fails or is interrupted, the request's items are uncertain."""
        try:
            yield
        except MultiModalCacheMissError:  # of an engine in this process
            self.distrust()
            raise
        except BaseException:
            self._held.certain.difference_update(_key(feature) for feature in request.mm_features or ())
            raise

    def distrust(self) -> None:
        """Treat every item of the account as uncertain, because the engine missed an item or dropped all of them."""
        self._held.certain.clear()

    def read_misses(self, outputs: Any) -> None:
        """Distrust the account if the engine reports a miss in `outputs`, an `EngineCoreOutputs`.

        vLLM's own reaction does not suffice: 0.33 calls `invalidate` only when it processes the next image, and not for
        an item that the front end's cache has dropped.
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
    """Make each new engine keep account in its front end's cache. A server without a setting behaves as before."""
    on_start(_note)


def _note(engine: Any) -> None:
    if get_server_setting(engine.vllm_config.model_config) is not None:
        # Where vLLM processes images, one request at a time.
        executor = getattr(engine.renderer, "_mm_executor", None)
        _follow(engine.renderer.mm_processor_cache, engine.engine_core, executor)


def _follow(cache: Any, client: Any, executor: Executor | None = None) -> None:
    """Keep the account of the front end's cache, by wrapping methods of the engine's client.

    Args:
        cache: The front end's cache. Caches of other kinds send images in full or share them, and are left alone.
        client: Client of the engine, an `EngineCoreClient`.
        executor: Where a server processes images; None for asyncio's default executor.
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
        cache.settle(request)  # nothing else runs until the request is on its way
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
