# SPDX-License-Identifier: Apache-2.0
"""Parse the text of a processor call: image placeholders and the question."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, PlaceholderMismatchError

# Tokens that chat templates write around a placeholder. Processors of other families add them later.
_FRAMES = (
    ("<|vision_start|>", "<|vision_end|>"),
    ("<|begin_of_image|>", "<|end_of_image|>"),
    ("<|image_start|>", "<|image_end|>"),
    ("<img>", "</img>"),
)


@dataclass(frozen=True)
class Prompt:
    """A text split at its images.

    Attributes:
        marks: Placeholder of each image, with the tokens around it.
        texts: Texts before, between and after the placeholders.
    """

    marks: tuple[str, ...]
    texts: tuple[str, ...]

    def write(self, kept: Collection[int]) -> str:
        """Return the text with only the placeholders of the images `kept`.

        Each dropped image takes the whitespace next to it. Words between images are kept.
        """
        parts = [self.texts[0]]
        between: list[str] = []
        for index, mark in enumerate(self.marks):
            if index in kept:
                words = [text for text in between if text.strip()]
                # Whitespace is only needed between two kept images.
                parts += words or (between[-1:] if len(parts) > 1 else [])
                parts.append(mark)
                between = []
            if index + 1 < len(self.marks):
                between.append(self.texts[index + 1])
        return "".join([*parts, *(text for text in between if text.strip()), *self.texts[1:][-1:]])

    @property
    def question(self) -> str:
        """The text after the last image."""
        return self.texts[-1]


class PromptReader:
    """Parses the prompts of one processor.

    Args:
        processor: A processor with a tokenizer and an `image_token`.
        user: Name of the method that reads the prompts, for errors.

    Raises:
        OptionError: If the tokenizer or the image token is missing.
    """

    def __init__(self, processor: Any, user: str) -> None:
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or getattr(processor, "tokenizer", None) is None:
            raise OptionError(
                f"{user} reads the prompt, and a {type(processor).__name__} cannot parse it. Pass the model's full "
                "processor (with a tokenizer and an image_token) as processor=."
            )
        self.token, self.processor = token, processor
        framed = [f"{re.escape(start)}{re.escape(token)}{re.escape(end)}" for start, end in _FRAMES]
        self._mark = re.compile("|".join([*framed, re.escape(token)]))

    def prompts(self, text: Any) -> list[Prompt]:
        """Parse the text argument of a call: a string or a list of strings."""
        return [self.prompt(part) for part in ([text] if isinstance(text, str) else text)]

    def prompt(self, text: str) -> Prompt:
        """Split a text at its images."""
        return Prompt(tuple(self._mark.findall(text)), tuple(self._mark.split(text)))

    def question(self, prompt: Prompt) -> str:
        """Return the question without special tokens."""
        text = prompt.question
        for token in self.processor.tokenizer.all_special_tokens:
            text = text.replace(token, " ")
        return " ".join(re.sub(r"<\|[^|<>]*\|>", " ", text).split())

    def rows(self, images: Any, prompts: Sequence[Prompt]) -> list[list[Any]]:
        """Return the images of each prompt, or raise PlaceholderMismatchError."""
        counts = [len(prompt.marks) for prompt in prompts]
        if is_nested(images):
            rows = [list(row) if isinstance(row, (list, tuple)) else [row] for row in images]
        else:
            is_batch = isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4
            flat = list(images) if is_batch else [images]
            ends = [sum(counts[: index + 1]) for index in range(len(counts))]
            rows = [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]
            rows[-1] += flat[ends[-1] :]
        if [len(row) for row in rows] != counts:
            raise PlaceholderMismatchError(
                f"The prompts have {counts} placeholders {self.token!r} for {[len(row) for row in rows]} images. "
                "Write one placeholder per image."
            )
        return rows


def is_nested(images: Any) -> bool:
    """Return whether `images` has one list per prompt."""
    return isinstance(images, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in images)


def build_class(
    processor: Any, around: Callable[[Any, Any], AbstractContextManager[tuple[Any, Any]]], names: dict[str, Any]
) -> type:
    """Return a subclass of a processor's class that changes the images and texts of its calls.

    Args:
        processor: The processor.
        around: Context manager for calls with images and text. It takes both, and yields their replacements.
        names: Additional attributes of the class.
    """
    base = type(processor)
    signature = inspect.signature(base.__call__)

    @functools.wraps(base.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        arguments = bound.arguments
        if arguments.get("images") is None or arguments.get("text") is None:
            return base.__call__(self, *args, **kwargs)
        with around(arguments["images"], arguments["text"]) as (arguments["images"], arguments["text"]):
            return base.__call__(*bound.args, **bound.kwargs)

    # As in resizing.py: a subclass of the same name does not appear in the repr or the saved files.
    attributes = {"__call__": call, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), attributes | names)
