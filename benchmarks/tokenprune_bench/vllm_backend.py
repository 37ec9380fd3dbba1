# SPDX-License-Identifier: Apache-2.0
"""Benchmark back end for vLLM with the plugin, in this process (vllm_offline.py) or on a server (vllm_server.py).

Each request carries its setting, so one engine serves all passes.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

import tokenprune
from tokenprune.errors import UnsupportedSetupError
from tokenprune.methods.registry import method_info
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load
from tokenprune.settings.keys import LIMIT
from tokenprune.statistics import Stats
from tokenprune_bench.backend import Answer
from tokenprune_bench.data import raise_for_misfits
from tokenprune_bench.errors import RunError
from tokenprune_bench.profiling.patched import is_escalation
from tokenprune_bench.profiling.timing import NEW_TOKENS, time_in_turns
from tokenprune_bench.two_pass import ESCALATE

if TYPE_CHECKING:
    from tokenprune_bench.answers import Batch

OFF = {"off": True}


@dataclass(frozen=True)
class Chat:
    """One user turn: images, followed by a text. A JPEG file is sent as bytes, and decoded by the engine."""

    images: tuple[Image.Image | bytes, ...]
    text: str


@dataclass(frozen=True)
class Reply:
    """An answer without special tokens.

    Attributes:
        text: The answer.
        prompt_tokens: Length of the prompt as the engine ran it.
    """

    text: str
    prompt_tokens: int


class VllmEngine(Protocol):
    """Interface of vLLM, in this process or on a server. Settings have the form of the "tokenprune" key of a request
    (docs/serving/start.md).

    Attributes:
        config: The model's transformers config, or None if it is not available.
        bytes_per_value: Bytes per value of the KV cache.
    """

    config: Any
    bytes_per_value: int

    def ask(self, chats: Sequence[Chat], setting: dict[str, Any], max_tokens: int) -> list[Reply]:
        """Return the greedy answers to chats that are sent at once.

        Raises:
            TokenPruneError: If the engine rejects the setting.
            RunError: If the engine does not answer.
        """

    def clock(self, chat: Chat, setting: dict[str, Any], tokens: int) -> tuple[float, float]:
        """Return the milliseconds to the first token, and per further token."""

    def count_visual_tokens(self) -> tuple[int, int]:
        """Return the plugin's counts of visual tokens so far, before and after reduction."""

    def check(self, chat: Chat) -> None:
        """Check that the engine accepts requests with a setting.

        Raises:
            TokenPruneError: If it does not.
        """

    def environment(self) -> dict[str, Any]:
        """See `BenchBackend.environment`."""

    def fingerprint(self) -> str:
        """See `BenchBackend.fingerprint`."""


class VllmBackend:
    """Benchmark back end for vLLM.

    The plugin counts visual tokens. FLOPs and cache sizes are closed forms of the prompt lengths that the engine
    reports. Times are measured with single requests and uncached images. They include the decoding of the user's JPEG
    files, at the scale that the setting of a request needs.
    """

    def __init__(self, engine: VllmEngine, suffix: str, max_new_tokens: int, metric: str = "exact") -> None:
        self.engine, self.suffix, self.max_new_tokens, self.metric = engine, suffix, max_new_tokens, metric
        text = engine.config and engine.config.get_text_config()
        self._shape = DecoderShape.from_config(text) if text else None
        self._seen: dict[int, int] = {}  # visual tokens before reduction, by the first question of a batch
        self._checked = False

    def find_misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        video = "is about a video, but --backend vllm supports images only; use --backend hf"
        labels = "has text between its images, which --backend vllm does not support; use --backend hf"
        reasons = (
            video if question.is_video else labels if getattr(question, "labels", ()) else None
            for question in questions
        )
        return [(index, reason) for index, reason in enumerate(reasons) if reason]

    def begin(self, questions: Sequence[Any], evidence: bool = False) -> None:
        raise_for_misfits(questions, self.find_misfits(questions))
        if questions and not self._checked:
            self.engine.check(self._chat(questions[0]))
            self._checked = True

    def is_one_by_one(self, setting: Setting | None) -> bool:
        return False  # vLLM processes images one at a time in any batch

    @contextmanager
    def answering(self, setting: Setting | None) -> Iterator[Answer]:
        if is_escalation(setting):
            raise UnsupportedSetupError(f"{ESCALATE} needs the model in this process. Use --backend hf.")
        asked = build_request(setting)
        yield lambda first, batch: self._answer(asked, first, batch)

    def timing(
        self, setting: Setting | None, question: Any, repeats: int, new_tokens: int = NEW_TOKENS, processor: bool = True
    ) -> dict[str, Any]:
        """See `BenchBackend.timing`. The time always includes the processor."""
        chat, ours = self._chat(question), build_request(setting)

        def runner(asked: dict[str, Any]) -> Callable[[], tuple[float, float]]:
            return lambda: self.engine.clock(_change_images(chat), asked, new_tokens)

        timing = time_in_turns(runner(OFF), runner(ours), repeats, new_tokens=new_tokens)
        # The load of another machine is not known.
        return timing if self.engine.environment()["cores"] else timing | {"load": None}

    def batch_timing(self, setting: Setting | None, questions: Sequence[Any], repeats: int) -> dict[str, Any]:
        raise UnsupportedSetupError(
            "Throughput needs the model in this process. Use --backend hf, or --objective ttft. "
            "`python benchmarks/experiments/serving.py` measures a server under load."
        )

    def build_cost_model(self, questions: Sequence[Any]) -> tuple[CostModel, list[Load]] | None:
        return None  # the number of tokens is only known with the engine's answer

    def environment(self) -> dict[str, Any]:
        config = self.engine.config
        return {
            "engine": "vllm",
            "model_type": config and config.model_type,
            "weights": None,
            "threads": None,
            "attention": None,
            "tokenprune": tokenprune.__version__,
            **self.engine.environment(),
        }

    def fingerprint(self) -> str:
        return self.engine.fingerprint()

    def _chat(self, question: Any) -> Chat:
        load = getattr(question, "load_files", None)
        return Chat(tuple(question.images if load is None else load()), question.question + self.suffix)

    def _answer(self, setting: dict[str, Any], first: int, batch: list[Any]) -> Batch:
        before = self.engine.count_visual_tokens()
        replies = self.engine.ask([self._chat(question) for question in batch], setting, self.max_new_tokens)
        entered, left = (now - then for now, then in zip(self.engine.count_visual_tokens(), before, strict=True))
        # The plugin counts the requests of all clients. Equal images must give equal counts.
        if self._seen.setdefault(first, entered) != entered or (setting == OFF and entered != left):
            raise RunError(
                "vLLM counted visual tokens of other requests. Use a server without other clients. Finished results "
                "are kept."
            )
        return [reply.text.strip() for reply in replies], self._compute_cost(replies, entered, left).sums()

    def _compute_cost(self, replies: list[Reply], entered: int, left: int) -> Stats:
        cost = Stats(entered, left, [left], overhead_ms=None)
        if shape := self._shape:
            lengths = [reply.prompt_tokens for reply in replies]
            cost.visual_tokens_per_layer = [left] * shape.layers
            cost.prefill_flops = sum(shape.prefill_flops([length] * shape.layers) for length in lengths)
            cost.kv_bytes = shape.kv_bytes([sum(lengths)] * shape.layers, self.engine.bytes_per_value)
            cost.kv_bytes_full = cost.kv_bytes  # replaced later by the unpatched size
        return cost


def build_request(setting: Setting | None) -> dict[str, Any]:
    """Return a setting as a request carries it. All options are explicit, so the server's defaults have no effect."""
    if setting is None:
        return dict(OFF)
    methods = [
        {"method": name}
        | {key: value for key, value in (method_info(name).options | options).items() if value is not None}
        for name, options in zip(setting.names, setting.options, strict=True)
    ]
    scope = {name: value for name in ("keep", "per", LIMIT) if (value := getattr(setting, name)) is not None}
    return ({"method": methods} if len(methods) > 1 else methods[0] if methods else {}) | scope


def build_image_url(kind: str, data: bytes) -> dict[str, Any]:
    """Return a part of a chat with the content of an image file. `kind` is "png" or "jpeg"."""
    url = f"data:image/{kind};base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def needs_special_tokens(prompt: Callable[[bool], list[int]]) -> bool:
    """Return True if special tokens must be added to the text of a chat template.

    As in transformers, they are added unless the template writes the first special token itself.

    Args:
        prompt: Returns the ids of a chat, with or without added special tokens.
    """
    return prompt(True)[:1] != prompt(False)[:1]


def _change_images(chat: Chat) -> Chat:
    """Change each image, so that no cache has its encoding or prefix."""
    images: list[Image.Image | bytes] = []
    for image in chat.images:
        if isinstance(image, bytes):
            images.append(image + secrets.token_bytes(8))  # bytes after the end of a JPEG are not decoded
            continue
        changed = image.convert("RGB")
        changed = changed.copy() if changed is image else changed
        changed.putpixel((0, 0), tuple(secrets.token_bytes(3)))
        images.append(changed)
    return Chat(tuple(images), chat.text)
