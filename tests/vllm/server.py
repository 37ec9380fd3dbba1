# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server in processes of its own. Nothing here waits for ever, and failures show the server's log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import openai

START, CALL, STOP = 800, 240, 30  # seconds; a busy machine may need ten times what an idle one does
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Server:
    """A server that runs. log: what it wrote."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CALL, max_retries=0)

    def ask(self, **request: Any) -> Any:
        """Return a chat completion; what a client did wrong is raised as it is, all else with the server's log."""
        try:
            return self.client.chat.completions.create(**request)
        except openai.BadRequestError:
            raise
        except openai.OpenAIError as error:
            raise AssertionError(self.story(repr(error))) from error

    def get(self, path: str, timeout: float) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return answer.read().decode()

    def counted(self, name: str) -> dict[str, float]:
        """Return the values of a counter at /metrics, by their labels as they are written there."""
        try:
            page = self.get("/metrics", CALL)
        except (OSError, HTTPException) as error:
            raise AssertionError(self.story(repr(error))) from error
        lines = re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", page, re.MULTILINE)
        return {labels: float(value) for labels, value in lines}

    def story(self, what: str) -> str:
        """What happened, for whoever reads the failure."""
        state = "runs" if self.process.poll() is None else f"ended with {self.process.returncode}"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
        return f"{what}\nThe server {state}. The end of its log:\n{tail}"

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
        """End the server and what it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session, see `serve`
        self.process.wait(STOP)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def serve(model: Path, place: Path, *arguments: str) -> Iterator[Server]:
    """Start a server of `model` with vLLM's `arguments`. place: an empty folder for what it writes."""
    port = free_port()
    (place / "template.jinja").write_text(TEMPLATE)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32",
        "--max-num-batched-tokens", "256", "--chat-template", str(place / "template.jinja"), *arguments,
    ]  # fmt: skip
    with launch(command, place, port) as server:
        yield server


@contextlib.contextmanager
def launch(command: list[str], place: Path, port: int, **environment: str) -> Iterator[Server]:
    """Start a server by a command of one's own, which listens at `port`. It finds the modules of this folder."""
    folders = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": folders}
    environment = os.environ | ours | environment
    with (place / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        server = Server(process, f"http://127.0.0.1:{port}", place / "log")
        try:
            server.wait()
            yield server
        finally:
            server.stop()
