# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server in separate processes. Every wait has a timeout, and failures show the server's log."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import openai

from conftest import stop

START, CALL, STOP = 800, 240, 30  # seconds; ten times the time of an idle machine
# The command reads the version of a package named "vllm", but the CPU build has another name.
SERVE = """
from types import SimpleNamespace
from vllm.entrypoints.cli import main
main.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: "any"))
main.main()
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Server:
    """A running server and its log."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CALL, max_retries=0)

    def ask(self, **request: Any) -> Any:
        """Return a chat completion. Errors other than bad requests are raised with the server's log."""
        try:
            return self.client.chat.completions.create(**request)
        except openai.BadRequestError:
            raise
        except openai.OpenAIError as error:
            raise AssertionError(self.story(repr(error))) from error

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, str]:
        """Return status, headers and text of an answer; `body` is JSON as bytes, or an object."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | headers)
        try:
            with urllib.request.urlopen(request, timeout=CALL) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            assert error.code < 500, self.story(text)
            return error.code, error.headers, text
        except OSError as error:
            raise AssertionError(self.story(f"{data[:300]!r}: {error!r}")) from error

    def post_json(self, path: str, body: Any) -> Any:
        """Return the JSON of an answer, or the status of a refused request."""
        status, _, text = self.post(path, body)
        return json.loads(text) if status == 200 else status

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the plugin wrote to the log."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith('{"time"')]

    def get(self, path: str, timeout: float) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return answer.read().decode()

    def counted(self, name: str) -> dict[str, float]:
        """Return the values of a counter at /metrics by their labels, as written there."""
        try:
            page = self.get("/metrics", CALL)
        except (OSError, HTTPException) as error:
            raise AssertionError(self.story(repr(error))) from error
        lines = re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", page, re.MULTILINE)
        return {labels: float(value) for labels, value in lines}

    def story(self, problem: str) -> str:
        """Describe a failure with the state of the server and the end of its log."""
        state = "runs" if self.process.poll() is None else f"ended with {self.process.returncode}"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
        return f"{problem}\nThe server {state}. The end of its log:\n{tail}"

    def wait(self) -> None:
        start = time.monotonic()
        while True:
            with contextlib.suppress(OSError, HTTPException):
                self.get("/health", 5)
                return
            waited = time.monotonic() - start
            if self.process.poll() is not None or waited > START:
                raise AssertionError(self.story(f"no answer from /health in {waited:.0f} s"))
            time.sleep(1)

    def stop(self) -> None:
        """End the server and its child processes."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # `launch` starts a session for each server
        self.process.wait(STOP)


def data_url(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def write_messages(images: Iterable[Any], text: str = "") -> list[dict[str, Any]]:
    """Return the messages of a chat about images."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": content + [{"type": "text", "text": text}] * bool(text)}]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def serve(model: Path, folder: Path, setting: Any, *arguments: str) -> Iterator[Server]:
    """Start a server of `model` with vLLM's `arguments`; `folder` receives its files and must be empty."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    with launch([*command, "--max-model-len", "1024", *write_arguments(folder, setting, *arguments)], folder) as server:
        yield server


def serve_with_several_engines(
    model: Path, folder: Path, setting: Any, *arguments: str
) -> contextlib.AbstractContextManager[Server]:
    """Do the same with `vllm serve`, which starts several API servers or engines."""
    command = [sys.executable, "-c", SERVE, "serve", str(model), *write_arguments(folder, setting, *arguments)]
    return launch(command, folder, VLLM_CPU_KVCACHE_SPACE="1")


def write_arguments(folder: Path, setting: Any, *arguments: str) -> list[str]:
    """Write the chat template, and return the arguments of all servers of tiny models."""
    (folder / "template.jinja").write_text(TEMPLATE)
    return [
        "--mm-processor-kwargs", json.dumps({"tokenprune": setting}),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
        "--max-num-seqs", "8", "--block-size", "32", "--max-num-batched-tokens", "256",
        "--chat-template", str(folder / "template.jinja"), *arguments,
    ]  # fmt: skip


@contextlib.contextmanager
def launch(command: list[str], folder: Path, **environment: str) -> Iterator[Server]:
    """Run `command` as a server at a free port, after the engine of this process is closed.

    The server can import the modules of this folder.
    """
    stop()
    port = free_port()
    command = [*command, "--port", str(port)]
    folders = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": folders}
    environment = os.environ | ours | environment
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        server = Server(process, f"http://127.0.0.1:{port}", folder / "log")
        try:
            server.wait()
            yield server
        finally:
            server.stop()
