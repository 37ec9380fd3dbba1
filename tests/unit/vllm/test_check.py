# SPDX-License-Identifier: Apache-2.0
"""`tokenprune serve-check`, against a server of ours that answers like vLLM's; a real one is in tests/vllm/."""

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

FULL, LEFT = 600, 168


class Fake:
    """The parts of a server that the check asks. setting: None for a server without the plugin."""

    def __init__(self) -> None:
        self.setting: str | None = "divprune 0.25"
        self.left, self.trusts, self.refuses, self.key, self.vllm = LEFT, True, False, None, True
        self.counted = {"in": 7.0, "out": 3.0}
        self.asked: list[Any] = []
        self.header = False
        self.full = ""

    def metrics(self) -> str:
        page = 'vllm:num_requests_running{model_name="m"} 0.0\n' if self.vllm else "python_info 1.0\n"
        if self.setting is None:
            return page
        labels = 'profiles="fast,ocr",vllm="0.32.0",runner="v1",hooks="setting,cache",model_name="m",version="9.9"'
        page += f'tokenprune:info{{setting="of before",{labels}}} 0.0\n'
        page += f'tokenprune:info{{setting="{self.setting}",{labels}}} 1.0\n'
        for stage, value in self.counted.items():
            page += f'tokenprune:visual_tokens_total{{model_name="m",stage="{stage}"}} {value}\n'
        return page + 'tokenprune:visual_tokens_total{model_name="another",stage="in"} 5.0\n'

    def chat(self, body: Any) -> tuple[int, Any]:
        self.asked.append(body)
        if self.refuses:
            return 400, {"error": {"message": "no images\nhere"}}
        off = body.get("mm_processor_kwargs") == {"tokenprune": {"off": True}}
        if off and not self.trusts:
            return 400, {"error": {"message": "can only select a profile"}}
        self.counted["in"] += FULL - 24
        self.counted["out"] += (FULL if off else self.left) - 24
        return 200, {"usage": {"prompt_tokens": FULL if off else self.left}}


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: Any) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if made.header:
                self.send_header(
                    "x-tokenprune", "divprune;keep=0.25;profile=default;by=default;in=576;out=144" + made.full
                )
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, made.metrics())
            elif self.path != "/v1/models":
                self.answer(404, "no such page")
            elif made.key and self.headers["Authorization"] != f"Bearer {made.key}":
                self.answer(401, {"error": "Unauthorized"})
            else:
                self.answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            self.answer(*made.chat(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def check(url: str, *options: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "OPENAI_API_KEY": ""}).invoke(app, ["serve-check", url, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout + result.stderr


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_it_is_on(fake: Fake, end: str) -> None:
    code, said = check(fake.url + end)
    assert code == 0 and f"An image is pruned: {FULL} -> {LEFT} prompt tokens" in said
    assert "tokenprune 9.9 is loaded, setting divprune 0.25, profiles fast, ocr; vLLM 0.32.0" in said
    assert [one["model"] for one in fake.asked] == ["first", "first"] and fake.asked[0]["max_tokens"] == 1
    images = {json.dumps(one["messages"]) for one in fake.asked}
    assert len(images) == 1, "two images compared"


def test_counters_speak_where_requests_may_not_choose(fake: Fake) -> None:
    fake.trusts = False
    code, said = check(fake.url, "--model", "second")
    assert code == 0 and f"An image is pruned: {FULL - 24} -> {LEFT - 24} visual tokens (counters" in said
    assert {one["model"] for one in fake.asked} == {"second"}


def test_the_answer_speaks_before_the_counters(fake: Fake) -> None:
    """Counters that requests of others may move at the same time."""
    fake.trusts, fake.header, fake.left = False, True, FULL
    code, said = check(fake.url)
    assert code == 0 and "An image is pruned: 576 -> 144 visual tokens (header divprune;" in said


@pytest.mark.parametrize("trusts", [True, False])
def test_a_rollout_holds_it_back(fake: Fake, trusts: bool) -> None:
    fake.left, fake.trusts, fake.header, fake.full = FULL, trusts, True, ";full=rollout;shadow=144"
    code, said = check(fake.url)
    assert code == 0 and "served unpruned by a rollout" in said and "full=rollout;shadow=144" in said


@pytest.mark.parametrize("trusts", [True, False])
def test_nothing_is_reduced(fake: Fake, trusts: bool) -> None:
    fake.left, fake.trusts = FULL, trusts
    code, said = check(fake.url)
    assert code == 6 and "is NOT pruned" in said and "'first'" in said


def test_the_plugin_is_not_loaded(fake: Fake) -> None:
    fake.setting = None
    code, said = check(fake.url)
    assert code == 4 and "VLLM_PLUGINS" in said and "installed in the image" in said and not fake.asked
    fake.vllm = False
    code, said = check(fake.url)
    assert code == 4 and "Is it a vLLM server" in said


def test_no_setting(fake: Fake) -> None:
    fake.setting = "none"
    code, said = check(fake.url)
    assert code == 5 and "--mm-processor-kwargs" in said and not fake.asked


@pytest.mark.parametrize(
    ("setting", "says"), [("off", "own setting is off"), ("dart 0.25 in the language model", "not")]
)
def test_settings_that_shorten_no_prompt(fake: Fake, setting: str, says: str) -> None:
    fake.setting, fake.left = setting, FULL
    code, said = check(fake.url)
    assert code == 0 and says in said and len(fake.asked) == 1


def test_one_image_does_not_show_ages(fake: Fake) -> None:
    fake.left = FULL
    for setting, wanted, says in (
        ("divprune 1 by age", 0, "The newest image of a prompt keeps all"),
        ("divprune 0.25 by age", 6, "NOT pruned"),
    ):
        fake.setting = setting
        code, said = check(fake.url)
        assert code == wanted and says in said


def test_an_image_is_refused(fake: Fake) -> None:
    fake.refuses = True
    code, said = check(fake.url)
    assert code == 6 and "HTTP 400: no images here" in said


def test_a_key(fake: Fake) -> None:
    fake.key = "secret"
    code, said = check(fake.url)
    assert code == 6 and "HTTP 401: Unauthorized" in said and "--api-key" in said
    assert check(fake.url, "--api-key", "secret")[0] == 0


def test_nobody_is_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        code, said = check(f"http://127.0.0.1:{closed.getsockname()[1]}", "--timeout", "5")
    assert code == 3 and "no answer from" in said and "refused" in said
    assert check("localhost:8000") == (
        2,
        "error: 'localhost:8000' is not an HTTP address. Pass one such as http://localhost:8000\n",
    )


def test_something_else_is_there(fake: Fake) -> None:
    fake.vllm, fake.setting = False, None
    assert check(fake.url)[0] == 4
    code, said = check(fake.url + "/below")
    assert code == 3 and "/below/metrics answers with HTTP 404" in said
    with socket.create_server(("127.0.0.1", 0)) as mute:
        code, said = check(f"http://127.0.0.1:{mute.getsockname()[1]}", "--timeout", "0.2")
    assert code == 3 and "timed out" in said


def test_labels_are_read_as_prometheus_writes_them() -> None:
    page = 'a:b{x="1",y="a} \\"b\\" c"} 2.5\na:bc{x="2"} 1\n# a:b{x="3"} 1\n'
    assert parse_samples(page, "a:b") == [({"x": "1", "y": 'a} \\"b\\" c'}, 2.5)]


def test_the_image_is_an_image_and_no_two_are_alike() -> None:
    one, same, other = (Image.open(io.BytesIO(draw_image(seed))) for seed in (1.0, 1.0, 2.0))
    assert one.size == (448, 448) and one.mode == "RGB" and one.tobytes() == same.tobytes() != other.tobytes()
    assert len(one.crop((0, 0, 224, 448)).getcolors()) == 1 and one.crop((224, 0, 448, 448)).getcolors(999) is None
    assert len(base64.b64encode(draw_image(1.0))) < 500_000
