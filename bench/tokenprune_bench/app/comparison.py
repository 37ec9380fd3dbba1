# SPDX-License-Identifier: Apache-2.0
"""Ask one question with and without methods, and tell what each kept, answered and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tokenprune.errors import OptionError
from tokenprune.profiling import timing
from tokenprune.profiling.kept import keep_in_words
from tokenprune.profiling.model import Model
from tokenprune.profiling.patched import patched_by
from tokenprune.setting import Setting
from tokenprune.show import contact_sheet, side_by_side
from tokenprune.show.contact_sheet import PromptView
from tokenprune_bench.app.snippets import LONGEST

REPEATS = 3  # timed runs of each side
NEW_TOKENS = 4  # that a timed run makes


@dataclass(frozen=True)
class Asked:
    """The answer, timing and drawing of one setting.

    seen: what it kept and answered, with its `Stats`. drawing: of that, beside the whole. before: the answer without
    it. tokens: visual tokens without it. ttft: time to the first token, as of `timing.compare`.
    """

    setting: Setting
    seen: PromptView
    drawing: Image.Image
    before: str
    tokens: int
    ttft: dict[str, Any]

    @property
    def keep_in_words(self) -> str:
        """The keep, and of a stack what it leaves in all."""
        return keep_in_words(self.setting.keep, len(self.setting.names), self.kept / max(1, self.tokens))

    @property
    def kept(self) -> int:
        """Visual tokens that are left."""
        return int(self.seen.kept.sum())

    @property
    def faster(self) -> float:
        """Speed-up of the time to the first token over the unpatched model."""
        return 1 / self.ttft["ttft_ratio"]["p50"]


def checked(text: str, keep: float) -> Setting:
    """Return the setting that came from a page as a text.

    Raises OptionError for a text that is too long or names a file of this machine, UnknownMethodError, and BudgetError
    for a keep that is no share.
    """
    if len(text) > LONGEST:
        raise OptionError(f"a setting of {len(text)} characters is too long: {LONGEST} at most")
    setting = Setting.from_spec(text, keep)
    if files := setting.files:
        raise OptionError(f"{', '.join(files)}: the page opens no files; use Python for it")
    setting.checked().steps()
    return setting


def compare(
    subject: Model,
    images: Sequence[Image.Image],
    question: str,
    methods: Sequence[str | Setting],
    keep: float,
    step: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> list[Asked]:
    """Ask about images, or the frames of a video, unpatched and under each setting, and time both in turn.

    methods: settings, or texts on one line such as "divprune+fastv". step: called before each part with how many are
    done, of how many, and what comes. Raises OptionError for what cannot be asked, and what `patch` and the processor
    raise.
    """
    if not images:
        raise OptionError("there is no image: drop one, or take one of the examples")
    if not question.strip():
        raise OptionError("there is no question: ask one")
    if len(question) > LONGEST:
        raise OptionError(f"a question of {len(question)} characters is too long: {LONGEST} at most")
    settings = [one if isinstance(one, Setting) else checked(one, keep) for one in methods]
    if not settings:
        raise OptionError("there is no method: choose one")
    total = 1 + 2 * len(settings)
    shown = side_by_side.show(
        subject, images, question, settings, step=lambda name, done, _: step(done, total, f"{name}: answers")
    )
    asked = []
    for number, (setting, seen) in enumerate(zip(settings, shown.seen, strict=True)):
        step(1 + len(settings) + number, total, f"{setting.spec}: times")
        ttft = _timed(subject, images, question, setting)
        asked.append(Asked(setting, seen, shown.pair(number), shown.before, shown.tokens, ttft))
    return asked


def _timed(subject: Model, images: Sequence[Image.Image], question: str, setting: Setting) -> dict[str, Any]:
    video = len(images) > 1 and contact_sheet.as_video(subject, setting)

    def ask() -> dict[str, Any]:
        return subject.video_inputs(images, question) if video else subject.inputs([list(images)], [question])

    return timing.compare(subject, lambda: patched_by(subject, setting, video), ask, REPEATS, NEW_TOKENS)
