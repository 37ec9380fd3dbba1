# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI servers of one model, each in separate processes, on one GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .cases import DECODE, EAGER, ENVIRONMENT, V1

ROOT = Path(__file__).parents[4]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PR_SET_PDEATHSIG = 1  # of Linux
STOP, CALL = 10, 30  # seconds
SERVED = "clip"  # name of the served model
PRINTED = 3  # last errors of the log of a server that failed


def build_command(
    model: Path, options: dict[str, Any], profiles: dict[str, Any] | None, port: int, tiny: bool, **sizes: int
) -> list[str]:
    """Return the command of a server.

    Args:
        model: Folder of the model. `template.jinja` beside it is the chat template.
        options: More options of vLLM, by name.
        profiles: Settings of the plugin by name, selected by the model's name. None: a server without the plugin.
        port: Port of the server.
        tiny: Whether the model is small and runs on a CPU.
        sizes: `kv_gib`, `length` and `fps`.
    """
    names = [SERVED]
    common: dict[str, Any] = {
        "model": model, "host": "127.0.0.1", "port": port, "load-format": "dummy", "max-num-seqs": 64,
        "max-model-len": sizes["length"], "limit-mm-per-prompt": {"video": 1, "image": 0}, "mm-processor-cache-gb": 16,
        "media-io-kwargs": {"video": {"num_frames": -1, "fps": sizes["fps"]}},
        "chat-template": model.with_name("template.jinja"),
    }  # fmt: skip
    if tiny:
        common |= {"dtype": "float32", "max-num-batched-tokens": 512, "enforce-eager": EAGER["enforce_eager"]}
    else:
        common |= {
            "dtype": "bfloat16", "max-num-batched-tokens": 8192, "gpu-memory-utilization": 0.05,
            "kv-cache-memory-bytes": sizes["kv_gib"] * 2**30, "attention-backend": "FLASH_ATTN",
            "compilation-config": DECODE["compilation_config"],
        }  # fmt: skip
    if profiles is not None:
        first = next(iter(profiles.values()))
        common["mm-processor-kwargs"] = {"tokenprune": first | {"profiles": profiles}}
        names += [f"{SERVED}:{name}" for name in profiles]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", *names]
    for name, value in (common | options).items():
        command.append(f"--{name}")
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return command


def end_with_parent() -> None:
    """Let Linux end this process when its parent ends, also if the parent is killed. Else servers keep the GPU."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """A server that starts at once; `wait` until it answers."""

    def __init__(self, folder: Path, name: str, model: Path, plugin: bool, tiny: bool, **command: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.name, self.url, self.log = name, f"http://127.0.0.1:{port}", folder / f"{name}.log"
        model.with_name("template.jinja").write_text(TEMPLATE)
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | ENVIRONMENT | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # the addresses that empty the caches
            "VLLM_PLUGINS": "tokenprune" if plugin else "",
        }  # fmt: skip
        environment |= {"VLLM_USE_V2_MODEL_RUNNER": V1} if tiny else {}
        environment.pop("TRITON_INTERPRET", None)
        arguments = build_command(model, port=port, tiny=tiny, **command)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                arguments, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
            )

    def wait(self, end: float) -> bool:
        """Return whether the server answers before `end`, a time of `time.monotonic`."""
        while self.process.poll() is None and time.monotonic() < end:
            with suppress(OSError):
                self.get("/health")
                return True
            time.sleep(0.5)
        return False

    def describe_failure(self) -> str:
        """Return the state of the server and the last errors in its log."""
        state = "runs" if self.process.poll() is None else f"ended with {self.process.returncode}"
        errors = re.findall(r"\w+(?:Error|Exception): .*", self.log.read_text(errors="replace"))
        return f"the server {self.name} {state}: {' | '.join(list(dict.fromkeys(errors))[-PRINTED:])}"

    def check(self) -> None:
        """Raise RuntimeError with the last errors of the log if the server ended."""
        if self.process.poll() is not None:
            raise RuntimeError(self.describe_failure())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=CALL) as answer:
            return answer.read().decode()

    def read_version(self) -> str:
        """Return vLLM's version."""
        return json.loads(self.get("/version"))["version"]

    def empty_caches(self) -> None:
        """Empty the caches of key-value blocks and of encoded videos, but not of preprocessed videos."""
        for name in ("prefix", "encoder"):
            request = urllib.request.Request(f"{self.url}/reset_{name}_cache", b"", method="POST")
            with urllib.request.urlopen(request, timeout=CALL) as answer:
                text = answer.read()
            if b"false" in text:
                raise RuntimeError(f"the {name} cache of the server {self.name} is in use")

    def signal(self, kind: signal.Signals) -> None:
        """Send a signal to all of the server's processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, kind)


def stop_all(servers: Iterable[Server]) -> None:
    """End servers within `STOP` seconds, less than run.py waits before it kills their parent."""
    servers, end = list(servers), time.monotonic() + STOP
    for server in servers:
        server.signal(signal.SIGTERM)
    for server in servers:
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.1, end - time.monotonic()))
        server.signal(signal.SIGKILL)
        server.process.wait()
