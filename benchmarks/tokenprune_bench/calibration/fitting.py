# SPDX-License-Identifier: Apache-2.0
"""Fit a method to a model by its own `fit`: find it, check its options, and give it images and questions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
from PIL import Image

from tokenprune.errors import OptionError, require
from tokenprune.methods.registry import available_methods, method_class
from tokenprune.selection.options import describe_type, get_file_options, matches_type
from tokenprune.settings.one_line import parse_value
from tokenprune_bench.calibration.images import ImageFiles, read_image
from tokenprune_bench.profiling.model import Model

# Other scenes than those that are held out for the benchmark.
_SEED = 7
_QUESTION = "Describe this image."
_GIVEN = ("model", "samples", "out", "progress")  # arguments of every `fit`, which are no options


class FitSamples:
    """Hold images with a question each, and iterate over the model's arguments for them.

    asked: images, paths or PIL images where they were drawn, with their questions. processor: of the model.
    """

    def __init__(self, subject: Model, asked: list[tuple[Any, str]]) -> None:
        self.images, self.processor = [image for image, _ in asked], subject.processor
        self._subject, self._asked = subject, asked

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for image, question in self._asked:
            opened = image if isinstance(image, Image.Image) else read_image(image)
            yield self._subject.inputs([opened], [question])


class Fitter:
    """Fit the method `name`. options: the options of its `fit`, as texts, by name; True for a flag without a value.

    Raises OptionError for a method that has no `fit`, and for options that its `fit` does not take.
    """

    def __init__(self, name: str, options: Mapping[str, str | bool]) -> None:
        if name not in fittable():
            raise OptionError(f"{name!r} is no method that is fitted: use one of {', '.join(fittable())}")
        self.name, self.cls = name, method_class(name)
        self.options = {option: self._value(option, value) for option, value in options.items()}

    @property
    def out(self) -> Path:
        """The file that is written where the user names none: it is called as the method's option for it."""
        return Path(f"{next(iter(sorted(get_file_options(self.cls))), self.name)}.safetensors")

    def asked(self, images: Path | None, question: str | None, limit: int | None) -> list[tuple[Any, str]]:
        """Return images with a question each: those of a folder, or drawn scenes. question, limit: None for the
        method's own. Raises TokenPruneError where there are none."""
        limit, question = limit or self.cls.fit_limit, question or self.cls.fit_question
        if images is not None:
            return [(one, question or _QUESTION) for one in islice(ImageFiles(images), limit)]
        if limit is None:
            raise OptionError(f"{self.name} is fitted on images like yours: name a folder with --images, or say how "
                              "many scenes to draw with --limit")  # fmt: skip
        return [(scene, question or own) for scene, own in _scenes(limit)]

    def run(self, subject: Model, samples: FitSamples, out: Path, step: Callable[[str, int, int], None]) -> Any:
        """Return what the method's `fit` returns, which writes `out`. step: gets a label, the samples done, and all."""
        progress = partial(_tell, step, f"fit {self.name}", len(samples))
        assert self.cls.fit is not None  # see `__init__`
        return self.cls.fit(subject.model, samples, out, progress=progress, **self.options)

    def _value(self, option: str, text: str | bool) -> Any:
        known = fit_options(self.name)
        if option not in known:
            raise OptionError(f"fitting {self.name} has no option {option!r}: its options are {listed(self.name)}")
        hint, _ = known[option]
        value = text if isinstance(text, bool) else parse_value(text, hint)
        if not matches_type(value, hint) and isinstance(text, str) and "," in text:
            value = parse_value(f"[{text}]", hint)
        if not matches_type(value, hint):
            raise OptionError(f"fitting {self.name}: {option}={text!r} must be {describe_type(hint)}")
        return value


def fittable() -> list[str]:
    """Return the names of the methods that have a `fit`, sorted."""
    return [name for name in available_methods() if method_class(name).fit is not None]


def fit_options(name: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each option of a method's `fit`: its keyword arguments."""
    own = method_class(name).fit
    if own is None:
        raise OptionError(f"{name!r} is no method that is fitted: use one of {', '.join(fittable())}")
    fit = inspect.unwrap(own)
    found = {
        one.name: one
        for one in inspect.signature(fit).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name not in _GIVEN
    }
    written = {option: one.annotation for option, one in found.items() if one.annotation is not one.empty}
    holder = SimpleNamespace(__annotations__=written)  # of other arguments, a type may be known to checkers alone
    hints = get_type_hints(holder, getattr(fit, "__globals__", {}), include_extras=True)
    return {option: (hints.get(option, Any), one.default) for option, one in found.items()}


def listed(name: str) -> str:
    """Return the options of a method's `fit` with their defaults, as a command line has them."""
    options = [f"--{option.replace('_', '-')} {default}" for option, (_, default) in fit_options(name).items()]
    return ", ".join(options) or "(none)"


def _tell(step: Callable[[str, int, int], None], label: str, total: int, done: int) -> None:
    step(label, done, total)


def _scenes(limit: int) -> Iterator[tuple[Image.Image, str]]:
    draw_scene = require(
        "tokenprune_demo.scenes", "drawn images need another package (or name a folder with --images)"
    ).draw_scene
    rng = np.random.default_rng(_SEED)
    for _ in range(limit):
        scene = draw_scene(rng)
        yield scene.image, scene.questions[int(rng.integers(len(scene.questions)))].text
