# SPDX-License-Identifier: Apache-2.0
"""Ask the questions of a benchmark through vLLM with the plugin: in this process (vllm_offline.py), or on a server
(vllm_server.py). Every pass is a setting that the requests carry, so one engine serves them all."""

from __future__ import annotations

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
from tokenprune.statistics import Stats
from tokenprune_bench.backend import Answer
from tokenprune_bench.data import refuse
from tokenprune_bench.errors import RunError
from tokenprune_bench.profiling.patched import escalates
from tokenprune_bench.profiling.timing import NEW_TOKENS, in_turns
from tokenprune_bench.two_pass import ESCALATE

if TYPE_CHECKING:
    from tokenprune_bench.answers import Batch

OFF = {"off": True}


@dataclass(frozen=True)
class Chat:
    """One turn of a user: images, and after them a text."""

    images: tuple[Image.Image, ...]
    text: str


@dataclass(frozen=True)
class Reply:
    """An answer without special tokens. prompt_tokens: of the prompt as the engine ran it."""

    text: str
    prompt_tokens: int


class VllmEngine(Protocol):
    """vLLM, wherever it runs. setting: what stands under "tokenprune" in a request (docs/serving/start.md).

    config: the model's, as transformers reads it; None where it is not at hand. number_bytes: of a number in the KV
    cache.
    """

    config: Any
    number_bytes: int

    def ask(self, chats: Sequence[Chat], setting: dict[str, Any], max_tokens: int) -> list[Reply]:
        """Return the greedy answers to chats that are asked at once. Raises TokenPruneError for a setting that is
        refused, RunError if the engine does not answer."""

    def clock(self, chat: Chat, setting: dict[str, Any], tokens: int) -> tuple[float, float]:
        """Return milliseconds to the first of so many tokens, and for each further one."""

    def counted(self) -> tuple[int, int]:
        """Return how many visual tokens the plugin has counted so far: before and after reduction."""

    def check(self, chat: Chat) -> None:
        """Raise TokenPruneError unless requests with a setting are understood."""

    def environment(self) -> dict[str, Any]:
        """As `Backend.environment`, with what vLLM is at hand."""

    def fingerprint(self) -> str:
        """As `Backend.fingerprint`."""


class VllmBackend:
    """vLLM as the backend of a benchmark.

    Visual tokens are counted by the plugin. FLOPs and bytes of the KV cache are closed forms, from the lengths of
    prompts that the engine reports. Times are those of single requests, each with an image that no cache has seen.
    """

    def __init__(self, engine: VllmEngine, suffix: str, max_new_tokens: int, metric: str = "exact") -> None:
        self.engine, self.suffix, self.max_new_tokens, self.metric = engine, suffix, max_new_tokens, metric
        text = engine.config and engine.config.get_text_config()
        self._shape = DecoderShape.from_config(text) if text else None
        self._seen: dict[int, int] = {}  # visual tokens of the batches, before reduction
        self._checked = False

    def misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        video = "asks about a video: --backend vllm takes images; use --backend hf"
        labels = "has text between its images, and --backend vllm puts them first: use --backend hf"
        reasons = (video if one.is_video else labels if getattr(one, "labels", ()) else None for one in questions)
        return [(place, reason) for place, reason in enumerate(reasons) if reason]

    def begin(self, questions: Sequence[Any], evidence: bool = False) -> None:
        refuse(questions, self.misfits(questions))
        if questions and not self._checked:
            self.engine.check(self._chat(questions[0]))
            self._checked = True

    def alone(self, setting: Setting | None) -> bool:
        return False  # vLLM processes image by image, whatever comes together

    @contextmanager
    def answering(self, setting: Setting | None) -> Iterator[Answer]:
        if escalates(setting):
            raise UnsupportedSetupError(f"{ESCALATE} runs with the model in this process: use --backend hf")
        asked = request_of(setting)
        yield lambda number, batch: self._answer(asked, number, batch)

    def timing(
        self, setting: Setting | None, question: Any, repeats: int, new_tokens: int = NEW_TOKENS, processor: bool = True
    ) -> dict[str, Any]:
        """See `Backend.timing`; a request to vLLM begins with the image in any case."""
        chat, ours = self._chat(question), request_of(setting)

        def runner(asked: dict[str, Any]) -> Callable[[], tuple[float, float]]:
            return lambda: self.engine.clock(_unseen(chat), asked, new_tokens)

        timing = in_turns(runner(OFF), runner(ours), repeats, new_tokens=new_tokens)
        # Of another machine the load is not known.
        return timing if self.engine.environment()["cores"] else timing | {"load": None}

    def batch_timing(self, setting: Setting | None, questions: Sequence[Any], repeats: int) -> dict[str, Any]:
        raise UnsupportedSetupError(
            "throughput is measured with the model in this process: use --backend hf, or --objective ttft here; "
            "`python benchmarks/experiments/serving.py` puts load on a server"
        )

    def closed_forms(self, questions: Sequence[Any]) -> tuple[CostModel, list[Load]] | None:
        return None  # the engine has the processor: how many tokens an image becomes comes with the answer

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
        return Chat(tuple(question.images), question.question + self.suffix)

    def _answer(self, setting: dict[str, Any], number: int, batch: list[Any]) -> Batch:
        before = self.engine.counted()
        replies = self.engine.ask([self._chat(question) for question in batch], setting, self.max_new_tokens)
        entered, left = (now - then for now, then in zip(self.engine.counted(), before, strict=True))
        # The plugin counts what everybody asks; the same images make the same tokens each time.
        if self._seen.setdefault(number, entered) != entered or (setting == OFF and entered != left):
            raise RunError(
                "vLLM counted other visual tokens than those of this benchmark's questions: measure on a server that "
                "nobody else uses meanwhile. What is finished is kept"
            )
        return [reply.text.strip() for reply in replies], self._cost(replies, entered, left).sums()

    def _cost(self, replies: list[Reply], entered: int, left: int) -> Stats:
        cost = Stats(entered, left, [left], overhead_ms=None)
        if shape := self._shape:
            lengths = [reply.prompt_tokens for reply in replies]
            cost.visual_tokens_per_layer = [left] * shape.layers
            cost.prefill_flops = sum(shape.prefill_flops([length] * shape.layers) for length in lengths)
            cost.kv_bytes = shape.kv_bytes([sum(lengths)] * shape.layers, self.engine.number_bytes)
            cost.kv_bytes_full = cost.kv_bytes  # until it is set against the unpatched model
        return cost


def request_of(setting: Setting | None) -> dict[str, Any]:
    """Return a setting as a request carries it: all options are named, so that those of the server's own setting do not
    apply."""
    if setting is None:
        return dict(OFF)
    methods = [
        {"method": name}
        | {key: value for key, value in (method_info(name).options | options).items() if value is not None}
        for name, options in zip(setting.names, setting.options, strict=True)
    ]
    budget = {name: value for name in ("keep", "per") if (value := getattr(setting, name)) is not None}
    return (methods[0] if len(methods) == 1 else {"method": methods}) | budget


def adds_special(prompt: Callable[[bool], list[int]]) -> bool:
    """Return True if special tokens belong before the text of a chat template: as in transformers, if the template does
    not write the first itself.

    prompt: from whether they are added to the ids of some chat.
    """
    return prompt(True)[:1] != prompt(False)[:1]


def _unseen(chat: Chat) -> Chat:
    """Change a pixel of each image, so that neither its encoding nor its prefix is in a cache."""
    images = []
    for image in chat.images:
        changed = image.convert("RGB")
        changed = changed.copy() if changed is image else changed
        changed.putpixel((0, 0), tuple(secrets.token_bytes(3)))
        images.append(changed)
    return Chat(tuple(images), chat.text)
