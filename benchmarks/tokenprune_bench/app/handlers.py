# SPDX-License-Identifier: Apache-2.0
"""Handlers of the page: for its opening, a question, and a moved slider."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
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

# Not needed before the model is there: these import transformers' models, which takes seconds.
if TYPE_CHECKING:
    from tokenprune_bench.app.comparison import Comparison, PagePrompt
    from tokenprune_bench.profiling.model import Model

FIRST, SECOND, KEEP, STEP = "divprune", "fastv", 0.25, 0.05
FRAMES = 8  # of a video, evenly chosen
PATIENCE = 10  # seconds that the page spends on drawing other keeps ahead of the slider
_ABOUT = (
    "Drop visual tokens, and see what that does to the answer and the time. "
    "Clear patches stay, dark ones are dropped, those of one colour are merged."
)


class Handlers:
    """The handlers of one page. Sessions belong to a visitor each; the model, after its lock, to all."""

    def __init__(self, loading: Loading, examples: Examples) -> None:
        self.loading, self.examples = loading, examples

    def wait(self) -> str:
        """Wait for the model, and return the top of the page. What the page holds is read after that: see `loaded`."""
        try:
            subject = self.loading.get()
        except TokenPruneError as error:
            return title(str(error))
        from tokenprune.models.model_config import describe_known_images

        known = f", which {describe_known_images(subject.name)}" if subject.describe_limits() else ""
        return title(f"`{subject.name}`{known}.")

    def loaded(
        self, file: str | None, question: str, first: str, second: str, keep: float, request: gr.Request
    ) -> list[Any]:
        """Return what the page shows of a model that is there: the first example, or what its address says. What the
        visitor has dropped, typed or chosen meanwhile stays."""
        try:
            subject = self.loading.get()
        except TokenPruneError:
            return [gr.skip()] * 6
        from tokenprune_bench.app.comparison import checked
        from tokenprune_bench.show import contact_sheet

        video = contact_sheet.takes_video(subject)
        shown = self.examples.shown(video)
        try:
            said = link.read(request.query_params, len(shown))
            for text in filter(None, (said.first, said.second)):
                checked(text, said.keep or KEEP)
        except TokenPruneError as error:
            gr.Warning(f"The address is left aside: {html.escape(str(error))}", duration=None)
            said = link.Shared()
        asked = [gr.skip(), gr.skip()]
        if not file and not question.strip():  # an example's question is about its own image
            asked = [gr.skip(), said.question or ""]
            if shown:
                one = shown[(said.example or 1) - 1]
                asked = [str(one.file), one.question if said.question is None else said.question]
        names = drawable(video)
        return [
            *asked, _methods(names, first, FIRST, said.first), _methods(["", *names], second, SECOND, said.second),
            gr.skip() if keep != KEEP or not said.keep else said.keep,
            gr.Dataset(samples=samples(self.examples, video)) if shown else gr.skip(),
        ]  # fmt: skip

    def chosen(self, index: int) -> tuple[str, str]:
        """Return file and question of an example."""
        one = self.examples.listed[index]
        return str(one.file), one.question

    def compare(
        self, session: AppSession, file: str | None, question: str, first: str | None, second: str | None, keep: float
    ) -> Iterator[list[Any]]:
        """Compare, and show what is known as soon as it is."""
        yield from self._compare(session, _wanted(file, question, first, second), round(keep, 4))

    def released(
        self, session: AppSession, file: str | None, question: str, first: str | None, second: str | None, keep: float
    ) -> Iterator[list[Any]]:
        """Compare at another keep, unless it was compared already."""
        wanted, keep = _wanted(file, question, first, second), round(keep, 4)
        found = session.at.get(keep) if session.wanted == wanted else None
        if found is None or not found.complete:
            yield from self._compare(session, wanted, keep)
        else:
            session.begin()
            yield _all(self.loading.get(), found, keep)

    def _compare(self, session: AppSession, wanted: tuple, keep: float) -> Iterator[list[Any]]:
        still_wanted = session.begin()
        if not self.loading.over:
            yield [render.waiting("the model is loading …"), *[gr.skip()] * 5]
        try:
            subject = self.loading.get()
            # Not before: while another thread imports transformers for the model, this would meet half of it.
            from tokenprune_bench.app.comparison import stages

            if session.wanted != wanted or session.prompt is None:
                session.ask(wanted, self._prompt(subject, *wanted))
            prompt, pace = session.prompt, Pace()
            parts = ["answering", *(f"timing {name}" for name in prompt.methods), ""]
            pace.format_remaining(0, len(parts))
            for place, found in enumerate(stages(subject, prompt, keep, still_wanted, self.loading.lock)):
                still_wanted()
                session.at[keep] = found
                left = pace.format_remaining(place + 1, len(parts))
                yield _all(subject, found, keep, ", ".join(filter(None, (parts[place], left))))
        except Superseded:
            yield [gr.skip()] * 6  # a generator that ends without a value empties the page
        except TokenPruneError as error:
            raise gr.Error(html.escape(str(error)), duration=None, print_exception=False) from error

    def _prompt(self, subject: Model, file: str | None, question: str, methods: tuple[str, ...]) -> PagePrompt:
        """Return the prompt, with as many frames of a video as fit into the model's context."""
        from tokenprune_bench.app.comparison import PagePrompt, settings_of
        from tokenprune_bench.show import contact_sheet

        read = partial(read_frames, [Path(file)] if file else [])
        frames = read(FRAMES)
        right, example = (self.examples.answer(file, question), self.examples.number(file)) if file else (None, None)
        prompt = PagePrompt(frames, question, methods, right, example)
        settings = settings_of(prompt, KEEP)
        if len(frames) == 1:
            return prompt
        if not contact_sheet.takes_video(subject):
            raise OptionError(f"{subject.name} takes no videos: drop an image, or name a model that does with --model")
        frames, note = contact_sheet.fitting(subject, read, FRAMES, question, settings[0])
        return PagePrompt(frames, question, methods, right, example, note)

    def slid(
        self, session: AppSession, file: str | None, question: str, first: str | None, second: str | None, keep: float
    ) -> list[Any]:
        """Return what was drawn at a keep; the model is not asked."""
        found = session.at.get(round(keep, 4)) if session.wanted == _wanted(file, question, first, second) else None
        if found is None:
            return [render.waiting(f"let go of the slider to see what {keep:g} keeps"), gr.skip()]
        status = "" if found.complete else "let go of the slider for answers and times"
        return [render.head(found, round(keep, 4), status), render.panels(found)]

    def draw_ahead(self, session: AppSession, keep: float) -> None:
        """Draw what other keeps leave, the nearest first, until the visitor asks again or it takes too long."""
        still_wanted, end, found = session.latest(), time.monotonic() + PATIENCE, session.at.get(round(keep, 4))
        if found is None or not found.complete:  # another request is on its way
            return
        from tokenprune_bench.app.comparison import kept, settings_of

        stops = {round(STEP * number, 4) for number in range(1, round(1 / STEP) + 1)} - set(session.at)
        for stop in sorted(stops, key=lambda stop: abs(stop - keep)):
            try:
                if time.monotonic() > end:
                    return
                with self.loading.lock:
                    ahead = kept(self.loading.get(), found.prompt, settings_of(found.prompt, stop), still_wanted)
                still_wanted()
                session.at[stop] = ahead
            except Superseded:
                return
            except TokenPruneError:  # a method that does not take this keep
                continue


def title(model: str) -> str:
    """Return the top of the page. model: what is to be said of it."""
    return f"# tokenprune\n{_ABOUT} Model: {model}"


def drawable(video: bool) -> list[str]:
    """Return the names of the methods with something to draw."""
    infos = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    return [
        info.name
        for info in infos
        if not issubclass(info.cls, ImageChooser) and info.site is not tokenprune.Site.ATTENTION
        and (video or "frames" not in info.needs)
    ]  # fmt: skip


def samples(examples: Examples, video: bool) -> list[list[dict[str, Any]]]:
    """Return the examples as the page lists them. video: whether the model takes videos."""
    return [[{"text": one.question, "files": [str(one.file)]}] for one in examples.shown(video)]


def _methods(names: list[str], chosen: str | None, default: str, said: str | None) -> gr.Dropdown:
    """Return the list of methods, with the one that the address says unless another was chosen."""
    return gr.Dropdown(choices=names) if chosen != default or said is None else gr.Dropdown(choices=names, value=said)


def _wanted(file: str | None, question: str, *methods: str | None) -> tuple:
    return file, question, tuple(text.strip() for text in methods if text and text.strip())


def _all(subject: Model, found: Comparison, keep: float, status: str = "") -> list[Any]:
    """Return what the page shows of a comparison."""
    settings, name = [one.setting for one in found.asked], subject.name.partition(" ")[0]
    lines: Sequence[str] = (
        snippets.python(*settings),
        "\n# or\n".join(map(snippets.vllm, settings)),
        "\n".join(snippets.bench(setting, name) for setting in settings),
    )
    shown = render.head(found, keep, status and f"{status} …"), render.panels(found), render.details(found)
    return [*shown, *lines]
