# SPDX-License-Identifier: Apache-2.0
"""Fit a method to a model with the method's `fit`: find it, check its options, and provide images and questions."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
from PIL import Image

from tokenprune.errors import OptionError, require
from tokenprune.methods.registry import available_methods, method_class
from tokenprune.selection.docstrings import Docstring
from tokenprune.selection.files import describe_error
from tokenprune.selection.options import describe_type, get_file_options, matches_type
from tokenprune.settings.one_line import parse_value
from tokenprune_bench.calibration.images import ImageFiles, read_image
from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling.media import RowError
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.rows import read_rows

# Differs from the seed of the held-out scenes.
_SEED = 7
_QUESTION = "Describe this image."
_ROW = 'Write {"image": FILE, "question": TEXT}.'
_COMMON = ("model", "samples", "out", "progress")  # arguments of every `fit`, not options


class FitSamples:
    """Images with one question each. Iterating yields the model's arguments.

    Args:
        subject: The model to fit to.
        asked: Pairs of an image (path or PIL image) and its question.
    """

    def __init__(self, subject: Model, asked: list[tuple[Any, str]]) -> None:
        self.images, self.processor = [image for image, _ in asked], subject.processor
        self._subject, self._asked = subject, asked

    def __len__(self) -> int:
        return len(self._asked)

    @cached_property
    def sample_keys(self) -> list[str]:
        """Digest of the question and of the image (for a file: of its name and size), for each sample."""
        keys = []
        for image, question in self._asked:
            is_drawn = isinstance(image, Image.Image)
            content = image.tobytes() if is_drawn else f"{image.name}:{image.stat().st_size}".encode()
            keys.append(hashlib.sha256(question.encode() + b"\0" + content).hexdigest()[:32])
        return keys

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, question = self._asked[index]
        opened = image if isinstance(image, Image.Image) else read_image(image)
        return self._subject.inputs([opened], [question])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))


class Fitter:
    """Fit the method `name`.

    Args:
        name: Name of a method that has a `fit`.
        options: Options of its `fit` by name, as texts. True for a flag without a value.

    Raises:
        OptionError: If the method has no `fit`, or its `fit` does not take an option.
    """

    def __init__(self, name: str, options: Mapping[str, str | bool]) -> None:
        if name not in list_fittable():
            raise OptionError(f"{name!r} cannot be fitted. Use one of {', '.join(list_fittable())}.")
        self.name, self.cls = name, method_class(name)
        self.options = {option: self._value(option, value) for option, value in options.items()}

    @property
    def default_out(self) -> Path:
        """Default output file, named after the method's file option."""
        return Path(f"{next(iter(sorted(get_file_options(self.cls))), self.name)}.safetensors")

    def load_samples(
        self, images: Path | None, question: str | None, limit: int | None, data: Path | None = None
    ) -> list[tuple[Any, str]]:
        """Return pairs of image and question, from a folder or a file, or drawn.

        Args:
            images: Folder of images. None draws scenes.
            question: Question about each image. None selects the method's own.
            limit: Maximum number of images. None selects the method's own.
            data: File with rows of an image and a question (tokenprune_bench.rows), instead of a folder.

        Raises:
            TokenPruneError: If no images are available.
        """
        limit, asked, question = limit or self.cls.fit_limit, question, question or self.cls.fit_question
        if data is not None:
            pairs = list(islice(_read_pairs(data, asked, question or _QUESTION), limit))
            if not pairs:
                raise DataError(f"{data} has no rows. {_ROW}")
            return pairs
        if images is not None:
            return [(image, question or _QUESTION) for image in islice(ImageFiles(images), limit)]
        if limit is None:
            raise OptionError(
                f"{self.name} is fitted on images like yours. Pass a folder with --images, a file with --data, or the "
                "number of scenes to draw with --limit."
            )
        return [(scene, question or scene_question) for scene, scene_question in _iter_scenes(limit)]

    def run(self, subject: Model, samples: FitSamples, out: Path, step: Callable[[str, int, int], None]) -> Any:
        """Run the method's `fit`, which writes `out`, and return its result.

        Args:
            subject: The model to fit to.
            samples: Images and questions.
            out: File to write.
            step: Progress callback with a label, the number of finished samples, and their total.
        """
        progress = partial(_tell, step, f"fit {self.name}", len(samples))
        assert self.cls.fit is not None  # see `__init__`
        return self.cls.fit(subject.model, samples, out, progress=progress, **self.options)

    def _value(self, option: str, text: str | bool) -> Any:
        known = fit_options(self.name)
        if option not in known:
            raise OptionError(
                f"The fit of {self.name} has no option {option!r}. Options: {format_fit_options(self.name)}"
            )
        hint, _ = known[option]
        value = text if isinstance(text, bool) else parse_value(text, hint)
        if not matches_type(value, hint) and isinstance(text, str) and "," in text:
            value = parse_value(f"[{text}]", hint)
        if not matches_type(value, hint):
            raise OptionError(f"The fit of {self.name} needs {describe_type(hint)} for {option}, not {text!r}.")
        return value


def list_fittable() -> list[str]:
    """Return the sorted names of the methods that have a `fit`."""
    return [name for name in available_methods() if method_class(name).fit is not None]


def fit_options(name: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each option (keyword argument) of a method's `fit`."""
    method_fit = method_class(name).fit
    if method_fit is None:
        raise OptionError(f"{name!r} cannot be fitted. Use one of {', '.join(list_fittable())}.")
    fit = inspect.unwrap(method_fit)
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(fit).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _COMMON
    }
    annotations = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if parameter.annotation is not parameter.empty
    }
    # Only the options are resolved: types of other arguments may be imported under TYPE_CHECKING only.
    holder = SimpleNamespace(__annotations__=annotations)
    hints = get_type_hints(holder, getattr(fit, "__globals__", {}), include_extras=True)
    return {option: (hints.get(option, Any), parameter.default) for option, parameter in parameters.items()}


def describe_fit_options(name: str) -> dict[str, str]:
    """Return each option of a method's `fit` with default and type, and its description from the docstring."""
    options = fit_options(name)
    doc = Docstring.from_text(inspect.getdoc(inspect.unwrap(method_class(name).fit)) or "")  # type: ignore[arg-type]
    return {
        f"{_format_option(option, default)}: {describe_type(hint)}": doc.args.get(option, "")
        for option, (hint, default) in options.items()
    }


def format_fit_options(name: str) -> str:
    """Format the options of a method's `fit` with their defaults, as on a command line."""
    options = [_format_option(option, default) for option, (_, default) in fit_options(name).items()]
    return ", ".join(options) or "(none)"


def _format_option(option: str, default: Any) -> str:
    value = ",".join(map(str, default)) if isinstance(default, tuple) and default else default
    return f"--{option.replace('_', '-')} {value}"


def _tell(step: Callable[[str, int, int], None], label: str, total: int, done: int) -> None:
    step(label, done, total)


def _read_pairs(data: Path, question: str | None, default: str) -> Iterator[tuple[Path, str]]:
    """Yield the image and the question of each row of a file. Answers are ignored.

    Args:
        data: The file.
        question: Question about each image. None selects the row's own.
        default: Question of rows without one.

    Raises:
        DataError: If a row is not valid. The message names its line.
    """
    folder, rows = read_rows(data, None)
    for where, row in rows:
        if isinstance(row, RowError):
            raise DataError(f"{where} of {data} is {row}.")
        image = row.get("image") if isinstance(row, dict) else None
        if not isinstance(image, str):
            raise DataError(f"{where} of {data} names no image. {_ROW}")
        path = folder / image
        try:
            with Image.open(path):  # reads the header only
                pass
        except OSError as error:
            raise DataError(f"{where} of {data}: cannot read the image {path}: {describe_error(error)}.") from error
        asked = question or row.get("question", default)
        if not isinstance(asked, str) or not asked.strip():
            raise DataError(f"{where} of {data}: the question {asked!r} is not a text. {_ROW}")
        yield path, asked


def _iter_scenes(limit: int) -> Iterator[tuple[Image.Image, str]]:
    draw_scene = require(
        "tokenprune_demo.scenes", "drawn images need another package (or pass a folder with --images)"
    ).draw_scene
    rng = np.random.default_rng(_SEED)
    for _ in range(limit):
        scene = draw_scene(rng)
        yield scene.image, scene.questions[int(rng.integers(len(scene.questions)))].text
