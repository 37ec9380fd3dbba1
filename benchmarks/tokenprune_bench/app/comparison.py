# SPDX-License-Identifier: Apache-2.0
"""Ask one question with and without methods: kept tokens first, then answers, then times."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from tokenprune.errors import OptionError
from tokenprune.settings import Setting
from tokenprune.statistics import Stats
from tokenprune_bench.app.snippets import LONGEST
from tokenprune_bench.profiling import timing
from tokenprune_bench.profiling.kept_tokens import format_keep
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import patched_by
from tokenprune_bench.profiling.photo import Photo
from tokenprune_bench.show import contact_sheet, side_by_side

REPEATS = 3  # timed runs, unpatched and patched
NEW_TOKENS = 4  # generated tokens of a timed run


@dataclass(frozen=True)
class PagePrompt:
    """A question about images or frames of a video, and the methods to compare.

    Attributes:
        images: Images, or frames of a video.
        question: The question.
        methods: Settings as text.
        right: Correct answer, or None if unknown.
        example: Number of the example, or None for a user's file.
        note: Note about frames that were left out.
        max_visual_tokens: Maximum number of visual tokens per image before the methods, or None.
    """

    images: Sequence[Image.Image | Photo]
    question: str
    methods: tuple[str, ...]
    right: str | None = None
    example: int | None = None
    note: str | None = None
    max_visual_tokens: int | None = None


@dataclass(frozen=True)
class SettingResult:
    """Result of one setting.

    Attributes:
        setting: The setting.
        tokens: Visual tokens of the unpatched model.
        kept: Kept visual tokens.
        drawing: JPEG of the kept tokens.
        stats: Statistics of the call.
        answer: The answer, or None if not known yet.
        ttft: Result of `timing.compare_times`, or None if not known yet.
    """

    setting: Setting
    tokens: int
    kept: int
    drawing: bytes
    stats: Stats
    answer: str | None = None
    ttft: dict[str, Any] | None = None

    @property
    def keep_text(self) -> str:
        """The keep, and for a stack the total share."""
        return format_keep(self.setting.keep, len(self.setting.names), self.kept / max(1, self.tokens))

    @property
    def name(self) -> str:
        """Title of the setting, for example "divprune 0.25"."""
        return f"{self.setting.to_text()} {self.keep_text}"


@dataclass(frozen=True)
class Comparison:
    """Results so far.

    Attributes:
        prompt: The prompt.
        original: JPEG of the image as the model sees it.
        tokens: Visual tokens of the unpatched model.
        asked: Results of the settings.
        strips: Whether drawings are strips of frames.
        notes: Notes about the drawings.
        before: Answer of the unpatched model, or None if not known yet.
    """

    prompt: PagePrompt
    original: bytes
    tokens: int
    asked: tuple[SettingResult, ...]
    strips: bool
    notes: tuple[str, ...] = ()
    before: str | None = None

    @property
    def complete(self) -> bool:
        """True if answers and times are known."""
        return all(result.ttft for result in self.asked)


def parse_setting(text: str, keep: float, max_visual_tokens: int | None = None) -> Setting:
    """Parse a setting from a page or its address.

    Raises:
        OptionError: If the text is too long or names a local file, or a method also resizes images.
        UnknownMethodError: If a method is not known.
        BudgetError: If the keep is not valid.
    """
    if len(text) > LONGEST:
        raise OptionError(f"The setting has {len(text)} characters. The maximum is {LONGEST}.")
    setting = replace(Setting.from_text(text, keep), max_visual_tokens=max_visual_tokens)
    if files := setting.files:
        raise OptionError(f"The page does not open files ({', '.join(files)}). Use Python instead.")
    setting.validate().steps()
    return setting


def parse_settings(prompt: PagePrompt, keep: float) -> list[Setting]:
    """Return the settings of a prompt.

    Raises:
        OptionError: If the image, the question or the method is missing or not valid. Also raises the errors of
            `parse_setting`.
    """
    if not prompt.images:
        raise OptionError("The image is missing. Drop an image, or choose an example.")
    if not prompt.question.strip():
        raise OptionError("The question is missing. Type a question.")
    if len(prompt.question) > LONGEST:
        raise OptionError(f"The question has {len(prompt.question)} characters. The maximum is {LONGEST}.")
    if not prompt.methods:
        raise OptionError("The method is missing. Choose a method.")
    return [parse_setting(text, keep, prompt.max_visual_tokens) for text in prompt.methods]


def compare_in_stages(
    subject: Model,
    prompt: PagePrompt,
    keep: float,
    still_wanted: Callable[[], None] = lambda: None,
    lock: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - nullcontext is stateless
) -> Iterator[Comparison]:
    """Yield the comparison as results arrive: kept tokens, answers, then the times of each method.

    Args:
        subject: The model.
        prompt: The prompt.
        keep: Keep of all methods.
        still_wanted: Called before each step. An exception stops the comparison.
        lock: Held while the model is in use. It is released at each yield, when the model is unpatched.

    Raises:
        TokenPruneError: The errors of `parse_settings` and `patch`.
    """
    settings = parse_settings(prompt, keep)
    with lock:
        comparison = draw_kept(subject, prompt, settings, still_wanted)
    yield comparison
    with lock:
        comparison = _build_comparison(subject, prompt, settings, still_wanted, answered=True)
    yield comparison
    for index, result in enumerate(comparison.asked):
        with lock:
            timed = replace(result, ttft=_measure_times(subject, prompt, result.setting, still_wanted))
        asked = (*comparison.asked[:index], timed, *comparison.asked[index + 1 :])
        comparison = replace(comparison, asked=asked)
        yield comparison


def draw_kept(
    subject: Model, prompt: PagePrompt, settings: Sequence[Setting], still_wanted: Callable[[], None] = lambda: None
) -> Comparison:
    """Return the kept tokens of each setting. The model generates one token and no answer."""
    return _build_comparison(replace(subject, max_new_tokens=1), prompt, settings, still_wanted, answered=False)


def _build_comparison(
    subject: Model, prompt: PagePrompt, settings: Sequence[Setting], still_wanted: Callable[[], None], answered: bool
) -> Comparison:
    shown = side_by_side.show(
        subject, prompt.images, prompt.question, settings, step=lambda label, done, total: still_wanted()
    )
    asked = [
        SettingResult(
            setting, shown.tokens, int(view.kept.sum()), _encode_jpeg(panel.image), replace(view.stats, cuts=[]),
            view.answer if answered else None,
        )
        for setting, view, panel in zip(settings, shown.seen, shown.kept_panels, strict=True)
    ]  # fmt: skip
    strips = max(len(view.frames) for view in shown.seen) > 1
    original, before = _encode_jpeg(shown.panels[0].image), shown.before if answered else None
    return Comparison(prompt, original, shown.tokens, tuple(asked), strips, shown.notes, before)


def _encode_jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling=0)
    return file.getvalue()


def _measure_times(
    subject: Model, prompt: PagePrompt, setting: Setting, still_wanted: Callable[[], None]
) -> dict[str, Any]:
    images, question = prompt.images, prompt.question
    video = len(images) > 1 and contact_sheet.is_video_input(subject, setting)

    def patched() -> AbstractContextManager[Any]:
        still_wanted()
        return patched_by(subject, setting, video)

    return timing.compare_times(
        subject, patched, lambda: contact_sheet.build_inputs(subject, images, question, video), REPEATS, NEW_TOKENS
    )
