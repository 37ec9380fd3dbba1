# SPDX-License-Identifier: Apache-2.0
"""Every family, in the real engine: the words of the patched Hugging Face model, to 1e-4 in log-probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import CHECKPOINTS, Checkpoint
from conftest import DIVPRUNE, ORIGINAL, Engine, same

SETTINGS = {
    "off": {"off": True},
    "divprune": {},
    "uniform": {"method": "uniform", "keep": 0.5},
    "pool": {"method": "pool", "keep": 7},
    "random": {"method": "random", "keep": 0.4, "seed": 3},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    # Of one family whose tiles have a budget each, positions as they were; see test_original_positions.py, too.
    return start(request.param, DIVPRUNE | (ORIGINAL if request.param == "internvl" else {}))


def expected(override: dict[str, Any]) -> dict[str, Any] | None:
    """The setting that an override of DIVPRUNE amounts to, as `tokenprune.patch` takes it."""
    return None if override.get("off") else DIVPRUNE | override


def check(engine: Engine, reference: Any, output: Any, prompt: str, images: list, override: Any, videos: Any = ()):
    steps = len(output.outputs[0].token_ids)
    return same(output, *reference.greedy(prompt, images, steps, expected(override), videos, engine.original))


@pytest.fixture
def checkpoint(engine: Engine) -> Checkpoint:
    return engine.checkpoint


def test_unpruned_model_is_the_same(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    """The ground that the other tests stand on; and the prompts are equal, so later differences are ours."""
    prompt, images = checkpoint.prompt(2), checkpoint.images(2)
    (output,) = engine.generate([engine.request(prompt, images, {"off": True})])
    theirs = reference(checkpoint.name)
    assert list(output.prompt_token_ids) == theirs.inputs(prompt, images)["input_ids"][0].tolist()
    check(engine, theirs, output, prompt, images, {"off": True})


def test_a_batch_of_every_setting(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    theirs = reference(checkpoint.name)
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    outputs = engine.generate([engine.request(prompt, images, override) for override in SETTINGS.values()])
    for override, output in zip(SETTINGS.values(), outputs, strict=True):
        check(engine, theirs, output, prompt, images, override)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert lengths[0] > lengths[2] > lengths[1], lengths


def test_several_images(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    theirs = reference(checkpoint.name)
    cases = [(2, {}), (3, {"method": "pool", "keep": 0.4}), (3, {"keep": 5})]
    requests = [(checkpoint.prompt(n, f"case {n}? "), checkpoint.images(n, seed=n), o) for n, o in cases]
    outputs = engine.generate([engine.request(*request) for request in requests])
    for (prompt, images, override), output in zip(requests, outputs, strict=True):
        check(engine, theirs, output, prompt, images, override)


def test_a_video_beside_a_image(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.video is None:
        pytest.skip(f"{checkpoint.name} takes no video here")
    theirs = reference(checkpoint.name)
    prompt, images, videos = checkpoint.prompt(1, video=True), checkpoint.images(1), [checkpoint.clip()]
    overrides = [{"off": True}, {}, {"method": "uniform", "keep": 20}, {"method": "pool", "keep": 0.3}]
    overrides += [{"per": "frame"}, {"method": "pool", "keep": 0.3, "per": "frame"}]
    outputs = engine.generate([engine.request(prompt, images, override, videos) for override in overrides])
    for override, output in zip(overrides, outputs, strict=True):
        check(engine, theirs, output, prompt, images, override, videos)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert lengths[0] > lengths[3] > lengths[1], lengths
