# SPDX-License-Identifier: Apache-2.0
"""Images and questions to fit the rate predictor of `dyrate` with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokenprune.bench.model import Model
from tokenprune.bench.scenes import draw_scene
from tokenprune.calibration.images import SUFFIXES, read_image
from tokenprune.calibration.rate_fitting import Fit, fit_dyrate
from tokenprune.errors import TokenPruneError

# Other scenes than those that are held out for the benchmark.
_SEED = 7


def fit(
    subject: Model,
    out: Path,
    images: Path | None,
    question: str,
    limit: int,
    step: Callable[[str, int, int], None],
    options: dict[str, Any],
) -> Fit:
    """Fit a predictor on up to `limit` images and write it. images: a folder; None draws scenes, which come with
    questions of their own. step: gets the progress. options: those of `fit_dyrate`."""
    if not out.parent.is_dir():
        raise TokenPruneError(f"cannot write {out}: there is no folder {out.parent}")
    asked = list(_scenes(limit)) if images is None else list(_folder(images, question, limit))
    samples = (subject.inputs([image], [text]) for image, text in asked)
    return fit_dyrate(
        subject.model, samples, out, progress=lambda done: step("fit-dyrate", done, len(asked)), **options
    )[1]


def _scenes(limit: int) -> Iterator[tuple[Image.Image, str]]:
    rng = np.random.default_rng(_SEED)
    for _ in range(limit):
        scene = draw_scene(rng)
        yield scene.image, scene.questions[int(rng.integers(len(scene.questions)))].text


def _folder(folder: Path, question: str, limit: int) -> Iterator[tuple[Image.Image, str]]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [path for path in paths if path.suffix.lower() in SUFFIXES][:limit]
    for path in found:
        yield read_image(path), question
    if not found:
        raise TokenPruneError(f"--images {folder} holds no images: name a folder of image files")
