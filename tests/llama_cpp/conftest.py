# SPDX-License-Identifier: Apache-2.0
"""Tests in a separate environment, which `dev/check llama-cpp` sets up. GGUF files are built in pytest's cache."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from PIL import Image

REASON = "llama-cpp-python is not installed: run dev/check llama-cpp"
pytest.importorskip("llama_cpp", reason=REASON)
pytest.importorskip("gguf", reason=REASON)

from llama_cpp import Llama
from llama_cpp.llama_chat_format import MTMDChatHandler
from llama_cpp_export import load_reference, write_all

from tokenprune_demo.heldout import load_heldout

torch.set_num_threads(1)
F32 = 0  # GGML_TYPE_F32, for the KV cache


@pytest.fixture(scope="session")
def files(request: pytest.FixtureRequest) -> Path:
    return write_all("demo_qwen", Path(request.config.cache.mkdir("gguf")))


@pytest.fixture(scope="session")
def load(files: Path) -> Callable[..., Llama]:
    def load(name: str = "decoder", n_ctx: int = 1024) -> Llama:
        handler = MTMDChatHandler(clip_model_path=str(files / "mmproj.gguf"), verbose=False)
        return Llama(
            str(files / f"{name}.gguf"), chat_handler=handler, n_ctx=n_ctx, n_threads=1, n_threads_batch=1,
            type_k=F32, type_v=F32, logits_all=False, verbose=False,
        )  # fmt: skip

    return load


@pytest.fixture(scope="session")
def shared(load: Callable[..., Llama]) -> Llama:
    return load()


@pytest.fixture
def llm(shared: Llama) -> Llama:
    """Return the decoder with M-RoPE. The module of its handler is restored after the test."""
    module = shared.chat_handler._mtmd_cpp
    yield shared
    shared.chat_handler._mtmd_cpp = module


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def questions() -> list[Any]:
    return load_heldout()[::19][:10]


class Reference:
    """demo_qwen in transformers."""

    def __init__(self) -> None:
        self.model, self.processor = load_reference()

    def inputs(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        images = [part["image"] for message in messages if isinstance(message["content"], list)
                  for part in message["content"] if part["type"] == "image"]  # fmt: skip
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        return self.processor(images=images, text=text, return_tensors="pt")

    @torch.no_grad()
    def answer(self, messages: Sequence[dict[str, Any]]) -> str:
        inputs = self.inputs(messages)
        output = self.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        return self.processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    @torch.no_grad()
    def logits(self, messages: Sequence[dict[str, Any]]) -> torch.Tensor:
        return self.model(**self.inputs(messages), use_cache=False).logits[0, -1]


def ask_about(images: Sequence[Image.Image], question: str) -> list[dict[str, Any]]:
    """Return the messages of a question about images."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question.lower()}]}]


def to_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def complete(llm: Llama, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
    """Return the completion of messages with images."""
    converted = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": to_uri(part["image"])}}
                for part in content
            ]
        converted.append({**message, "content": content})
    options = {"temperature": 0, "max_tokens": 4, "repeat_penalty": 1.0} | options
    return llm.create_chat_completion(converted, **options)


def answer(llm: Llama, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    return complete(llm, messages, **options)["choices"][0]["message"]["content"].strip()


def read_logits(llm: Llama, messages: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return the logits of the token after the prompt."""
    recorded: list[torch.Tensor] = []

    def record(ids: Any, scores: Any) -> Any:
        recorded.append(torch.tensor(scores).clone())
        return scores

    complete(llm, messages, max_tokens=1, logits_processor=[record])
    return recorded[0]
