# SPDX-License-Identifier: Apache-2.0
"""vLLM's image caches in the front end and in the engine, with requests that are refused or overtake each other."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.cache.base import MultiModalCacheMissError
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from tokenprune.integrations.vllm.frontend import sender_cache

ROOM = 10  # items of size 1 in the cache
FLOATS = 1000


def make_item(name: str, size: int = 1) -> Any:
    pixels = torch.full((size * FLOATS,), float(ord(name[0])))
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(pixels, MultiModalBatchedField())})


class CachePair:
    """A front end, an engine, and the requests in transit between them.

    Attributes:
        processed: Names of the images in each run of the processor.
    """

    def __init__(self, sizes: dict[str, int] | None = None, executor: Any = None) -> None:
        room = SimpleNamespace(mm_processor_cache_gb=ROOM * FLOATS * 4 / 2**30)
        config: Any = SimpleNamespace(get_multimodal_config=lambda: room)
        self.engine, self.front = LruKeyReplicatedReceiverCache(config), LruKeyReplicatedSenderCache(config)
        self.sizes, self.processed = sizes or {}, list[str]()
        self.before: Callable[[], None] = lambda: None  # called each time a request arrives
        self.reports: list[Any] = []  # next answers of the engine
        self.client: Any = SimpleNamespace(
            add_request=self._arrive, add_request_async=self._arrive_async, get_output=lambda: self.reports.pop(0),
            get_output_async=self._answer_async,
        )  # fmt: skip
        sender_cache._follow(self.front, self.client, executor)

    def process(self, names: str) -> Any:
        """Process images like `BaseMultiModalProcessor._cached_apply_hf_processor` and the plugin's code around it."""
        front: Any = self.front
        cached = front.is_cached(list(names))
        fresh = [None if is_held else (self._run(name), [name]) for name, is_held in zip(names, cached, strict=True)]
        for name in names:
            front.touch_sender_cache_item(name)
        items = [front.get_and_update_item(item, name)[0] for name, item in zip(names, fresh, strict=True)]
        front.release_sender_touches()
        mm_items = {"image": items}
        if hasattr(front, "promise"):
            front.promise(mm_items, lambda: {"image": [self._run(name) for name in names]})
        features = [
            SimpleNamespace(data=item, mm_hash=name, identifier=f"lora:{name}")
            for name, item in zip(names, mm_items["image"], strict=True)
        ]
        return SimpleNamespace(mm_features=features)

    def send(self, request: Any) -> None:
        self.client.add_request(request)

    def _run(self, name: str) -> Any:
        self.processed.append(name)
        return make_item(name, self.sizes.get(name, 1))

    def _arrive(self, request: Any) -> None:
        self.before()
        copies: Any = [SimpleNamespace(**vars(feature)) for feature in request.mm_features]
        assert not any(isinstance(feature.data, sender_cache.PromisedItem) for feature in copies)
        for feature in self.engine.get_and_update_features(copies):
            assert feature.data["pixels"].data[0] == ord(feature.mm_hash), (
                "the engine has another image under this hash"
            )

    async def _answer_async(self) -> Any:
        return self.reports.pop(0)

    def miss(self, *names: str) -> Any:
        """Empty the engine's cache, and return its report of a request that missed some images."""
        self.engine.clear_cache()
        output = EngineCoreOutput("request", [], mm_cache_miss_hashes=list(names))
        self.reports.append(EngineCoreOutputs(outputs=[EngineCoreOutput("other", [1]), output]))
        return self.reports[-1]

    async def _arrive_async(self, request: Any) -> None:
        self._arrive(request)
        await asyncio.sleep(0)


def test_image_evicted_between_processing_and_sending() -> None:
    pair = CachePair()
    pair.send(pair.process("x"))
    late = pair.process("x")  # only its hash is sent
    assert pair.processed == ["x"]
    for name in "abcdefghij":  # these requests overtake it, and fill the engine's cache
        pair.send(pair.process(name))
    pair.send(late)
    assert pair.processed == list("xabcdefghijx")
    assert "x" in pair.engine._cache


def test_image_kept_only_in_the_front_end_by_refused_requests() -> None:
    pair = CachePair()
    pair.send(pair.process("x"))
    for name in "abcdefghijkl":
        pair.process("x")  # this request is refused
        pair.send(pair.process(name))
    pair.send(pair.process("x"))


def test_an_image_whose_first_request_is_refused() -> None:
    pair = CachePair()
    pair.process("x")
    second, third = pair.process("x"), pair.process("xx")
    pair.send(second)
    pair.send(third)
    assert pair.processed == ["x", "x"]


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_requests_makes_the_engine_miss_an_image(seed: int) -> None:
    chance = random.Random(seed)
    names = "abcdefghijklmnopqrstuvw"
    pair = CachePair({name: chance.choice([1, 1, 2, 3, 11]) for name in names})
    waiting: list[Any] = []
    for _ in range(400):
        draw = chance.random()
        if draw < 0.5 or not waiting:
            image_names = "".join(
                chance.choice(names[: chance.choice([3, 23])]) for _ in range(chance.choice([1, 1, 2, 3]))
            )
            if sum(pair.sizes[name] for name in set(image_names)) <= ROOM:  # vLLM's front end needs this much memory
                waiting.append(pair.process(image_names))
        elif draw < 0.9:
            pair.send(waiting.pop(chance.randrange(len(waiting))))
        else:
            waiting.pop(chance.randrange(len(waiting)))
    certain = pair.front._held.certain  # type: ignore[attr-defined]
    assert certain == set(pair.engine._cache) and len(certain) > 1  # the plugin's account equals the engine's cache
    assert list(pair.front._held.order) == list(pair.engine._cache.order)  # type: ignore[attr-defined]


def test_failed_send_makes_images_uncertain() -> None:
    pair = CachePair()
    pair.send(pair.process("x"))

    def fail() -> None:
        raise ConnectionError

    pair.before = fail
    with pytest.raises(ConnectionError):
        pair.send(pair.process("xy"))
    pair.before = lambda: None
    pair.send(pair.process("yx"))


def test_miss_or_reset_makes_images_uncertain() -> None:
    pair = CachePair()
    pair.send(pair.process("ab"))
    pair.engine.clear_cache()  # the front end does not notice
    with pytest.raises(MultiModalCacheMissError):
        pair.send(pair.process("a"))
    pair.front.invalidate("a")  # as vLLM's front end does after a miss
    pair.send(pair.process("b"))
    late = pair.process("b")
    pair.front.clear_cache()
    pair.engine.clear_cache()
    pair.send(late)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reported_miss_is_handled_before_vllm_handles_it(asynchronous: bool) -> None:
    """vLLM 0.33 only queues the report, and drops it if the front end's cache no longer holds the image."""
    pair = CachePair()
    pair.send(pair.process("ab"))
    report, late = pair.miss("a"), pair.process("b")
    received = asyncio.run(pair.client.get_output_async()) if asynchronous else pair.client.get_output()
    assert received is report
    pair.send(late)
    assert pair.processed == ["a", "b", "b"]


def test_answers_without_a_miss_change_nothing() -> None:
    pair = CachePair()
    pair.send(pair.process("a"))
    pair.reports.append(EngineCoreOutputs(outputs=[EngineCoreOutput("other", [1])]))
    pair.client.get_output()
    pair.send(pair.process("a"))
    assert pair.processed == ["a"]


def test_a_miss_in_an_engine_of_this_process_makes_every_item_uncertain() -> None:
    pair = CachePair()
    pair.send(pair.process("ab"))
    pair.engine.clear_cache()
    late = pair.process("b")
    with pytest.raises(MultiModalCacheMissError):
        pair.send(pair.process("a"))
    pair.send(late)
    assert pair.processed == ["a", "b", "b"]


def test_image_known_only_by_name_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    pair = CachePair()
    pair.send(pair.process("x"))
    late = pair.process("x")
    for name in "abcdefghij":
        pair.send(pair.process(name))
    pair._run = lambda name: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(MultiModalCacheMissError):
        pair.send(late)
    assert "cannot process an image again" in caplog.text


def test_images_are_released_after_their_request_is_sent() -> None:
    pair = CachePair()
    pair.send(pair.process("x"))
    second = pair.process("x")
    promised = second.mm_features[0].data
    assert float(promised["pixels"].data[0]) == ord("x")  # readers see the item
    pair.send(second)
    assert second.mm_features[0].data is None and not promised.data and not vars(promised)["_reprocessing"]


def test_server_reprocesses_in_its_processing_thread() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="processing") as executor:
            pair = CachePair(executor=executor)
            await pair.client.add_request_async(pair.process("xy"))
            late = pair.process("xy")
            for name in "abcdefghij":
                await pair.client.add_request_async(pair.process(name))
            threads: list[str] = []
            process, next_one, overtaken = pair._run, pair.process("j"), threading.Event()

            def spy(name: str) -> Any:
                assert overtaken.wait(20)
                threads.append(threading.current_thread().name)
                return process(name)

            pair._run = spy  # type: ignore[method-assign]
            arrived: list[int] = []
            pair.before = lambda: arrived.append(len(threads)) or overtaken.set()
            await asyncio.gather(pair.client.add_request_async(late), pair.client.add_request_async(next_one))
            assert threads == ["processing_0"] * 2 and arrived == [0, 2]

    asyncio.run(run())


def test_other_caches_are_left_alone() -> None:
    client = SimpleNamespace(add_request=1, add_request_async=2)
    sender_cache._follow(SimpleNamespace(), client)
    assert vars(client) == {"add_request": 1, "add_request_async": 2}
