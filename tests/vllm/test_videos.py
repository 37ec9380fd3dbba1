# SPDX-License-Identifier: Apache-2.0
"""Methods that compare the frames of videos, in the real engine: answers match the patched Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from checkpoints import Checkpoint
from conftest import Engine
from tokenprune import TokenPruneError
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.methods.registry import available_methods, build
from tokenprune.selection.observable_registry import compares_frames

EVS = {"method": "evs", "keep": 0.4}
METHODS = [
    name
    for name in available_methods()
    if compares_frames(method := build(name, {})) and not find_unserved_reason(method)
]
# Methods with a second cut inside the language model, which is off here.
FIRST_CUTS = [{"method": name, "inner": False, "keep": 0.4} for name in ("holitom", "flashvid", "prunevid", "unipool")]
BLOCK = 32


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine]) -> Engine:
    """Chunks split videos, and the prefix cache keeps a video's blocks."""
    return start(request.param, EVS, max_num_batched_tokens=64)


def clip(checkpoint: Checkpoint, frames: int = 6, seed: int = 0) -> Any:
    """Return a video with a static background and a moving rectangle."""
    height, width = checkpoint.sizes[0]
    rng = np.random.default_rng(seed)
    pixels = np.repeat(rng.integers(0, 256, (1, height, width, 3), dtype=np.uint8), frames, axis=0)
    for t in range(frames):
        pixels[t, : height // 2, t * width // frames : t * width // frames + width // 3] = rng.integers(0, 256, 3)
    if not checkpoint.mrope:
        return pixels
    metadata = dict(fps=2.0, duration=frames / 2, total_num_frames=frames, frames_indices=list(range(frames)))
    return pixels, metadata | {"video_backend": "opencv", "do_sample_frames": False}


def test_batch_of_every_method_with_an_image(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    """The second round uses the prefix cache."""
    prompt, images, videos = checkpoint.prompt(1, video=True), checkpoint.images(1), [clip(checkpoint)]
    overrides = [{"off": True}, *({"method": name, "keep": 0.4} for name in METHODS), *FIRST_CUTS]
    for _ in range(2):
        outputs = engine.check(reference, [(prompt, images, override, videos) for override in overrides])
    assert all(output.num_cached_tokens >= BLOCK for output in outputs)
    # All tokens of the image are kept, and only the video is pruned.
    lengths, num_unpruned = [len(output.prompt_token_ids) for output in outputs[1:]], len(outputs[0].prompt_token_ids)
    assert len(set(lengths)) == 1 and lengths[0] < num_unpruned


def test_batch_of_different_lengths_and_images(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    cases = [([clip(checkpoint, frames, seed=frames)], []) for frames in (2, 4, 8)] + [([], checkpoint.images(2))]
    prompts = [checkpoint.prompt(len(images), f"case {i}? ", bool(v)) for i, (v, images) in enumerate(cases)]
    requests = [(prompt, images, None, videos) for prompt, (videos, images) in zip(prompts, cases, strict=True)]
    for request, output in zip(
        requests, engine.generate([engine.request(*request) for request in requests]), strict=True
    ):
        prompt, images, _, videos = request
        engine.compare(reference, output, prompt, images, {} if videos else {"off": True}, videos)


def test_unsupported_budget_raises(engine: Engine, checkpoint: Checkpoint) -> None:
    request = engine.request(checkpoint.prompt(0, video=True), [], {"per": "frame"}, [clip(checkpoint)])
    with pytest.raises(ValueError, match="evs compares the frames of a video, so the whole video has one budget"):
        engine.generate([request])


@pytest.mark.parametrize("name", ["internvl", "llava"])
def test_families_whose_videos_are_not_known_are_refused_at_the_start(name: str, start: Callable[..., Engine]) -> None:
    with pytest.raises((TokenPruneError, ValueError), match=r"the tokens of a frame are not known"):
        start(name, EVS)
