# SPDX-License-Identifier: Apache-2.0
"""Draw the tokens that each method keeps for some questions, at the end of a run while the model is loaded."""

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
class SampleRequest:
    """Questions to draw.

    Attributes:
        count: Number of questions with the largest disagreement between methods.
        indices: Indices of the questions to draw instead.
    """

    count: int = COUNT
    indices: tuple[int, ...] = ()

    @classmethod
    def from_options(cls, count: int | None, indices: str, run: Path | None, is_local: bool = True) -> SampleRequest:
        """Parse the options --samples and --sample.

        Args:
            count: Value of --samples.
            indices: Value of --sample.
            run: Folder of the run.
            is_local: Whether the model runs in this process, which drawing requires.

        Raises:
            OptionError: If the options conflict.
        """
        if not is_local:
            if count or indices:
                raise OptionError("--samples and --sample need the model in this process. Leave out --backend.")
            return cls(0)
        if run is None:
            if count or indices:
                raise OptionError("--samples and --sample draw into the folder of a run. Pass --run.")
            return cls(0)
        try:
            chosen = tuple(dict.fromkeys(int(part) for part in indices.split(",") if part.strip()))
        except ValueError:
            raise OptionError(f"--sample {indices!r}: pass indices of questions, such as 3,17") from None
        if chosen and count is not None:
            raise OptionError("--sample and --samples conflict. Pass only one.")
        return cls(len(chosen) or (COUNT if count is None else count), chosen)

    def check(self, questions: int) -> None:
        """Raise OptionError if an index is out of range."""
        for index in self.indices:
            if not 0 <= index < questions:
                raise OptionError(f"--sample {index} is out of range. Pass indices from 0 to {questions - 1}.")


def draw_samples(
    run: Path,
    subject: Model,
    questions: Sequence[Any],
    records: Sequence[dict[str, Any]],
    request: SampleRequest,
    step: Step | None = None,
) -> None:
    """Draw questions of a finished run into its folder. Existing drawings are kept.

    All methods are drawn at the median keep. If a method cannot be drawn, its entry stores the reason.

    Args:
        run: Folder of the run.
        subject: The model.
        questions: Questions of the run.
        records: Records of the run, the header first.
        request: Questions to draw.
        step: Progress callback.

    Raises:
        RunError: If the folder cannot be read or written.
    """
    keep, indices = choose_questions(
        records, request, [_get_image_key(question, index) for index, question in enumerate(questions)]
    )
    if keep is None:
        return
    ran = [record for record in records if record["record"] == "result" and record["keep"] == keep]
    methods = [(record, (record["seeds"] or [None])[0]) for record in ran if record["method"] != UNPATCHED]
    folder, step = run / FOLDER, step or (lambda label, done, total: None)
    answers = _read_answers(run / PREDICTIONS, keep, indices)
    before = _read_earlier_entries(folder)
    how = "chosen with --sample" if request.indices else "with the largest disagreement between methods"
    data: dict[str, Any] = {"schema": SCHEMA, "keep": keep, "how": how, "samples": []}
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _build_write_error(folder, error) from error
    total = len(indices) * (1 + len(methods))
    for position, index in enumerate(indices):
        entry = _build_entry(methods, answers, questions[index], index)
        known = before.get("samples", ()) if before.get("keep") == keep else ()
        entry = next((sample for sample in known if _is_drawn(folder, sample, entry)), entry)
        data["samples"].append(entry)
        if "image" in entry:
            continue
        for drawing, (setting, each) in enumerate(_pair_settings(entry, methods)):
            step("samples", position * (1 + len(methods)) + drawing, total)
            _draw(folder, subject, questions[index], each, setting, f"{index}-{drawing}.webp")
        write_records(folder / FILE, [data], indent=1)  # after each question, so that a stopped run continues here
    if data != before:
        write_records(folder / FILE, [data], indent=1)
    _remove_unused_drawings(folder, data)


def choose_questions(
    records: Sequence[dict[str, Any]], request: SampleRequest, images: Sequence[Any] = ()
) -> tuple[float | int | None, list[int]]:
    """Choose a keep and the questions to draw.

    Questions are ranked by the variance of their scores over methods. First each kind and each image is used once, then
    the ranking fills the rest. Ties go to the earlier question.

    Args:
        records: Records of the run, the header first.
        request: Requested questions.
        images: A key per question that identifies its images. Default: all differ.

    Returns:
        The keep, or None without methods to draw, and the indices of the questions.
    """
    results = [record for record in records if record["record"] == "result" and record["method"] != UNPATCHED]
    tokens: dict[float | int, list[float]] = {}
    for record in results:
        tokens.setdefault(record["keep"], []).append(record["stats"]["visual_tokens_out"])
    if not tokens or not request.count:
        return None, []
    keeps = sorted(tokens, key=lambda keep: -float(np.mean(tokens[keep])))
    keep = keeps[len(keeps) // 2]
    if request.indices:
        return keep, list(request.indices)
    scores = np.array([np.mean(get_scores(record), 0) for record in results if record["keep"] == keep])
    spread = scores.var(0).round(9)
    ranked = sorted(range(len(spread)), key=lambda index: (-spread[index], index))
    images, kinds, used_images, chosen = images or range(len(ranked)), set(), set(), []
    for turns in (True, False):
        for index in ranked:
            kind, image = records[0]["kind_of_question"][index], images[index]
            if spread[index] > 0 and image not in used_images and not (turns and kind in kinds):
                chosen.append(index)
                kinds.add(kind)
                used_images.add(image)
    return keep, [*chosen, *(index for index in ranked if index not in chosen)][: request.count]


def _get_image_key(question: Any, index: int) -> Any:
    """Return a key that identifies the images or the video of a question."""
    if (image := getattr(question, "number", None)) is not None:
        return image
    files = filter(None, (*getattr(question, "sources", ()), getattr(question, "video_source", None)))
    return tuple((file.name, file.size) for file in files) or ("question", index)


def _build_entry(
    methods: Sequence[tuple[dict[str, Any], int | None]],
    answers: dict[tuple, dict[str, Any]],
    question: Any,
    index: int,
) -> dict[str, Any]:
    """Return the entry of a question without drawings."""

    def build_answer(method: str, seed: int | None) -> dict[str, Any]:
        line = answers[method, seed, index]
        return {"method": method, "seed": seed, "prediction": line["prediction"], "score": line["score"]}

    entry = {
        "question": index,
        "kind": question.kind,
        "text": question.question,
        "answers": list(question.answers),
        **build_answer(UNPATCHED, None),
        "methods": [build_answer(record["method"], seed) for record, seed in methods],
    }
    return json.loads(json.dumps(entry))


def _pair_settings(
    entry: dict[str, Any], methods: Sequence[tuple[dict[str, Any], int | None]]
) -> list[tuple[Setting | None, dict[str, Any]]]:
    """Return pairs of a setting (None for unpatched) and the entry that stores its drawing."""
    pairs = zip(methods, entry["methods"], strict=True)
    return [(None, entry), *((_build_setting(record, seed), each) for (record, seed), each in pairs)]


def _build_setting(record: dict[str, Any], seed: int | None) -> Setting:
    """Return the setting of a record. The record stores it if method and keep do not determine it."""
    if record["method"] == ESCALATE:
        return build_escalation(record["keep"])
    stored = record.get("setting")
    setting = Setting.from_json(stored) if stored else Setting.from_text(record["method"], record["keep"])
    return setting.with_defaults({}, seed)


def _draw(
    folder: Path, subject: Model, question: Any, entry: dict[str, Any], setting: Setting | None, name: str
) -> None:
    """Draw the kept tokens of one setting into a file, and fill its entry."""
    counted = "tokens" if setting is None else "kept"
    entry |= {counted: None, "image": None, "note": ""}
    try:
        if setting is None:
            image, entry[counted] = _draw_unpatched(subject, question)
        else:
            image, entry[counted] = _look(subject, question, setting)
    except TokenPruneError as error:
        entry["note"] = str(error).splitlines()[0]
        return
    try:
        image.save(folder / name, quality=80)
    except OSError as error:
        raise _build_write_error(folder / name, error) from error
    entry["image"] = name


def _draw_unpatched(subject: Model, question: Any) -> tuple[Image.Image, int]:
    """Return the images as the unpatched model sees them, and the number of their tokens."""
    frames = list(question.video if question.is_video else question.images)
    labels = getattr(question, "labels", ())
    inputs = contact_sheet.build_inputs(subject, frames, question.question, question.is_video, labels)
    with suppress(UnsupportedSetupError):  # without a grid, the images are shown unchanged
        frames, _ = contact_sheet.seen_frames(subject, inputs, frames, question.is_video)
    sizes = draw.compute_sizes(frames, _get_side(question))
    shown = [frame.resize(size) for frame, size in zip(frames, sizes, strict=True)]
    return contact_sheet.row(shown), subject.visual_tokens(inputs)


def _look(subject: Model, question: Any, setting: Setting) -> tuple[Image.Image, int]:
    methods = draw.check_drawable(setting)
    video, text = question.is_video, question.question
    if video and any(method.site is tokenprune.Site.PRE_ENCODER for method in methods):
        raise TokenPruneError("the method runs on the pixels of the video, where tokens do not exist yet")
    frames = question.video if video else question.images
    labels = getattr(question, "labels", ())
    return contact_sheet.look(subject, frames, text, setting, video, _get_side(question), labels)


def _get_side(question: Any) -> int:
    """Return the longer side of the drawings in pixels."""
    return SIDE if len(question.images) == 1 and not question.is_video else FRAME_SIDE


def _read_answers(path: Path, keep: float | int, numbers: Sequence[int]) -> dict[tuple, dict[str, Any]]:
    """Return the lines of the predictions by method, seed and question."""
    lines = (line for line, _ in read_lines(path) if line["question"] in numbers)
    return {
        (line["method"], line["seed"], line["question"]): line
        for line in lines
        if line["method"] == UNPATCHED or line["keep"] == keep
    }


def _read_earlier_entries(folder: Path) -> dict[str, Any]:
    """Return the entries of an earlier run, or an empty dict if the file is missing or damaged."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) and data.get("schema") == SCHEMA else {}


def _is_drawn(folder: Path, known: Any, entry: dict[str, Any]) -> bool:
    """Return True if an earlier run drew this entry: `known` equals `entry`, and its image files exist."""
    if not isinstance(known, dict) or not isinstance(known.get("methods"), list):
        return False
    for theirs, ours in zip([known, *known["methods"]], [entry, *entry["methods"]], strict=False):
        same = isinstance(theirs, dict) and all(theirs.get(key) == ours[key] for key in ours if key != "methods")
        if not same or "image" not in theirs or "note" not in theirs:
            return False
        if theirs["image"] is not None and not (folder / str(theirs["image"])).is_file():
            return False
    return len(known["methods"]) == len(entry["methods"])


def _remove_unused_drawings(folder: Path, data: dict[str, Any]) -> None:
    """Remove drawings that no entry names."""
    shown = {entry["image"] for sample in data["samples"] for entry in (sample, *sample["methods"])}
    for file in folder.glob("*.webp"):
        if file.name not in shown:
            try:
                file.unlink()
            except OSError as error:
                raise _build_write_error(file, error) from error


def _build_write_error(path: Path, error: OSError) -> RunError:
    return RunError(f"Cannot write {path}: {error.strerror or error}. Earlier results are kept.")
