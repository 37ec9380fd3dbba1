# SPDX-License-Identifier: Apache-2.0
"""A server with the API of vLLM and its plugin, without a model. It records the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VISUAL, TEXT = 100, 20  # tokens of an image and of a question


class Pretender(ThreadingHTTPServer):
    """plugin: whether the plugin is installed and counts tokens. refusal: an HTTP status and message for chats. bos:
    whether the chat template writes the first token. gate: a barrier where each chat waits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.plugin, self.bos = True, False
        self.refusal: tuple[int, str] | None = None
        self.chats: list[dict[str, Any]] = []
        self.counts = [0, 0]
        self.gate = threading.Barrier(1)
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Talk(BaseHTTPRequestHandler):
    server: Pretender

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        answers = {
            "/v1/models": {"object": "list", "data": [
                {"id": "one", "object": "model", "created": 0, "owned_by": "", "root": "/no/such/one"},
                {"id": "two", "object": "model", "created": 0, "owned_by": ""}]},
            "/version": {"version": "9.9"},
        }  # fmt: skip
        if self.path == "/metrics":
            name = "tokenprune:visual_tokens_total"
            lines = [f"# HELP {name} Visual tokens.", f"# TYPE {name} counter", 'vllm:other_total{stage="in"} 7.0'] + [
                f'tokenprune:visual_tokens_total{{model_name="one",stage="{stage}"}} {count}.0'
                for stage, count in zip(("in", "out"), self.server.counts, strict=True)
            ]
            return self.say(200, "\n".join(lines * self.server.plugin))
        return self.say(200 if self.path in answers else 404, json.dumps(answers.get(self.path)))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = [1] * self.server.bos + [7, 8]
            return self.say(200, json.dumps({"tokens": [1] * request["add_special_tokens"] + ids}))
        with self.server.lock:
            self.server.chats.append(request)
        self.server.gate.wait(20)
        if self.server.refusal is not None:
            status, message = self.server.refusal
            return self.say(status, json.dumps({"error": {"message": message, "type": "", "code": status}}))
        setting = request["mm_processor_kwargs"]["tokenprune"]
        kept = round(VISUAL * setting.get("keep", 1)) if self.server.plugin else VISUAL
        with self.server.lock:
            self.server.counts[0] += VISUAL
            self.server.counts[1] += kept
        usage = {"prompt_tokens": TEXT + kept, "completion_tokens": 1, "total_tokens": TEXT + kept + 1}
        reply = {"id": "x", "created": 0, "model": "one"}
        message = {"role": "assistant", "content": request["messages"][0]["content"][-1]["text"]}
        if request.get("stream"):
            events = [reply | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": message}]}] * 3
            lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
            return self.say(200, "".join(lines), "text/event-stream")
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return self.say(200, json.dumps(reply | {"object": "chat.completion", "choices": [choice], "usage": usage}))

    def say(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def pretending() -> Iterator[Pretender]:
    server = Pretender()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
