# SPDX-License-Identifier: Apache-2.0
"""Every family, in the real engine: answers match the patched Hugging Face model to 1e-4 in log-probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints import CHECKPOINTS, Checkpoint
from conftest import DIVPRUNE, ORIGINAL, Engine

SETTINGS = {
    "off": {"off": True},
    "divprune": {},
    "uniform": {"method": "uniform", "keep": 0.5},
    "pool": {"method": "pool", "keep": 7},
    "random": {"method": "random", "keep": 0.4, "seed": 3},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    # Original positions with a budget for each tile. See also test_original_positions.py.
    return start(request.param, DIVPRUNE | (ORIGINAL if request.param == "internvl" else {}))


def test_unpruned_model_is_the_same(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    """The prompts and the answers agree without pruning, so differences in other tests come from pruning."""
    prompt, images = checkpoint.prompt(2), checkpoint.images(2)
    (output,) = engine.check(reference, [(prompt, images, {"off": True})])
    full = reference(checkpoint.name).inputs(prompt, images)["input_ids"][0].tolist()
    assert list(output.prompt_token_ids) == full


def test_a_batch_of_every_setting(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    outputs = engine.check(reference, [(prompt, images, override) for override in SETTINGS.values()])
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert lengths[0] > lengths[2] > lengths[1], lengths


def test_several_images(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    engine.check(reference, checkpoint.cases((2, {}), (3, {"method": "pool", "keep": 0.4}), (3, {"keep": 5})))


def test_video_and_image(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.video is None:
        pytest.skip(f"{checkpoint.name} takes no video here")
    overrides = [{"off": True}, {}, {"method": "uniform", "keep": 20}, {"method": "pool", "keep": 0.3}]
    overrides += [{"per": "frame"}, {"method": "pool", "keep": 0.3, "per": "frame"}]
    outputs = engine.check(reference, [checkpoint.video_case(override) for override in overrides])
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert lengths[0] > lengths[3] > lengths[1], lengths
