# SPDX-License-Identifier: Apache-2.0
"""Ask a model about photographs before and after pruning; write a table, a page and an image."""

from __future__ import annotations

import base64
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenprune.cli.table import Cell, Table
from tokenprune.errors import require
from tokenprune_bench.metrics import ending
from tokenprune_bench.profiling.machine_load import format_busy_note, get_machine_load
from tokenprune_bench.profiling.patched import UNPATCHED, patched

if TYPE_CHECKING:
    from PIL import Image

    from tokenprune_bench.profiling.model import Model
    from tokenprune_bench.show.side_by_side import Shown

METHOD, KEEP = "divprune", 0.25
NUM_QUESTIONS = 6
REPEATS = 3

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DemoAnswer:
    """One question about one photograph, with both answers.

    Args:
        question: The question.
        expected: The right answer.
        unpruned: Answer with all visual tokens.
        pruned: Answer with the kept visual tokens.
        is_right: Whether each of the two answers is right.
        drawing: The photograph, and the patches that the method keeps.
    """

    question: str
    expected: str
    unpruned: str
    pruned: str
    is_right: tuple[bool, bool]
    drawing: Image.Image


@dataclass(frozen=True)
class DemoResult:
    """Answers and costs of one model.

    Args:
        model: Name of the model.
        answers: One entry per question.
        tokens: Visual tokens per image, before and after pruning.
        kv_bytes: Bytes of the KV cache of one prompt, before and after pruning.
        milliseconds: Time to the first token, without and with pruning, vision tower included.
        notes: Remarks about the measurement.
    """

    model: str
    answers: list[DemoAnswer]
    tokens: tuple[int, int]
    kv_bytes: tuple[int, int]
    milliseconds: tuple[float, float]
    notes: tuple[str, ...] = ()


def choose_examples(subject: Model, count: int = NUM_QUESTIONS) -> list[Any]:
    """Return the first question about a photograph of each kind, up to a count, in the order of the set."""
    load_heldout = require("tokenprune_demo.heldout", "held-out questions").load_heldout
    examples, kinds, images = [], set(), set()
    for example in load_heldout(folder=subject.heldout):
        is_new = example.kind not in kinds and example.index not in images
        if example.background == "photo" and is_new and len(examples) < count:
            examples.append(example)
            kinds.add(example.kind)
            images.add(example.index)
    return examples


def run_demo(subject: Model, step: Progress = lambda label, done, total: None) -> DemoResult:
    """Ask each question without and with pruning, and time the first token.

    Args:
        subject: A shipped model, or another model; other models answer the questions of demo_vlm's set.
        step: Progress callback with a label, the number of finished steps, and their total.
    """
    from tokenprune_bench.show.side_by_side import show

    examples = choose_examples(subject)
    total = len(examples) + REPEATS
    answers, stats = [], None
    for index, example in enumerate(examples):
        step("questions", index, total)
        shown = show(subject, [example.image], example.question, [{"method": METHOD, "keep": KEEP}])
        answers.append(build_answer(example, shown))
        stats = shown.seen[0].stats
    assert stats is not None and stats.kv_bytes is not None and stats.kv_bytes_full is not None
    milliseconds = measure_first_token(subject, examples[0], lambda done: step("time", len(examples) + done, total))
    busy = format_busy_note(get_machine_load())
    return DemoResult(
        subject.name,
        answers,
        (int(stats.visual_tokens_in), int(stats.visual_tokens_out)),
        (int(stats.kv_bytes_full), int(stats.kv_bytes)),
        milliseconds,
        (busy,) if busy else (),
    )


def build_answer(example: Any, shown: Shown) -> DemoAnswer:
    """Return the answers to one question, as `show` drew them."""
    unpruned, pruned = (answer.strip() for answer in (shown.before, shown.seen[0].answer))
    # demo_smol answers in a sentence that ends with the answer.
    is_right = (bool(ending(unpruned, example.answer)), bool(ending(pruned, example.answer)))
    return DemoAnswer(example.question, example.answer, unpruned, pruned, is_right, shown.pair(0))


def measure_first_token(subject: Model, example: Any, step: Callable[[int], None]) -> tuple[float, float]:
    """Return the median time to the first token in milliseconds, without and with pruning, measured in turn."""
    inputs = subject.inputs([example.image], [example.question])
    times: dict[str, list[float]] = {UNPATCHED: [], METHOD: []}
    for repeat in range(REPEATS):
        step(repeat)
        for name, values in times.items():
            with patched(subject, name, KEEP):
                begin = time.perf_counter()
                subject.generate(inputs, max_new_tokens=1)
                values.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[UNPATCHED]), statistics.median(times[METHOD])


def build_table(result: DemoResult) -> Table:
    """Return answers and costs as one table that fits 80 columns."""
    unpruned, pruned = result.tokens
    rows = []
    for answer in result.answers:
        cells = [
            Cell(shorten(text) if right else f"{shorten(text)} ✗", bad=not right)
            for text, right in zip((answer.unpruned, answer.pruned), answer.is_right, strict=True)
        ]
        rows.append([Cell(answer.question), Cell(answer.expected), *cells])
    gain = result.milliseconds[0] / result.milliseconds[1]
    times = f"{result.milliseconds[0]:.0f} ms", f"{result.milliseconds[1]:.0f} ms ({gain:.1f}x)"
    costs = [("time to first token", *times), ("KV cache", *(f"{value / 2**20:.1f} MiB" for value in result.kv_bytes))]
    rows += [[Cell(name), Cell(""), Cell(before), Cell(after)] for name, before, after in costs]
    columns = ("question", "expected", f"{unpruned} tokens", f"{pruned} tokens")
    return Table(f"{result.model}, {METHOD} keep={KEEP}", columns, rows, result.notes)


def shorten(text: str, width: int = 15) -> str:
    """Return the end of an answer, which has the word that was asked for."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def write_files(result: DemoResult, folder: Path) -> tuple[Path, Path]:
    """Write kept.png and report.html into a folder, which is created; return their paths."""
    from tokenprune_bench.report.page import render_template

    folder.mkdir(parents=True, exist_ok=True)
    image, page = folder / "kept.png", folder / "report.html"
    result.answers[0].drawing.save(image)
    rows = [(answer, to_data_uri(answer.drawing)) for answer in result.answers]
    text = render_template("demo.html", result=result, rows=rows, method=METHOD, keep=KEEP, table=build_table(result))
    page.write_text(text, encoding="utf-8")
    return image, page


def to_data_uri(image: Image.Image) -> str:
    """Return an image as a data URI of a WebP file."""
    file = io.BytesIO()
    image.save(file, "WEBP", quality=85)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
