# SPDX-License-Identifier: Apache-2.0
"""Event handlers of the page."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

import tokenprune
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune_bench.app import link, render, snippets
from tokenprune_bench.app.examples import Examples
from tokenprune_bench.app.loading import Loading
from tokenprune_bench.app.session import AppSession, Superseded
from tokenprune_bench.profiling.media import read_frames
from tokenprune_bench.profiling.pace import Pace

# These import transformers, which takes seconds and is only needed with a model.
if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Comparison, PagePrompt
    from tokenprune_bench.profiling.model import Model

FIRST, SECOND, KEEP, STEP = "divprune", "fastv", 0.25, 0.05
FRAMES = 8  # evenly spaced frames of a video
PATIENCE = 10  # seconds for drawing other keeps in advance
_ABOUT = (
    "Drop visual tokens, and compare answers and times. "
    "Clear patches are kept, dark patches are dropped, and patches of one color are merged."
)


class Handlers:
    """Event handlers of one page. Each visitor has a session, and all share the model and its lock."""

    def __init__(self, loading: Loading, examples: Examples, max_visual_tokens: int | None = None) -> None:
        self.loading, self.examples, self.max_visual_tokens = loading, examples, max_visual_tokens

    def wait(self) -> str:
        """Wait for the model and return the header of the page. `load_page` reads the inputs afterwards."""
        try:
            subject = self.loading.get()
        except TokenPruneError as error:
            return title(str(error))
        from tokenprune.models.model_config import describe_known_images

        known = f", which {describe_known_images(subject.name)}" if subject.describe_limits() else ""
        return title(f"`{subject.name}`{known}.")

    def load_page(
        self, file: str | None, question: str, first: str, second: str, keep: float, request: gr.Request
    ) -> list[Any]:
        """Return the initial values of the page: the first example, or the values of the address.

        Inputs that the visitor changed while the model loaded are kept.
        """
        try:
            subject = self.loading.get()
        except TokenPruneError:
            return [gr.skip()] * 6
        from tokenprune_bench.app.comparison import parse_setting
        from tokenprune_bench.show import contact_sheet

        video = contact_sheet.takes_video(subject)
        shown = self.examples.list_supported(video)
        try:
            shared = link.read(request.query_params, len(shown))
            for text in filter(None, (shared.first, shared.second)):
                parse_setting(text, shared.keep or KEEP)
        except TokenPruneError as error:
            gr.Warning(f"The address is ignored: {html.escape(str(error))}", duration=None)
            shared = link.Shared()
        asked = [gr.skip(), gr.skip()]
        if not file and not question.strip():  # the question of an example belongs to its image
            asked = [gr.skip(), shared.question or ""]
            if shown:
                example = shown[(shared.example or 1) - 1]
                asked = [str(example.file), example.question if shared.question is None else shared.question]
        names = drawable(video)
        return [
            *asked,
            _build_method_dropdown(names, first, FIRST, shared.first),
            _build_method_dropdown(["", *names], second, SECOND, shared.second),
            gr.skip() if keep != KEEP or not shared.keep else shared.keep,
            gr.Dataset(samples=samples(self.examples, video)) if shown else gr.skip(),
        ]

    def choose_example(self, index: int) -> tuple[str, str]:
        """Return file and question of an example."""
        example = self.examples.listed[index]
        return str(example.file), example.question

    def compare(
        self, session: AppSession, file: str | None, question: str, first: str | None, second: str | None, keep: float
    ) -> Iterator[list[Any]]:
        """Compare methods, and yield results as they arrive."""
        yield from self._compare(session, _request(file, question, first, second), round(keep, 4))

    def release_slider(
        self, session: AppSession, file: str | None, question: str, first: str | None, second: str | None, keep: float
    ) -> Iterator[list[Any]]:
        """Compare at another keep, unless the result is cached."""
        request, keep = _request(file, question, first, second), round(keep, 4)
        comparison = session.comparisons.get(keep) if session.request == request else None
        if comparison is None or not comparison.complete:
            yield from self._compare(session, request, keep)
        else:
            session.begin()
            yield _build_outputs(self.loading.get(), comparison, keep)

    def _compare(self, session: AppSession, request: tuple, keep: float) -> Iterator[list[Any]]:
        still_wanted = session.begin()
        if not self.loading.is_over:
            yield [render.waiting("the model is loading …"), *[gr.skip()] * 5]
        try:
            subject = self.loading.get()
            # Import only now: another thread may still be importing transformers.
            from tokenprune_bench.app.comparison import compare_in_stages

            if session.request != request or session.prompt is None:
                session.ask(request, self._prompt(subject, *request))
            prompt, pace = session.prompt, Pace()
            parts = ["answering", *(f"timing {name}" for name in prompt.methods), ""]
            pace.format_remaining(0, len(parts))
            for index, comparison in enumerate(
                compare_in_stages(subject, prompt, keep, still_wanted, self.loading.lock)
            ):
                still_wanted()
                session.comparisons[keep] = comparison
                left = pace.format_remaining(index + 1, len(parts))
                yield _build_outputs(subject, comparison, keep, ", ".join(filter(None, (parts[index], left))))
        except Superseded:
            yield [gr.skip()] * 6  # a generator without values clears the page
        except TokenPruneError as error:
            raise gr.Error(html.escape(str(error)), duration=None, print_exception=False) from error

    def _prompt(self, subject: Model, file: str | None, question: str, methods: tuple[str, ...]) -> PagePrompt:
        """Return the prompt, with as many frames of a video as fit the model's context."""
        from tokenprune_bench.app.comparison import PagePrompt, parse_settings
        from tokenprune_bench.show import contact_sheet, layout

        # With a budget, JPEG files are decoded at the scale that the processor needs.
        find_largest = None if self.max_visual_tokens is None else layout.find_largest
        read = partial(read_frames, [Path(file)] if file else [], find_largest=find_largest)
        frames = read(FRAMES)
        right, example = (
            (self.examples.find_answer(file, question), self.examples.find_number(file)) if file else (None, None)
        )
        prompt = PagePrompt(frames, question, methods, right, example, max_visual_tokens=self.max_visual_tokens)
        settings = parse_settings(prompt, KEEP)
        if len(frames) == 1:
            return prompt
        if not contact_sheet.takes_video(subject):
            raise OptionError(f"{subject.name} does not support videos. Drop an image, or pass another --model.")
        frames, note = contact_sheet.fit_frames(subject, read, FRAMES, question, settings[0])
        return replace(prompt, images=frames, note=note)

    def move_slider(
        self, session: AppSession, file: str | None, question: str, first: str | None, second: str | None, keep: float
    ) -> list[Any]:
        """Return the cached drawing at a keep. The model does not run."""
        is_current = session.request == _request(file, question, first, second)
        comparison = session.comparisons.get(round(keep, 4)) if is_current else None
        if comparison is None:
            return [render.waiting(f"release the slider to compare at keep {keep:g}"), gr.skip()]
        status = "" if comparison.complete else "release the slider for answers and times"
        return [render.head(comparison, round(keep, 4), status), render.panels(comparison)]

    def draw_ahead(self, session: AppSession, keep: float) -> None:
        """Draw other keeps, the nearest first, until a new request or a timeout."""
        still_wanted, end = session.latest(), time.monotonic() + PATIENCE
        comparison = session.comparisons.get(round(keep, 4))
        if comparison is None or not comparison.complete:  # another request is running
            return
        from tokenprune_bench.app.comparison import draw_kept, parse_settings

        stops = {round(STEP * count, 4) for count in range(1, round(1 / STEP) + 1)} - set(session.comparisons)
        for stop in sorted(stops, key=lambda stop: abs(stop - keep)):
            try:
                if time.monotonic() > end:
                    return
                with self.loading.lock:
                    settings = parse_settings(comparison.prompt, stop)
                    ahead = draw_kept(self.loading.get(), comparison.prompt, settings, still_wanted)
                still_wanted()
                session.comparisons[stop] = ahead
            except Superseded:
                return
            except TokenPruneError:  # a method that does not support this keep
                continue


def title(model: str) -> str:
    """Return the header of the page."""
    return f"# tokenprune\n{_ABOUT} Model: {model}"


def drawable(video: bool) -> list[str]:
    """Return the names of the methods that can be drawn."""
    infos = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    return [
        info.name
        for info in infos
        if not issubclass(info.cls, ImageChooser) and info.site is not tokenprune.Site.ATTENTION
        and (video or "frames" not in info.needs)
    ]  # fmt: skip


def samples(examples: Examples, video: bool) -> list[list[dict[str, Any]]]:
    """Return the examples in the format of gradio. `video` is True for models with video input."""
    return [[{"text": example.question, "files": [str(example.file)]}] for example in examples.list_supported(video)]


def _build_method_dropdown(names: list[str], chosen: str | None, default: str, shared: str | None) -> gr.Dropdown:
    """Return the list of methods, with the address's method selected unless the visitor chose another."""
    return (
        gr.Dropdown(choices=names) if chosen != default or shared is None else gr.Dropdown(choices=names, value=shared)
    )


def _request(file: str | None, question: str, *methods: str | None) -> tuple:
    return file, question, tuple(text.strip() for text in methods if text and text.strip())


def _build_outputs(subject: Model, comparison: Comparison, keep: float, status: str = "") -> list[Any]:
    """Return all outputs of a comparison."""
    settings, name = [result.setting for result in comparison.asked], subject.name.partition(" ")[0]
    lines: Sequence[str] = (
        snippets.python(*settings),
        "\n# or\n".join(map(snippets.vllm, settings)),
        "\n".join(snippets.bench(setting, name) for setting in settings),
    )
    shown = (
        render.head(comparison, keep, status and f"{status} …"),
        render.panels(comparison),
        render.details(comparison),
    )
    return [*shown, *lines]
