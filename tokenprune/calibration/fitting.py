# SPDX-License-Identifier: Apache-2.0
"""Images and questions to fit with: the rate predictor of `dyrate`, the prior of `d2pruner`, the recipe of
`fitprune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokenprune.calibration.images import SUFFIXES, read_image
from tokenprune.calibration.rate_fitting import Fit, fit_dyrate
from tokenprune.errors import TokenPruneError
from tokenprune.profiling.model import Model
from tokenprune.startup import require

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
    asked = _asked(out, images, question, limit)
    progress = partial(_tell, step, "fit-dyrate", len(asked))
    return fit_dyrate(subject.model, _samples(subject, asked), out, progress=progress, **options)[1]


def fit_attention(
    fitted: Callable[..., Any],
    subject: Model,
    out: Path,
    images: Path | None,
    question: str,
    limit: int,
    step: Callable[[str, int, int], None],
    **options: Any,
) -> Any:
    """Fit `fitted`, which is `fit_d2pruner` or `fit_fitprune`, on up to `limit` images and write it; see `fit`."""
    asked = [(image, question) for image, _ in _asked(out, images, question, limit)]
    progress = partial(_tell, step, fitted.__name__.replace("_", "-"), len(asked))
    return fitted(subject.model, _samples(subject, asked), out, progress=progress, **options)


def _tell(step: Callable[[str, int, int], None], name: str, total: int, done: int) -> None:
    step(name, done, total)


def _asked(out: Path, images: Path | None, question: str, limit: int) -> list[tuple[Image.Image, str]]:
    if not out.parent.is_dir():
        raise TokenPruneError(f"cannot write {out}: there is no folder {out.parent}")
    return list(_scenes(limit)) if images is None else list(_folder(images, question, limit))


def _samples(subject: Model, asked: list[tuple[Image.Image, str]]) -> Iterator[dict[str, Any]]:
    return (subject.inputs([image], [text]) for image, text in asked)


def _scenes(limit: int) -> Iterator[tuple[Image.Image, str]]:
    draw_scene = require(
        "tokenprune_demo.scenes", "drawn images need another package (or name a folder with --images)"
    ).draw_scene
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
