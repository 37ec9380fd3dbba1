# SPDX-License-Identifier: Apache-2.0
"""Two engines behind one server (--data-parallel-size 2) give the answers of one engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CHECKPOINTS
from conftest import DIVPRUNE
from server import serve_with_several_engines
from test_server import NAME, ask, check

REQUESTS = 16


@pytest.mark.thorough
def test_answers_are_those_of_one_engine(folder: Callable[[str], Path], tmp_path: Path, reference: Any) -> None:
    arguments = ["--max-model-len", "1024", "--trust-request-mm-kwargs", "--data-parallel-size", "2"]
    images = [CHECKPOINTS[NAME].images(1, seed=seed) for seed in range(4)]
    overrides: list[Any] = [None, {"keep": 0.5}, {"off": True}, {"method": "uniform", "keep": 0.3}]
    requests = [(images[index % 4], overrides[index // 4 % 4]) for index in range(REQUESTS)]
    with serve_with_several_engines(folder(NAME), tmp_path, DIVPRUNE, *arguments) as server:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda request: ask(server, request[0], "what is it? ", request[1]), requests))
        for reply, (request_images, override) in zip(replies, requests, strict=True):
            check(reply, reference, request_images, "what is it? ", override)
        served = server.counted("vllm:request_success_total")
        by_engine = [sum(n for labels, n in served.items() if f'engine="{engine}"' in labels) for engine in (0, 1)]
        assert sum(by_engine) == REQUESTS and min(by_engine) > 0, server.story(str(served))
        assert sum(server.counted("tokenprune:requests_total").values()) == REQUESTS
