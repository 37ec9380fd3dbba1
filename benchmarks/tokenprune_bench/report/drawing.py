# SPDX-License-Identifier: Apache-2.0
"""Draw, at the end of a run and while the model is there, what each method keeps of a few of its questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import tokenprune
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.settings import Setting
from tokenprune_bench.errors import RunError
from tokenprune_bench.json_lines import read_lines, write_records
from tokenprune_bench.profiling.patched import build_escalation
from tokenprune_bench.report.samples import FILE, FOLDER, SCHEMA
from tokenprune_bench.results import UNPATCHED, get_scores
from tokenprune_bench.run_folder import PREDICTIONS
from tokenprune_bench.show import contact_sheet, draw
from tokenprune_bench.two_pass import ESCALATE

if TYPE_CHECKING:
    from tokenprune_bench.profiling.model import Model

COUNT = 4
SIDE, FRAME_SIDE = 448, 160  # pixels of the longer side of an image, and of a frame of a video
Step = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wanted:
    """The questions to draw. numbers: these; () for the `count` on which the methods disagree most."""

    count: int = COUNT
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, count: int | None, numbers: str, run: Path | None, here: bool = True) -> Wanted:
        """Read the options --samples and --sample; raises OptionError where they make no sense.

        here: whether the model is in this process, as drawing needs.
        """
        if not here:
            if count or numbers:
                raise OptionError("--samples and --sample draw with the model in this process: leave out --backend")
            return cls(0)
        if run is None:
            if count or numbers:
                raise OptionError("--samples and --sample draw into the folder of a run: name one with --run")
            return cls(0)
        try:
            chosen = tuple(dict.fromkeys(int(part) for part in numbers.split(",") if part.strip()))
        except ValueError:
            raise OptionError(f"--sample {numbers!r}: write the numbers of questions, such as 3,17") from None
        if chosen and count is not None:
            raise OptionError("--sample names the questions that --samples would choose: leave one of them out")
        return cls(len(chosen) or (COUNT if count is None else count), chosen)

    def check(self, questions: int) -> None:
        """Raise OptionError for a question that is not asked."""
        for number in self.numbers:
            if not 0 <= number < questions:
                raise OptionError(f"--sample {number}: the questions have the numbers 0 to {questions - 1}")


def draw_samples(
    run: Path,
    subject: Model,
    questions: Sequence[Any],
    records: Sequence[dict[str, Any]],
    wanted: Wanted,
    step: Step | None = None,
) -> None:
    """Draw questions of a finished run into its folder; what is drawn there already is left as it is.

    Every method that ran is drawn at one keep: the middle one, of two the lower. A method of which there is nothing to
    draw is noted with the reason. Raises RunError where the folder cannot be read or written.
    """
    keep, numbers = choose(records, wanted, [_seen(one, place) for place, one in enumerate(questions)])
    if keep is None:
        return
    ran = [record for record in records if record["record"] == "result" and record["keep"] == keep]
    methods = [(record, (record["seeds"] or [None])[0]) for record in ran if record["method"] != UNPATCHED]
    folder, step = run / FOLDER, step or (lambda label, done, total: None)
    answers = _answers(run / PREDICTIONS, keep, numbers)
    before = _before(folder)
    how = "named by --sample" if wanted.numbers else "on which the methods disagree most"
    data: dict[str, Any] = {"schema": SCHEMA, "keep": keep, "how": how, "samples": []}
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    total = len(numbers) * (1 + len(methods))
    for place, number in enumerate(numbers):
        entry = _entry(methods, answers, questions[number], number)
        known = before.get("samples", ()) if before.get("keep") == keep else ()
        entry = next((one for one in known if _is_drawn(folder, one, entry)), entry)
        data["samples"].append(entry)
        if "image" in entry:
            continue
        for index, (setting, each) in enumerate(_drawable(entry, methods)):
            step("samples", place * (1 + len(methods)) + index, total)
            _draw(folder, subject, questions[number], each, setting, f"{number}-{index}.webp")
        write_records(folder / FILE, [data], indent=1)  # question by question: a killed run goes on from here
    if data != before:
        write_records(folder / FILE, [data], indent=1)
    _tidy(folder, data)


def choose(
    records: Sequence[dict[str, Any]], wanted: Wanted, images: Sequence[Any] = ()
) -> tuple[float | int | None, list[int]]:
    """Return the keep at which the methods are drawn (None: there is nothing to draw), and the questions.

    Methods disagree most about a question where the variance of their scores is largest. Kinds take turns, as long as
    there is disagreement, and no image comes twice while there is another; ties go to the earlier question. images:
    what tells the images of one question from those of another; default: all differ.
    """
    results = [one for one in records if one["record"] == "result" and one["method"] != UNPATCHED]
    tokens: dict[float | int, list[float]] = {}
    for one in results:
        tokens.setdefault(one["keep"], []).append(one["stats"]["visual_tokens_out"])
    if not tokens or not wanted.count:
        return None, []
    keeps = sorted(tokens, key=lambda keep: -float(np.mean(tokens[keep])))
    keep = keeps[len(keeps) // 2]
    if wanted.numbers:
        return keep, list(wanted.numbers)
    scores = np.array([np.mean(get_scores(one), 0) for one in results if one["keep"] == keep])
    spread = scores.var(0).round(9)
    ranked = sorted(range(len(spread)), key=lambda number: (-spread[number], number))
    images, kinds, seen, chosen = images or range(len(ranked)), set(), set(), []
    for turns in (True, False):
        for number in ranked:
            kind, image = records[0]["kind_of_question"][number], images[number]
            if spread[number] > 0 and image not in seen and not (turns and kind in kinds):
                chosen.append(number)
                kinds.add(kind)
                seen.add(image)
    return keep, [*chosen, *(number for number in ranked if number not in chosen)][: wanted.count]


def _seen(question: Any, place: int) -> Any:
    """Return what tells the images, or the video, of a question from those of others."""
    if (number := getattr(question, "number", None)) is not None:
        return number
    files = filter(None, (*getattr(question, "sources", ()), getattr(question, "video_source", None)))
    return tuple((file.name, file.size) for file in files) or ("question", place)


def _entry(
    methods: Sequence[tuple[dict[str, Any], int | None]],
    answers: dict[tuple, dict[str, Any]],
    question: Any,
    number: int,
) -> dict[str, Any]:
    """Everything about a question but the drawings."""

    def entry_of(method: str, seed: int | None) -> dict[str, Any]:
        line = answers[method, seed, number]
        return {"method": method, "seed": seed, "prediction": line["prediction"], "score": line["score"]}

    entry = {
        "question": number,
        "kind": question.kind,
        "text": question.question,
        "answers": list(question.answers),
        **entry_of(UNPATCHED, None),
        "methods": [entry_of(record["method"], seed) for record, seed in methods],
    }
    return json.loads(json.dumps(entry))


def _drawable(
    entry: dict[str, Any], methods: Sequence[tuple[dict[str, Any], int | None]]
) -> list[tuple[Setting | None, dict[str, Any]]]:
    """Return the setting of the unpatched model and of each method, with the entry that its drawing fills."""
    pairs = zip(methods, entry["methods"], strict=True)
    return [(None, entry), *((_setting(record, seed), each) for (record, seed), each in pairs)]


def _setting(record: dict[str, Any], seed: int | None) -> Setting:
    """Return the setting of a record; at equal cost it stores one of its own."""
    if record["method"] == ESCALATE:
        return build_escalation(record["keep"])
    own = record.get("setting")
    setting = Setting.from_json(own) if own else Setting.from_text(record["method"], record["keep"])
    return setting.with_defaults({}, seed)


def _draw(
    folder: Path, subject: Model, question: Any, entry: dict[str, Any], setting: Setting | None, name: str
) -> None:
    """Draw what one method kept into a file, and fill its entry."""
    counted = "tokens" if setting is None else "kept"
    entry |= {counted: None, "image": None, "note": ""}
    try:
        if setting is None:
            image, entry[counted] = _whole(subject, question)
        else:
            image, entry[counted] = _look(subject, question, setting)
    except TokenPruneError as error:
        entry["note"] = str(error).splitlines()[0]
        return
    try:
        image.save(folder / name, quality=80)
    except OSError as error:
        raise _cannot_write(folder / name, error) from error
    entry["image"] = name


def _whole(subject: Model, question: Any) -> tuple[Image.Image, int]:
    """Return the images as the unpatched model sees them, and the number of their tokens."""
    frames = list(question.video if question.is_video else question.images)
    labels = getattr(question, "labels", ())
    inputs = contact_sheet.asked(subject, frames, question.question, question.is_video, labels)
    with suppress(UnsupportedSetupError):  # no grid: the methods are not drawn, and the images are shown as they are
        frames, _ = contact_sheet.seen_frames(subject, inputs, frames, question.is_video)
    sizes = draw.sizes_of(frames, _side(question))
    shown = [frame.resize(size) for frame, size in zip(frames, sizes, strict=True)]
    return contact_sheet.row(shown), subject.visual_tokens(inputs)


def _look(subject: Model, question: Any, setting: Setting) -> tuple[Image.Image, int]:
    methods = draw.check_drawable(setting)
    video, text = question.is_video, question.question
    if video and any(method.site is tokenprune.Site.PRE_ENCODER for method in methods):
        raise TokenPruneError("it acts on the pixels of the video, before there are tokens")
    frames = question.video if video else question.images
    labels = getattr(question, "labels", ())
    return contact_sheet.look(subject, frames, text, setting, video, _side(question), labels)


def _side(question: Any) -> int:
    """Return the pixels of the longer side of each drawing of a question, whatever the method."""
    return SIDE if len(question.images) == 1 and not question.is_video else FRAME_SIDE


def _answers(path: Path, keep: float | int, numbers: Sequence[int]) -> dict[tuple, dict[str, Any]]:
    """Return the lines of the predictions by method, seed and question."""
    lines = (line for line, _ in read_lines(path) if line["question"] in numbers)
    return {
        (line["method"], line["seed"], line["question"]): line
        for line in lines
        if line["method"] == UNPATCHED or line["keep"] == keep
    }


def _before(folder: Path) -> dict[str, Any]:
    """Return the drawings of an earlier run; a damaged file is drawn anew."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and data.get("schema") == SCHEMA else {}


def _is_drawn(folder: Path, known: Any, entry: dict[str, Any]) -> bool:
    """Return True if `known` is this entry with its drawings."""
    if not isinstance(known, dict) or not isinstance(known.get("methods"), list):
        return False
    for theirs, ours in zip([known, *known["methods"]], [entry, *entry["methods"]], strict=False):
        same = isinstance(theirs, dict) and all(theirs.get(key) == ours[key] for key in ours if key != "methods")
        if not same or "image" not in theirs or "note" not in theirs:
            return False
        if theirs["image"] is not None and not (folder / str(theirs["image"])).is_file():
            return False
    return len(known["methods"]) == len(entry["methods"])


def _tidy(folder: Path, data: dict[str, Any]) -> None:
    """Remove drawings that no question shows any more."""
    shown = {one["image"] for sample in data["samples"] for one in (sample, *sample["methods"])}
    for file in folder.glob("*.webp"):
        if file.name not in shown:
            try:
                file.unlink()
            except OSError as error:
                raise _cannot_write(file, error) from error


def _cannot_write(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write {path}: {error.strerror or error}; what was written before is kept")
