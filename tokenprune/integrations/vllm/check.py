# SPDX-License-Identifier: Apache-2.0
"""Check of a running server over HTTP: is the plugin loaded, does it have a setting, is an image pruned?

Neither vLLM nor access to the server's machine is needed.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.settings.keys import KEY

UNREACHABLE, NOT_LOADED, NO_SETTING, NOT_REDUCED = 3, 4, 5, 6
NONE = "none"  # label of a server without a setting, see frontend/announce.py
_HEADER = "x-tokenprune"  # see tokenprune/integrations/vllm/gateway/answers.py
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SIDE = 448  # pixels of the drawn image


@dataclass(frozen=True)
class Finding:
    """Exit code of the command (0 if the check passed), and its explanation."""

    code: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class HttpReply:
    """Status, text and `x-tokenprune` header of an HTTP answer."""

    status: int
    text: str
    served: str = ""

    @property
    def error_text(self) -> str:
        """The server's error message, on one line of at most 300 characters."""
        try:
            body = json.loads(self.text)
            message = body.get("error", body)
            message = message.get("message", message) if isinstance(message, dict) else message
        except (ValueError, AttributeError):
            message = self.text
        return f"HTTP {self.status}: {' '.join(str(message).split())[:300]}"


class RemoteServer:
    """A server at `url` (http://host:port, with or without /v1), and its API key.

    Raises OptionError if `url` is not an HTTP address.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 120.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"{url!r} is not an HTTP address. Pass one such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key, self._timeout = key, timeout

    def ask(self, path: str, body: Any = None) -> HttpReply:
        """Return the answer whatever its status; raise OSError if there is none."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                text = response.read().decode(errors="replace")
                return HttpReply(response.status, text, response.headers.get(_HEADER, ""))
        except urllib.error.HTTPError as error:
            return HttpReply(error.code, error.read().decode(errors="replace"))
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"no HTTP: {error}") from error


def parse_samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return the labels and values of a metric on a page in Prometheus' text format."""
    matches = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
    return [(dict(_LABEL.findall(labels)), float(value)) for labels, value in matches]


def check(server: RemoteServer, model: str | None = None) -> Finding:
    """Check the images of a server. model: name to request. None: the first served model."""
    try:
        page = server.ask("/metrics")
        if page.status != 200:
            return Finding(
                UNREACHABLE,
                (
                    f"{server.url}/metrics answers with {page.error_text}. Pass the address of vLLM's own server, "
                    "not of a proxy: the check reads its metrics",
                ),
            )
        info = [labels for labels, value in parse_samples(page.text, "tokenprune:info") if value == 1]
        if not info:
            return Finding(NOT_LOADED, _describe_not_loaded(server, page.text))
        state = _describe(info[0])
        if info[0]["setting"] == NONE:
            return Finding(NO_SETTING, (state, _START))
        finding = _check_pruning(server, info[0], model)
        return Finding(finding.code, (state, *finding.lines))
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        return Finding(
            UNREACHABLE,
            (
                f"no answer from {server.url} ({reason}). Check that the server is running (a large model takes "
                "minutes to start), and that host and port are right and reachable.",
            ),
        )


_START = (
    "The plugin is loaded without a setting, so no tokens are pruned. Start the server with "
    f'--mm-processor-kwargs \'{{"{KEY}": {{"method": "divprune", "keep": 0.25}}}}\''
)


def _describe_not_loaded(server: RemoteServer, page: str) -> tuple[str, ...]:
    if "vllm:" not in page:
        return (
            f"{server.url} answers, but its /metrics has no metrics of vLLM. Is it a vLLM server, started without "
            "--disable-log-stats?",
        )
    return (
        f"vLLM answers at {server.url}, but the plugin is not loaded.",
        "Is tokenprune installed in the image or environment of the server? Run there: "
        'python -c "import tokenprune, vllm; print(tokenprune.__version__)"',
        "Is VLLM_PLUGINS set for the server? Then its comma-separated list must contain tokenprune. If it is unset, "
        "all plugins are loaded",
        "Was tokenprune installed before the server started? vLLM loads plugins only at the start",
    )


def _describe(info: Mapping[str, str]) -> str:
    profiles = "" if info["profiles"] == NONE else f", profiles {info['profiles'].replace(',', ', ')}"
    return (
        f"tokenprune {info['version']} is loaded, setting {info['setting']}{profiles}; vLLM {info['vllm']}, model "
        f"runner {info['runner']}, hooks: {info['hooks'].replace(',', ', ')}"
    )


def _check_pruning(server: RemoteServer, info: Mapping[str, str], model: str | None) -> Finding:
    """Check whether an image is pruned.

    The check compares the prompt lengths with and without pruning. If requests may not switch it off, it reads the
    header of the answer, or the counters.
    """
    cards = server.ask("/v1/models")
    if cards.status != 200:
        return Finding(
            NOT_REDUCED, (f"/v1/models answers with {cards.error_text}. Pass --api-key if the server needs a key",)
        )
    name = model or json.loads(cards.text)["data"][0]["id"]
    url = "data:image/png;base64," + base64.b64encode(draw_image(random.SystemRandom().random())).decode()
    before = _read_token_counters(server, info)
    pruned = _ask(server, name, url)
    if pruned.status != 200:
        return Finding(NOT_REDUCED, (f"the server refuses an image with {pruned.error_text}",))
    after = _read_token_counters(server, info)
    if info["setting"] == "off":
        return Finding(0, ("The server's own setting is off. Images are unpruned unless a request changes that",))
    if info["setting"].endswith("in the language model"):
        return Finding(
            0, ("The method acts inside the language model, which does not shorten prompts and cannot be checked here",)
        )
    if ";full=" in pruned.served:
        return Finding(0, (f"This request was served unpruned by a rollout or after a failure: {pruned.served}",))
    unpruned = _ask(server, name, url, {KEY: {"off": True}})
    header = re.search(r"in=(\d+);out=(\d+)", pruned.served)
    if unpruned.status == 200:
        source = "prompt tokens (setting off and on)"
        num_before, num_after = (json.loads(reply.text)["usage"]["prompt_tokens"] for reply in (unpruned, pruned))
    elif header is not None:
        source, (num_before, num_after) = f"visual tokens (header {pruned.served})", map(int, header.groups())
    else:
        source = "visual tokens (counters, which may include other requests)"
        num_before, num_after = (round(b - a) for a, b in zip(before, after, strict=True))
    if num_after < num_before:
        return Finding(0, (f"An image is pruned: {num_before} -> {num_after} {source}",))
    if info["setting"].endswith(" 1 by age"):
        return Finding(
            0, ("The newest image of a prompt keeps all tokens and older ones fewer, so one image cannot show it",)
        )
    return Finding(
        NOT_REDUCED,
        (
            f"An image of {_SIDE} x {_SIDE} is NOT pruned: {num_before} -> {num_after} {source}. Does the model name "
            f"{name!r} select a profile that is off, or does the setting keep all tokens of such an image?",
        ),
    )


def _read_token_counters(server: RemoteServer, info: Mapping[str, str]) -> tuple[float, float]:
    """Return the server's counters of visual tokens, before and after pruning."""
    samples = parse_samples(server.ask("/metrics").text, "tokenprune:visual_tokens_total")
    of_model = [(labels["stage"], value) for labels, value in samples if labels["model_name"] == info["model_name"]]
    return tuple(sum(value for stage, value in of_model if stage == side) for side in ("in", "out"))  # type: ignore[return-value]


def _ask(server: RemoteServer, model: str, url: str, kwargs: dict[str, Any] | None = None) -> HttpReply:
    """Ask a question about an image."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is shown?"}]
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    return server.ask("/v1/chat/completions", body | ({"mm_processor_kwargs": kwargs} if kwargs else {}))


def draw_image(seed: float) -> bytes:
    """Return a new PNG that every method can prune: one half has one colour, the other half is noise."""
    from PIL import Image  # keeps `--help` fast

    draw, file = random.Random(seed), io.BytesIO()
    plain = bytes(draw.randrange(256) for _ in range(3)) * (_SIDE // 2)
    rows = b"".join(plain + draw.randbytes(3 * (_SIDE - _SIDE // 2)) for _ in range(_SIDE))
    Image.frombytes("RGB", (_SIDE, _SIDE), rows).save(file, "PNG", compress_level=1)
    return file.getvalue()
