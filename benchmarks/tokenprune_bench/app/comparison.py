# SPDX-License-Identifier: Apache-2.0
"""Ask one question with and without methods: first what each keeps, then the answers, then the times."""

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
from tokenprune_bench.show import contact_sheet, side_by_side

REPEATS = 3  # timed runs of each side
NEW_TOKENS = 4  # that a timed run makes


@dataclass(frozen=True)
class PagePrompt:
    """One question about images, or the frames of a video, and the settings to compare, as texts.

    right: the answer, None: it is not known. example: the number of the example that they are. note: what of the file
    was left out.
    """

    images: Sequence[Image.Image]
    question: str
    methods: tuple[str, ...]
    right: str | None = None
    example: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Asked:
    """One setting: visual tokens without and with it, a JPEG of what it keeps, and once known its answer and the time
    to the first token, as of `timing.compare`."""

    setting: Setting
    tokens: int
    kept: int
    drawing: bytes
    stats: Stats
    answer: str | None = None
    ttft: dict[str, Any] | None = None

    @property
    def keep_text(self) -> str:
        """The keep, and of a stack what it leaves in all."""
        return format_keep(self.setting.keep, len(self.setting.names), self.kept / max(1, self.tokens))

    @property
    def name(self) -> str:
        """The setting as a title, "divprune 0.25"."""
        return f"{self.setting.to_text()} {self.keep_text}"


@dataclass(frozen=True)
class Comparison:
    """The comparison as far as it is known.

    original: a JPEG of what the model sees. before: the unpatched answer, None: not yet known. strips: the drawings are
    strips of frames.
    """

    prompt: PagePrompt
    original: bytes
    tokens: int
    asked: tuple[Asked, ...]
    strips: bool
    notes: tuple[str, ...] = ()
    before: str | None = None

    @property
    def complete(self) -> bool:
        """True once answers and times are known."""
        return all(one.ttft for one in self.asked)


def checked(text: str, keep: float) -> Setting:
    """Return the setting that came from a page or its address as a text.

    Raises OptionError for a text that is too long or names a file of this machine, UnknownMethodError, and BudgetError
    for a keep that is no share.
    """
    if len(text) > LONGEST:
        raise OptionError(f"a setting of {len(text)} characters is too long: {LONGEST} at most")
    setting = Setting.from_text(text, keep)
    if files := setting.files:
        raise OptionError(f"{', '.join(files)}: the page opens no files; use Python for it")
    setting.validate().steps()
    return setting


def settings_of(prompt: PagePrompt, keep: float) -> list[Setting]:
    """Return the settings of a prompt; raises OptionError for what cannot be asked, and what `checked` raises."""
    if not prompt.images:
        raise OptionError("there is no image: drop one, or take one of the examples")
    if not prompt.question.strip():
        raise OptionError("there is no question: ask one")
    if len(prompt.question) > LONGEST:
        raise OptionError(f"a question of {len(prompt.question)} characters is too long: {LONGEST} at most")
    if not prompt.methods:
        raise OptionError("there is no method: choose one")
    return [checked(text, keep) for text in prompt.methods]


def stages(
    subject: Model,
    prompt: PagePrompt,
    keep: float,
    still_wanted: Callable[[], None] = lambda: None,
    lock: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - holds nothing
) -> Iterator[Comparison]:
    """Yield what is known of a comparison as it grows: the kept tokens, the answers, the times of each method.

    still_wanted: called before each part; what it raises ends the run. lock: held while the model works, and
    never at a yield, where the model is unpatched. Raises what `settings_of`, `patch` and the processor raise.
    """
    settings = settings_of(prompt, keep)
    with lock:
        found = kept(subject, prompt, settings, still_wanted)
    yield found
    with lock:
        found = _shown(subject, prompt, settings, still_wanted, answered=True)
    yield found
    for number, one in enumerate(found.asked):
        with lock:
            timed = replace(one, ttft=_timed(subject, prompt, one.setting, still_wanted))
        found = replace(found, asked=(*found.asked[:number], timed, *found.asked[number + 1 :]))
        yield found


def kept(
    subject: Model, prompt: PagePrompt, settings: Sequence[Setting], still_wanted: Callable[[], None] = lambda: None
) -> Comparison:
    """Return what each setting keeps; the model makes one token, and no answer."""
    return _shown(replace(subject, max_new_tokens=1), prompt, settings, still_wanted, answered=False)


def _shown(
    subject: Model, prompt: PagePrompt, settings: Sequence[Setting], still_wanted: Callable[[], None], answered: bool
) -> Comparison:
    shown = side_by_side.show(
        subject, prompt.images, prompt.question, settings, step=lambda label, done, total: still_wanted()
    )
    asked = [
        Asked(
            setting, shown.tokens, int(seen.kept.sum()), _jpeg(panel.image), replace(seen.stats, cuts=[]),
            seen.answer if answered else None,
        )
        for setting, seen, panel in zip(settings, shown.seen, shown.kept_panels, strict=True)
    ]  # fmt: skip
    strips = max(len(seen.frames) for seen in shown.seen) > 1
    original, before = _jpeg(shown.panels[0].image), shown.before if answered else None
    return Comparison(prompt, original, shown.tokens, tuple(asked), strips, shown.notes, before)


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling=0)
    return file.getvalue()


def _timed(subject: Model, prompt: PagePrompt, setting: Setting, still_wanted: Callable[[], None]) -> dict[str, Any]:
    images, question = prompt.images, prompt.question
    video = len(images) > 1 and contact_sheet.as_video(subject, setting)

    def patched() -> AbstractContextManager[Any]:
        still_wanted()
        return patched_by(subject, setting, video)

    return timing.compare_times(
        subject, patched, lambda: contact_sheet.asked(subject, images, question, video), REPEATS, NEW_TOKENS
    )
