# SPDX-License-Identifier: Apache-2.0
"""`tokenprune serve-check` against a fake server. tests/vllm/ runs it against vLLM."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from tokenprune.cli import app
from tokenprune.integrations.vllm.check import draw_image, parse_samples

UNPRUNED, PRUNED = 600, 168


class FakeServer:
    """The endpoints of a server that the check reads. `setting` is None without the plugin."""

    def __init__(self) -> None:
        self.setting: str | None = "divprune 0.25"
        self.num_tokens, self.trusts, self.refuses, self.key, self.vllm = PRUNED, True, False, None, True
        self.counters = {"in": 7.0, "out": 3.0}
        self.requests: list[Any] = []
        self.header = False
        self.header_suffix = ""

    def metrics(self) -> str:
        page = 'vllm:num_requests_running{model_name="m"} 0.0\n' if self.vllm else "python_info 1.0\n"
        if self.setting is None:
            return page
        labels = 'profiles="fast,ocr",vllm="0.32.0",runner="v1",hooks="setting,cache",model_name="m",version="9.9"'
        page += f'tokenprune:info{{setting="of before",{labels}}} 0.0\n'
        page += f'tokenprune:info{{setting="{self.setting}",{labels}}} 1.0\n'
        for stage, value in self.counters.items():
            page += f'tokenprune:visual_tokens_total{{model_name="m",stage="{stage}"}} {value}\n'
        return page + 'tokenprune:visual_tokens_total{model_name="another",stage="in"} 5.0\n'

    def chat(self, body: Any) -> tuple[int, Any]:
        self.requests.append(body)
        if self.refuses:
            return 400, {"error": {"message": "no images\nhere"}}
        off = body.get("mm_processor_kwargs") == {"tokenprune": {"off": True}}
        if off and not self.trusts:
            return 400, {"error": {"message": "can only select a profile"}}
        self.counters["in"] += UNPRUNED - 24
        self.counters["out"] += (UNPRUNED if off else self.num_tokens) - 24
        return 200, {"usage": {"prompt_tokens": UNPRUNED if off else self.num_tokens}}


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: Any) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if server.header:
                self.send_header(
                    "x-tokenprune",
                    "divprune;keep=0.25;profile=default;by=default;in=576;out=144" + server.header_suffix,
                )
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, server.metrics())
            elif self.path != "/v1/models":
                self.answer(404, "no such page")
            elif server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                self.answer(401, {"error": "Unauthorized"})
            else:
                self.answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            self.answer(*server.chat(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{http_server.server_port}"
    yield server
    http_server.shutdown()
    thread.join()
    http_server.server_close()


def run_check(url: str, *options: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "OPENAI_API_KEY": ""}).invoke(app, ["serve-check", url, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout + result.stderr


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_pruned_image(fake: FakeServer, end: str) -> None:
    code, output = run_check(fake.url + end)
    assert code == 0 and f"An image is pruned: {UNPRUNED} -> {PRUNED} prompt tokens" in output
    assert "tokenprune 9.9 is loaded, setting divprune 0.25, profiles fast, ocr; vLLM 0.32.0" in output
    assert [request["model"] for request in fake.requests] == ["first", "first"] and fake.requests[0]["max_tokens"] == 1
    images = {json.dumps(request["messages"]) for request in fake.requests}
    assert len(images) == 1, "two images compared"


def test_counters_are_read_if_requests_may_not_override(fake: FakeServer) -> None:
    fake.trusts = False
    code, output = run_check(fake.url, "--model", "second")
    assert code == 0 and f"An image is pruned: {UNPRUNED - 24} -> {PRUNED - 24} visual tokens (counters" in output
    assert {request["model"] for request in fake.requests} == {"second"}


def test_the_header_takes_precedence_over_counters(fake: FakeServer) -> None:
    """Other requests can change the counters at the same time."""
    fake.trusts, fake.header, fake.num_tokens = False, True, UNPRUNED
    code, output = run_check(fake.url)
    assert code == 0 and "An image is pruned: 576 -> 144 visual tokens (header divprune;" in output


@pytest.mark.parametrize("trusts", [True, False])
def test_a_rollout_serves_unpruned_requests(fake: FakeServer, trusts: bool) -> None:
    fake.num_tokens, fake.trusts, fake.header, fake.header_suffix = UNPRUNED, trusts, True, ";full=rollout;shadow=144"
    code, output = run_check(fake.url)
    assert code == 0 and "served unpruned by a rollout" in output and "full=rollout;shadow=144" in output


@pytest.mark.parametrize("trusts", [True, False])
def test_an_unpruned_image(fake: FakeServer, trusts: bool) -> None:
    fake.num_tokens, fake.trusts = UNPRUNED, trusts
    code, output = run_check(fake.url)
    assert code == 6 and "is NOT pruned" in output and "'first'" in output


def test_the_plugin_is_not_loaded(fake: FakeServer) -> None:
    fake.setting = None
    code, output = run_check(fake.url)
    assert code == 4 and "VLLM_PLUGINS" in output and "installed in the image" in output and not fake.requests
    fake.vllm = False
    code, output = run_check(fake.url)
    assert code == 4 and "Is it a vLLM server" in output


def test_no_setting(fake: FakeServer) -> None:
    fake.setting = "none"
    code, output = run_check(fake.url)
    assert code == 5 and "--mm-processor-kwargs" in output and not fake.requests


@pytest.mark.parametrize(
    ("setting", "message"), [("off", "own setting is off"), ("dart 0.25 in the language model", "not")]
)
def test_settings_that_shorten_no_prompt(fake: FakeServer, setting: str, message: str) -> None:
    fake.setting, fake.num_tokens = setting, UNPRUNED
    code, output = run_check(fake.url)
    assert code == 0 and message in output and len(fake.requests) == 1


def test_one_image_does_not_show_ages(fake: FakeServer) -> None:
    fake.num_tokens = UNPRUNED
    for setting, expected, message in (
        ("divprune 1 by age", 0, "The newest image of a prompt keeps all"),
        ("divprune 0.25 by age", 6, "NOT pruned"),
    ):
        fake.setting = setting
        code, output = run_check(fake.url)
        assert code == expected and message in output


def test_an_image_is_refused(fake: FakeServer) -> None:
    fake.refuses = True
    code, output = run_check(fake.url)
    assert code == 6 and "HTTP 400: no images here" in output


def test_a_key(fake: FakeServer) -> None:
    fake.key = "secret"
    code, output = run_check(fake.url)
    assert code == 6 and "HTTP 401: Unauthorized" in output and "--api-key" in output
    assert run_check(fake.url, "--api-key", "secret")[0] == 0


def test_no_server() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        code, output = run_check(f"http://127.0.0.1:{closed.getsockname()[1]}", "--timeout", "5")
    assert code == 3 and "no answer from" in output and "refused" in output
    assert run_check("localhost:8000") == (
        2,
        "error: 'localhost:8000' is not an HTTP address. Pass one such as http://localhost:8000\n",
    )


def test_a_server_other_than_vllm(fake: FakeServer) -> None:
    fake.vllm, fake.setting = False, None
    assert run_check(fake.url)[0] == 4
    code, output = run_check(fake.url + "/below")
    assert code == 3 and "/below/metrics answers with HTTP 404" in output
    with socket.create_server(("127.0.0.1", 0)) as mute:
        code, output = run_check(f"http://127.0.0.1:{mute.getsockname()[1]}", "--timeout", "0.2")
    assert code == 3 and "timed out" in output


def test_parse_prometheus_labels() -> None:
    page = 'a:b{x="1",y="a} \\"b\\" c"} 2.5\na:bc{x="2"} 1\n# a:b{x="3"} 1\n'
    assert parse_samples(page, "a:b") == [({"x": "1", "y": 'a} \\"b\\" c'}, 2.5)]


def test_images_are_valid_and_differ_by_seed() -> None:
    image, same, other = (Image.open(io.BytesIO(draw_image(seed))) for seed in (1.0, 1.0, 2.0))
    assert image.size == (448, 448) and image.mode == "RGB" and image.tobytes() == same.tobytes() != other.tobytes()
    assert len(image.crop((0, 0, 224, 448)).getcolors()) == 1 and image.crop((224, 0, 448, 448)).getcolors(999) is None
    assert len(base64.b64encode(draw_image(1.0))) < 500_000
