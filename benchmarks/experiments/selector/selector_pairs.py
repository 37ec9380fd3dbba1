# SPDX-License-Identifier: Apache-2.0
"""Training pairs of the experiment learned.py: drawn images with a question each, without labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tokenprune_bench.profiling.model import Model

SEED = 20261128


class Pairs(Sequence[dict[str, Any]]):
    """Model arguments of drawn pairs of an image and a question. Pair `index` depends on the seed and `index` only."""

    def __init__(self, subject: Model, name: str, kinds: Sequence[str], count: int) -> None:
        self.subject, self.name, self.kinds, self.count = subject, name, kinds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        image, question = draw_pair(self.name, self.kinds, index)
        return self.subject.inputs([image], [question])


def draw_pair(name: str, kinds: Sequence[str], index: int) -> tuple[Image.Image, str]:
    """Return a training image of a model and a question about it. Things are left out: their drawings are a font's."""
    import native_scenes

    native_scenes.Canvas.thing = lambda *arguments: None
    for attempt in range(100):
        rng = np.random.default_rng((SEED, index, attempt))
        if name == "demo_smol":
            import smol_scenes

            sort = str(rng.choice(("shapes", "photo"), p=(0.7, 0.3)))
            scene = smol_scenes.draw(rng, smol_scenes.photographs("train"), sort)
        else:
            import make_heldout_native

            width, height, scale = make_heldout_native.size(rng, index)
            scene = native_scenes.draw_native(rng, width, height, scale, native_scenes.photographs("train"))
        # Each kind is equally likely, so that kinds with many questions do not crowd out the others.
        kind = str(rng.choice(kinds))
        questions = [question.text for question in scene.questions if question.kind == kind]
        if questions:
            return Image.fromarray(scene.pixels[0]), questions[int(rng.integers(len(questions)))]
    raise AssertionError(f"no question of the trained kinds in 100 scenes for pair {index}")
