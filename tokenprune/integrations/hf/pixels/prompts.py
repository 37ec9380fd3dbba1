# SPDX-License-Identifier: Apache-2.0
"""Prompts as callers hand them to a processor: where the images stand in the text, and which text is the question."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, PlaceholderMismatchError

# Tokens that chat templates put around a placeholder; other families' processors add theirs later.
_FRAMES = (
    ("<|vision_start|>", "<|vision_end|>"),
    ("<|begin_of_image|>", "<|end_of_image|>"),
    ("<|image_start|>", "<|image_end|>"),
    ("<img>", "</img>"),
)


@dataclass(frozen=True)
class Prompt:
    """One text, cut at its images. marks: the placeholder of each image, with its frame; texts: what stands before,
    between and after them (one more than marks)."""

    marks: tuple[str, ...]
    texts: tuple[str, ...]

    def keeping(self, kept: Collection[int]) -> str:
        """Return the text as if it had been written with the images `kept` only.

        Blanks between two images go with one of them; words between images stay.
        """
        parts = [self.texts[0]]
        between: list[str] = []
        for number, mark in enumerate(self.marks):
            if number in kept:
                words = [text for text in between if text.strip()]
                # After the first text there is nothing to keep apart, so blanks only stay between kept images.
                parts += words or (between[-1:] if len(parts) > 1 else [])
                parts.append(mark)
                between = []
            if number + 1 < len(self.marks):
                between.append(self.texts[number + 1])
        return "".join([*parts, *(text for text in between if text.strip()), *self.texts[1:][-1:]])

    @property
    def question(self) -> str:
        """The text after the last image."""
        return self.texts[-1]


class PromptReader:
    """Reads the prompts of one processor; raises OptionError for one that does not say how it marks images."""

    def __init__(self, processor: Any, wanted_by: str) -> None:
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or getattr(processor, "tokenizer", None) is None:
            raise OptionError(
                f"{wanted_by} reads the prompt: pass the model's processor, the whole of it (with a tokenizer and an "
                f"image_token), as processor=; this is a {type(processor).__name__}"
            )
        self.token, self.processor = token, processor
        framed = [f"{re.escape(start)}{re.escape(token)}{re.escape(end)}" for start, end in _FRAMES]
        self._mark = re.compile("|".join([*framed, re.escape(token)]))

    def prompts(self, text: Any) -> list[Prompt]:
        """Return the prompts of a call's text."""
        return [self.prompt(one) for one in ([text] if isinstance(text, str) else text)]

    def prompt(self, text: str) -> Prompt:
        """Cut a text at its images."""
        return Prompt(tuple(self._mark.findall(text)), tuple(self._mark.split(text)))

    def question(self, prompt: Prompt) -> str:
        """Return the question without special tokens."""
        text = prompt.question
        for token in self.processor.tokenizer.all_special_tokens:
            text = text.replace(token, " ")
        return " ".join(re.sub(r"<\|[^|<>]*\|>", " ", text).split())

    def rows(self, images: Any, prompts: Sequence[Prompt]) -> list[list[Any]]:
        """Return the images of each prompt; raises PlaceholderMismatchError where it has not one for each."""
        counts = [len(prompt.marks) for prompt in prompts]
        if is_nested(images):
            rows = [list(row) if isinstance(row, (list, tuple)) else [row] for row in images]
        else:
            many = isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4
            flat = list(images) if many else [images]
            ends = [sum(counts[: number + 1]) for number in range(len(counts))]
            rows = [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]
            rows[-1] += flat[ends[-1] :]
        if [len(row) for row in rows] != counts:
            raise PlaceholderMismatchError(
                f"the prompts hold {counts} placeholders {self.token!r} for {[len(row) for row in rows]} images: "
                "write one for each image"
            )
        return rows


def is_nested(images: Any) -> bool:
    """Return True if images come as one list for each prompt."""
    return isinstance(images, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in images)


def intercepted(
    processor: Any, around: Callable[[Any, Any], AbstractContextManager[tuple[Any, Any]]], names: dict[str, Any]
) -> type:
    """Return a subclass of a processor's class that puts `around` around the calls that have both images and text;
    it takes them, and yields what the processor is to take instead. names: more attributes of the class.
    """
    before = type(processor)
    signature = inspect.signature(before.__call__)

    @functools.wraps(before.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if given.get("images") is None or given.get("text") is None:
            return before.__call__(self, *args, **kwargs)
        with around(given["images"], given["text"]) as (given["images"], given["text"]):
            return before.__call__(*bound.args, **bound.kwargs)

    # As in resizing.py: a subclass of the same name shows in nothing that the processor prints or saves.
    own = {"__call__": call, "__module__": before.__module__, "__doc__": before.__doc__}
    return type(before.__name__, (before,), own | names)
