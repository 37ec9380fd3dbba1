# SPDX-License-Identifier: Apache-2.0
"""vLLM server with an OpenAI-compatible API. vLLM is not needed in this process."""

from __future__ import annotations

import io
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune_bench.errors import RunError
from tokenprune_bench.vllm_backend import OFF, Chat, Reply, build_image_url, needs_special_tokens

_COUNTER = "tokenprune:visual_tokens_total"
_START = f"""start it with --trust-request-mm-kwargs --mm-processor-kwargs '{{"{KEY}": {json.dumps(OFF)}}}'"""
_TIMEOUT = 600  # seconds per answer


class ServerEngine:
    """A server at an address such as http://host:8000/v1. The API key is read from OPENAI_API_KEY.

    Args:
        address: Address of the server.
        model: Served name of the model. None selects the first.

    Raises:
        OptionError: If the model is not served.
        RunError: If the server does not answer.
        TokenPruneError: If the client library is not installed.
    """

    def __init__(self, address: str, model: str | None = None) -> None:
        if not address.startswith(("http://", "https://")):
            raise OptionError(
                f"--server {address!r} is not an address. Use an address such as http://localhost:8000/v1."
            )
        try:
            import openai
            import prometheus_client  # noqa: F401 - fail early if it is missing
        except ImportError as error:
            raise TokenPruneError(
                "--server needs openai and prometheus_client: pip install 'tokenprune-bench[server]'."
            ) from error
        self.address = address.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, timeout=_TIMEOUT)
        with self._explained():
            cards = self._client.models.list().data
        served = {card.id: card for card in cards}
        if not served or (model is not None and model not in served):
            raise OptionError(
                f"The server at {address} does not serve {model}. It serves {', '.join(served) or 'no model'}."
            )
        self._model = model or cards[0].id
        card = served[self._model]
        self._root = getattr(card, "root", None) or self._model
        self._length = getattr(card, "max_model_len", None)
        self.config = _load_config(self._root)
        dtype = getattr(self.config, "dtype", None)
        self.bytes_per_value = getattr(dtype, "itemsize", 2)
        self._dtype = "unknown dtype" if dtype is None else str(dtype).removeprefix("torch.")
        self._version = json.loads(self._get("/version"))["version"]
        self._special = needs_special_tokens(self._plain)

    def ask(self, chats: Sequence[Chat], setting: dict[str, Any], max_tokens: int) -> list[Reply]:
        def ask_chat(chat: Chat) -> Reply:
            completion = self._create(_build_messages(chat), setting, max_tokens=max_tokens)
            return Reply(completion.choices[0].message.content or "", completion.usage.prompt_tokens)

        with self._explained(), ThreadPoolExecutor(len(chats)) as pool:
            return list(pool.map(ask_chat, chats))

    def clock(self, chat: Chat, setting: dict[str, Any], tokens: int) -> tuple[float, float]:
        messages, salt = _build_messages(chat), secrets.token_hex(8)
        with self._explained():
            begin = time.perf_counter()
            stream = self._create(messages, setting, max_tokens=tokens, stream=True, ignore_eos=True, cache_salt=salt)
            times = [time.perf_counter() for event in stream if event.choices]
        return 1000 * (times[0] - begin), 1000 * (times[-1] - times[0]) / (tokens - 1)

    def count_visual_tokens(self) -> tuple[int, int]:
        from prometheus_client.parser import text_string_to_metric_families

        sums = {"in": 0.0, "out": 0.0}
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                if sample.name == _COUNTER:
                    sums[sample.labels["stage"]] += sample.value
        return int(sums["in"]), int(sums["out"])

    def check(self, chat: Chat) -> None:
        before = self.count_visual_tokens()
        try:
            self.ask([chat], OFF, 1)
        except RunError:
            raise
        except TokenPruneError as error:
            raise TokenPruneError(f"{error}. To allow a setting per request, {_START}.") from error
        if self.count_visual_tokens()[0] <= before[0]:
            raise TokenPruneError(
                f"The server at {self.address} answers without tokenprune's plugin. Install tokenprune-vlm there, and "
                f"{_START}."
            )

    def environment(self) -> dict[str, Any]:
        return {
            "model": PurePath(self._model).name if self._model.startswith("/") else self._model,
            "device": "a vLLM server",
            "machine": None,
            "cores": None,
            "dtype": self._dtype,
            "python": platform.python_version(),
            "vllm": self._version,
        }

    def fingerprint(self) -> str:
        return f"{PurePath(self._root).name} {self._length}"

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _create(self, messages: list[dict[str, Any]], setting: dict[str, Any], **options: Any) -> Any:
        extra = {name: options.pop(name) for name in ("ignore_eos", "cache_salt") if name in options}
        return self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=0.0,
            extra_body={"mm_processor_kwargs": {KEY: setting}, "add_special_tokens": self._special, **extra},
            **options,
        )

    def _plain(self, special: bool) -> list[int]:
        """Return the ids of a chat without images."""
        asked = {"model": self._model, "messages": _build_messages(Chat((), "x")), "add_special_tokens": special}
        return json.loads(self._get("/tokenize", asked))["tokens"]

    def _get(self, path: str, body: Any = None) -> str:
        """Return the response of a path outside of OpenAI's API."""
        import openai

        call = self._client.get if body is None else partial(self._client.post, body=body)
        try:
            return call(self.address + path, cast_to=str)
        except openai.APIStatusError as error:
            raise RunError(
                f"{self.address}{path} answers with HTTP {error.status_code}. Pass the address of vLLM itself to "
                "--server."
            ) from error
        except openai.OpenAIError as error:
            raise RunError(f"{self.address}{path} does not answer: {error.__cause__ or error}.") from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the client's errors to errors of tokenprune."""
        import openai

        try:
            yield
        except openai.BadRequestError as error:
            body = error.body if isinstance(error.body, dict) else {}
            raise TokenPruneError(str(body.get("message") or error)) from error
        except openai.AuthenticationError as error:
            raise RunError(f"The server at {self.address} needs a key. Set OPENAI_API_KEY.") from error
        except openai.APIConnectionError as error:
            raise RunError(
                f"The server at {self.address} does not answer ({error.__cause__ or error}). Check that it runs, and "
                "check the address."
            ) from error
        except openai.OpenAIError as error:
            raise RunError(f"The server at {self.address} failed: {error}.") from error


def _build_messages(chat: Chat) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    for image in chat.images:
        if isinstance(image, bytes):
            content.append(build_image_url("jpeg", image))
            continue
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "PNG", compress_level=1)
        content.append(build_image_url("png", buffer.getvalue()))
    return [{"role": "user", "content": [*content, {"type": "text", "text": chat.text}]}]


def _load_config(model: str) -> Any:
    """Return the config of a model that is a local folder or on the hub, else None."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return None
