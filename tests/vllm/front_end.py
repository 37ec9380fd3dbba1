# SPDX-License-Identifier: Apache-2.0
"""Front end of a server without the server: the processor of a checkpoint, and its counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
from PIL import Image
from prometheus_client import REGISTRY, CollectorRegistry

from checkpoints import CHECKPOINTS, Checkpoint
from conftest import OPTIONS
from tokenprune.integrations.vllm.frontend.served import RequestRecord
from tokenprune.integrations.vllm.gateway.choice import Choice
from tokenprune.integrations.vllm.settings.server_config import get_server_config

TOTAL = "tokenprune:visual_tokens_total"


def config(folder: Path, setting: Any = None, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return vLLM's model config as a starting server creates it; `extra` adds arguments of processors."""
    from vllm.engine.arg_utils import EngineArgs

    kwargs = (extra or {}) | ({} if setting is None else {"tokenprune": setting}) or None
    return EngineArgs(str(folder), mm_processor_kwargs=kwargs, **OPTIONS | options).create_model_config()


def processor(folder: Any, setting: Any, **options: Any) -> Any:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_config = config(folder, setting, **options)  # loads plugins, so it must precede the registry
    return MULTIMODAL_REGISTRY.create_processor(model_config)


def engine_parts(mm_processor: Any, **parts: Any) -> SimpleNamespace:
    """Return the parts of an engine that the front end uses, given its processor."""
    vllm_config = SimpleNamespace(model_config=mm_processor.info.ctx.model_config, use_v2_model_runner=False)
    parts = {"collective_rpc": AsyncMock()} | parts
    return SimpleNamespace(
        vllm_config=vllm_config, renderer=SimpleNamespace(get_mm_processor=lambda: mm_processor), **parts
    )


def photos(checkpoint: Checkpoint) -> list[Image.Image]:
    """Return a smooth image, a noisy image, and lines, which dynres classifies as text."""
    (height, width), *_ = checkpoint.sizes
    slope = np.linspace(60, 200, height * width).reshape(height, width)
    noise = np.random.default_rng(3).integers(0, 256, (width, height))
    lines = (np.random.default_rng(0).random((height, height)) < 0.3) * 255
    return [Image.fromarray(pixels.astype(np.uint8)).convert("RGB") for pixels in (slope, noise, lines)]


def samples(name: str, model: str, registry: CollectorRegistry = REGISTRY) -> dict[tuple[str, ...], float]:
    """Return the values of a counter for one model, by its other labels in alphabetical order."""
    matching = [sample for metric in registry.collect() for sample in metric.samples if sample.name == name]
    return {
        tuple(value for key, value in sorted(sample.labels.items()) if key != "model_name"): sample.value
        for sample in matching
        if sample.labels["model_name"] == model
    }


def sum_stages(name: str, model: str) -> dict[str, float]:
    """Return the sum of a token counter for each stage."""
    values = samples(name, model)
    return {stage: sum(value for labels, value in values.items() if stage in labels) for stage in ("in", "out")}


class FrontEnd:
    """Processor with its cache; `model` is its model name in the metrics."""

    def __init__(self, folder: Callable[[str], Path], name: str, setting: Any, model: Any = None, **options: Any):
        from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache

        self.checkpoint = CHECKPOINTS[name]
        self.processor = processor(folder(name), setting, served_model_name=model, **options)
        self.model_config = self.processor.info.ctx.model_config
        self.cache = MultiModalProcessorOnlyCache(self.model_config)

    def choose(self, override: Any, lot: float = 0.0, by: str = "default") -> Choice:
        """Resolve a request's setting as an endpoint does; `lot` is its draw in a rollout."""
        offer = get_server_config(self.model_config)
        return Choice(override, offer, offer.setting(override), RequestRecord(by), lot)

    def process(self, images: Any, override: Any = None, prompt: str | None = None, **more: Any) -> Any:
        """Return vLLM's processed request with `images`, or with this number of `photos`.

        Args:
            more: `videos`, `lot`, `cached=False` to skip the cache, and arguments of the Hugging Face processor.
        """
        cache = self.cache if more.pop("cached", True) else None
        videos, lot = more.pop("videos", None), more.pop("lot", None)
        if isinstance(images, int):
            images = photos(self.checkpoint)[:images]
        if lot is not None:
            override = self.choose(override or {}, lot)
        items = self.processor.info.parse_mm_data({"image": images} | ({"video": videos} if videos else {}))
        prompt = self.checkpoint.prompt(len(images)) if prompt is None else prompt
        kwargs = more if override is None else more | {"tokenprune": override}
        return self.processor(prompt, items, hf_processor_mm_kwargs=kwargs, cache=cache)

    def ask(self, *args: Any, **more: Any) -> list[int]:
        """Return the token ids of the prompt that the engine receives."""
        return self.process(*args, **more)["prompt_token_ids"]

    def count(self, *args: Any, **more: Any) -> int:
        """Return the number of image placeholders in the prompt."""
        return self.ask(*args, **more).count(self.processor.info.get_hf_config().image_token_id)
