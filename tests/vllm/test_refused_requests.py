# SPDX-License-Identifier: Apache-2.0
"""Requests that end between the front end's image cache and the engine's: refused requests, and clients that leave.

The next request with the same image must be answered. Without the plugin, vLLM answers it with HTTP 500.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from runner import IN_LLM
from server import CALL, Server, serve, write_messages

NAME, CHAT = "llava", "/v1/chat/completions"
MAX_IMAGES = 30  # images of a request
DART = {"method": "dart", "keep": 0.25, "pivot_text": 0, "layer": 1, "experimental_in_llm": True}
BAD: list[dict[str, Any]] = [
    {"temperature": -1}, {"top_p": 2}, {"top_k": -5}, {"n": 0}, {"max_tokens": -1}, {"max_tokens": 5000},
    {"min_tokens": 9}, {"presence_penalty": 9}, {"frequency_penalty": -9}, {"repetition_penalty": 0}, {"min_p": 2},
    {"logprobs": True, "top_logprobs": 99}, {"prompt_logprobs": 99}, {"stop": ""}, {"bad_words": [""]},
    {"logit_bias": {"99999": 1}}, {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": {"type": "nonsense"}}}, {"allowed_token_ids": []}, {"allowed_token_ids": [99999]},
]  # fmt: skip


def start_server(folder: Any, log_folder: Path, setting: dict[str, Any], *arguments: str) -> Any:
    return serve(
        folder(NAME), log_folder, setting, "--limit-mm-per-prompt", json.dumps({"image": MAX_IMAGES}), *arguments
    )


@pytest.fixture(scope="module")
def server(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(folder, tmp_path_factory.mktemp("refused"), DIVPRUNE) as running:
        yield running


def body(images: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 2, "messages": write_messages(images, "what? "), **more}


def image(seed: int) -> list[Any]:
    return CHECKPOINTS[NAME].images(1, seed=seed)


def is_answered(server: Server, request: dict[str, Any], path: str = CHAT) -> bool:
    return not isinstance(server.post_json(path, request), int)


def test_requests_after_a_refused_request_succeed(server: Server) -> None:
    for index, bad in enumerate(BAD):
        assert server.post_json(CHAT, body(image(100 + index), **bad)) == 400, bad
        assert is_answered(server, body(image(100 + index))), bad
        assert is_answered(server, body(image(100 + index))), bad  # now only its hash is sent


def test_images_are_sent_once(server: Server) -> None:
    name = "vllm:mm_cache_hits_total"
    assert is_answered(server, body(image(900)))
    before = sum(server.counted(name).values())
    assert is_answered(server, body(image(900)))
    assert sum(server.counted(name).values()) == before + 1


def test_refused_requests_keep_the_caches_consistent(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """They keep an image in the front end's cache, while other images remove it from the engine's cache."""
    room = 6.5 * 3 * 84 * 84 * 4 / 2**30  # memory of six images
    with start_server(folder, tmp_path, DIVPRUNE, "--mm-processor-cache-gb", str(room)) as server:
        assert is_answered(server, body(image(1)))
        for index in range(8):
            assert server.post_json(CHAT, body(image(1), n=0)) == 400
            assert is_answered(server, body(image(100 + index)))
        assert is_answered(server, body(image(1)))
        assert "cannot process an image again" not in server.log.read_text()


def test_several_requests_share_an_image_of_which_one_is_refused(server: Server) -> None:
    images = image(950) + image(951) + image(950)
    assert server.post_json(CHAT, body(images[:2], n=0)) == 400
    assert is_answered(server, body(images))
    assert server.post_json(CHAT, body(images, top_p=2)) == 400
    assert is_answered(server, body(images[1:]))


def test_a_client_that_leaves_while_its_images_are_read(server: Server) -> None:

    def flat(start: int) -> dict[str, Any]:
        colours = [(i % 251, 7 * i % 253, 13 * i % 241) for i in range(start, start + MAX_IMAGES)]
        return body([Image.new("RGB", (1400, 1400), colour) for colour in colours])

    begin = time.monotonic()
    assert is_answered(server, flat(10_000))
    duration = time.monotonic() - begin
    for index, part in enumerate((0.1, 0.15, 0.2, 0.25, 0.3, 0.4)):
        request = flat(100 * index)
        client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=CALL)
        client.request("POST", CHAT, json.dumps(request), {"Content-Type": "application/json"})
        time.sleep(part * duration)
        client.close()
        time.sleep(0.3 * duration)  # until the started images are read
        assert is_answered(server, request), part


@IN_LLM
def test_log_probabilities_of_the_prompt_are_refused_before_images_are_read(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with start_server(folder, tmp_path, DART, "--disable-chunked-mm-input") as server:
        assert server.post_json(CHAT, body(image(1), prompt_logprobs=1)) == 400
        assert sum(server.counted("vllm:mm_cache_queries_total").values()) == 0
        assert sum(server.counted("tokenprune:refusals_total").values()) == 1
        assert is_answered(server, body(image(1)))
