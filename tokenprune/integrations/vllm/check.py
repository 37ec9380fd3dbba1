# SPDX-License-Identifier: Apache-2.0
"""A look from outside at a server that runs: is the plugin loaded, has it a setting, is an image reduced.

Nothing of vLLM is needed in this process, and nothing but HTTP.
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
NONE = "none"  # label of a server without a setting, see front/announce.py
_HEADER = "x-tokenprune"  # see tokenprune/integrations/vllm/gateway/answers.py
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SIDE = 448  # pixels of the drawn image


@dataclass(frozen=True)
class Finding:
    """Exit code of the command, 0 if all is as it should be, and the sentences that say why."""

    code: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class HttpReply:
    """Status and text of an answer over HTTP, and the header by which the plugin says what served it."""

    status: int
    text: str
    served: str = ""

    @property
    def error_text(self) -> str:
        """The server's own words about an error, in one line of 300 characters at most."""
        try:
            body = json.loads(self.text)
            said = body.get("error", body)
            said = said.get("message", said) if isinstance(said, dict) else said
        except (ValueError, AttributeError):
            said = self.text
        return f"HTTP {self.status}: {' '.join(str(said).split())[:300]}"


class RemoteServer:
    """A server at `url`, http://host:port with or without /v1. key: for its `Authorization` header, if it asks for one.

    timeout: seconds for each answer. Raises OptionError for what is no address.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 120.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"{url!r} is no address: give one such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key, self._timeout = key, timeout

    def ask(self, path: str, body: Any = None) -> HttpReply:
        """Return an answer, whatever its status. Raises OSError if there is none."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as found:
                text = found.read().decode(errors="replace")
                return HttpReply(found.status, text, found.headers.get(_HEADER, ""))
        except urllib.error.HTTPError as error:
            return HttpReply(error.code, error.read().decode(errors="replace"))
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"no HTTP: {error}") from error


def parse_samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and values of a metric on a page in Prometheus' text format."""
    found = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
    return [(dict(_LABEL.findall(labels)), float(value)) for labels, value in found]


def check(server: RemoteServer, model: str | None = None) -> Finding:
    """Return what a server does with images. model: the name to ask for; None: the first that it serves."""
    try:
        page = server.ask("/metrics")
        if page.status != 200:
            return Finding(
                UNREACHABLE,
                (
                    f"{server.url}/metrics answers with {page.error_text}. Give the address of vLLM's own server, not "
                    "of a proxy before it: this page says whether the plugin is loaded",
                ),
            )
        info = [labels for labels, value in parse_samples(page.text, "tokenprune:info") if value == 1]
        if not info:
            return Finding(NOT_LOADED, _not_loaded(server, page.text))
        said = _say(info[0])
        if info[0]["setting"] == NONE:
            return Finding(NO_SETTING, (said, _START))
        found = _reduced(server, info[0], model)
        return Finding(found.code, (said, *found.lines))
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        return Finding(
            UNREACHABLE,
            (
                f"no answer from {server.url} ({reason}): is the server running (a large model takes minutes to "
                "start), are host and port right, and is the port open from here?",
            ),
        )


_START = (
    "The plugin is loaded, and no setting turns it on: nothing is reduced. Start the server with "
    f'--mm-processor-kwargs \'{{"{KEY}": {{"method": "divprune", "keep": 0.25}}}}\''
)


def _not_loaded(server: RemoteServer, page: str) -> tuple[str, ...]:
    if "vllm:" not in page:
        return (
            f"{server.url} answers, and its /metrics holds nothing of vLLM: is this vLLM's server? It is not there "
            "with --disable-log-stats either; start without it to be sure",
        )
    return (
        f"vLLM answers at {server.url}, and the plugin is not loaded there.",
        "Is tokenprune installed in the image or environment that runs the server, which may be another than the one "
        'you type in? There: python -c "import tokenprune, vllm; print(tokenprune.__version__)"',
        "Is VLLM_PLUGINS set where the server starts? Then it has to name tokenprune, among others with commas: "
        "VLLM_PLUGINS=tokenprune. Empty, it keeps every plugin out; unset, all are loaded",
        "Was it installed before the server started, in a version that has this check? vLLM looks for plugins once",
    )


def _say(info: Mapping[str, str]) -> str:
    profiles = "" if info["profiles"] == NONE else f", profiles {info['profiles'].replace(',', ', ')}"
    return (
        f"tokenprune {info['version']} is loaded, setting {info['setting']}{profiles}; vLLM {info['vllm']}, model "
        f"runner {info['runner']}, hooks that hold: {info['hooks'].replace(',', ', ')}"
    )


def _reduced(server: RemoteServer, info: Mapping[str, str], model: str | None) -> Finding:
    """Return whether an image is reduced: by the prompt's length with and without, or, where requests may not choose,
    by the answer's header, or by the counters."""
    cards = server.ask("/v1/models")
    if cards.status != 200:
        return Finding(NOT_REDUCED, (f"/v1/models answers with {cards.error_text}. Is a key asked for? --api-key",))
    name = model or json.loads(cards.text)["data"][0]["id"]
    url = "data:image/png;base64," + base64.b64encode(draw_image(random.SystemRandom().random())).decode()
    before = _tokens(server, info)
    own = _ask(server, name, url)
    if own.status != 200:
        return Finding(NOT_REDUCED, (f"the server refuses an image, with {own.error_text}",))
    after = _tokens(server, info)
    if info["setting"] == "off":
        return Finding(0, ("The server's own setting is off: whole images, unless a request asks for less",))
    if info["setting"].endswith("in the language model"):
        return Finding(0, ("It acts inside the language model, where prompts stay as long: not visible from outside",))
    if ";full=" in own.served:
        return Finding(0, (f"This request was served in full by a rollout, or after a failure: {own.served}",))
    whole = _ask(server, name, url, {KEY: {"off": True}})
    header = re.search(r"in=(\d+);out=(\d+)", own.served)
    if whole.status == 200:
        seen = "prompt tokens, counted with the setting off and on"
        full, left = (json.loads(one.text)["usage"]["prompt_tokens"] for one in (whole, own))
    elif header is not None:
        seen, (full, left) = f"visual tokens, by the answer's header: {own.served}", map(int, header.groups())
    else:
        seen = "visual tokens, by the counters: requests may not choose here, and others' may be among them"
        full, left = (round(b - a) for a, b in zip(before, after, strict=True))
    if left < full:
        return Finding(0, (f"An image is reduced: {full} -> {left} {seen}",))
    if info["setting"].endswith(" 1 by age"):
        return Finding(0, ("The newest image of a prompt keeps all, older ones less: one image does not show it",))
    return Finding(
        NOT_REDUCED,
        (
            f"An image of {_SIDE} x {_SIDE} is NOT reduced: {full} -> {left} {seen}. Does the name {name!r} ask for a "
            "profile that is off, or does the setting keep all of such an image?",
        ),
    )


def _tokens(server: RemoteServer, info: Mapping[str, str]) -> tuple[float, float]:
    """Return the visual tokens that the server has counted, in and out."""
    found = parse_samples(server.ask("/metrics").text, "tokenprune:visual_tokens_total")
    mine = [(labels["stage"], value) for labels, value in found if labels["model_name"] == info["model_name"]]
    return tuple(sum(value for stage, value in mine if stage == one) for one in ("in", "out"))  # type: ignore[return-value]


def _ask(server: RemoteServer, model: str, url: str, kwargs: dict[str, Any] | None = None) -> HttpReply:
    """Return the answer to a question about an image."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is shown?"}]
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    return server.ask("/v1/chat/completions", body | ({"mm_processor_kwargs": kwargs} if kwargs else {}))


def draw_image(seed: float) -> bytes:
    """Return a PNG that no server has seen: one half plain, the other of noise, so that every method finds something to
    leave out."""
    from PIL import Image  # not for the help of commands

    draw, made = random.Random(seed), io.BytesIO()
    plain = bytes(draw.randrange(256) for _ in range(3)) * (_SIDE // 2)
    rows = b"".join(plain + draw.randbytes(3 * (_SIDE - _SIDE // 2)) for _ in range(_SIDE))
    Image.frombytes("RGB", (_SIDE, _SIDE), rows).save(made, "PNG", compress_level=1)
    return made.getvalue()
