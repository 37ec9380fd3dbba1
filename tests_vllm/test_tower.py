# SPDX-License-Identifier: Apache-2.0
"""Methods that read the vision tower's attention: the words of the patched Hugging Face model, for every tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from checkpoints import Checkpoint
from conftest import Engine, same
from tokenprune import Method, Site
from tokenprune.registry import register

VSCAN = {"method": "vscan", "keep": 0.4, "stage2": False}
FAMILIES = [
    "llava", "llava_next", "llava_onevision", "gemma3", "idefics3", "smolvlm", "internvl", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl",
]  # fmt: skip


@register("seer", site=Site.PRE_LLM, needs=("encoder_attention",), paper="none")
@dataclass(frozen=True)
class Seer(Method):
    """Somebody else's: keep what the tower looks at in two of its blocks."""

    early: float = 0.3

    @property
    def encoder_layers(self) -> tuple[float | int, ...]:
        return self.early, -1

    def score(self, tokens: Any) -> Tensor:
        return sum(tokens.encoder_attention(layer).amax(1) for layer in self.encoder_layers)


SETTINGS = [
    {},
    {"keep": 0.7, "local": 0.2, "merge": False},
    {"off": True},
    {"window": 2, "local_layer": -1},
    {"method": "seer", "keep": 0.5},
    {"method": "divprune", "keep": 0.5},
]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    return start(request.param, VSCAN)


@pytest.fixture
def checkpoint(engine: Engine) -> Checkpoint:
    return engine.checkpoint


def in_force(override: dict[str, Any]) -> dict[str, Any] | None:
    """The setting that an override amounts to, as `tokenprune.patch` takes it."""
    if override.get("off"):
        return None
    return override if "method" in override else VSCAN | override


@pytest.fixture
def encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Items in each call of the encoder, from here on; all caches are empty at the start."""
    engine.forget()
    calls: list[int] = []
    embed = type(engine.model).embed_multimodal

    def spy(self: Any, **kwargs: Any) -> Any:
        out = embed(self, **kwargs)
        calls.append(len(out))
        return out

    monkeypatch.setattr(type(engine.model), "embed_multimodal", spy)
    yield calls


def check(reference: Any, output: Any, prompt: str, images: list, override: dict, videos: Any = ()) -> None:
    tokens, logprobs = reference.greedy(prompt, images, len(output.outputs[0].token_ids), in_force(override), videos)
    same(output, tokens, logprobs)


def test_alone_and_again_from_the_cache(
    engine: Engine, reference: Any, checkpoint: Checkpoint, encoded: list[int]
) -> None:
    theirs, images = reference(checkpoint.name), checkpoint.pictures(1)
    text = "what is it, and where, and why is it there at all? "
    for prompt in (checkpoint.prompt(1, text), checkpoint.prompt(1, text), checkpoint.prompt(1, "else? ")):
        (output,) = engine.generate([engine.request(prompt, images)])
        check(theirs, output, prompt, images, {})
    assert encoded == [1]


def test_mixed_settings_in_one_call_of_the_tower(
    engine: Engine, reference: Any, checkpoint: Checkpoint, encoded: list[int]
) -> None:
    theirs, prompt, images = reference(checkpoint.name), checkpoint.prompt(1), checkpoint.pictures(1)
    for settings in (SETTINGS[:4], SETTINGS[2:]):
        engine.forget()
        outputs = engine.generate([engine.request(prompt, images, override) for override in settings])
        for override, output in zip(settings, outputs, strict=True):
            check(theirs, output, prompt, images, override)
    assert max(encoded) > 1
    assert engine.model.tokenprune_tower._seen == {}


def test_several_pictures(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    """Of different sizes, so that each has tiles, windows and sequences of its own."""
    theirs = reference(checkpoint.name)
    cases = [(2, {}), (3, {"method": "seer", "keep": 0.3}), (3, {"keep": 0.6, "local": 1.0})]
    requests = [(checkpoint.prompt(n, f"case {n}? "), checkpoint.pictures(n, seed=n), o) for n, o in cases]
    outputs = engine.generate([engine.request(*request) for request in requests])
    for (prompt, images, override), output in zip(requests, outputs, strict=True):
        check(theirs, output, prompt, images, override)
