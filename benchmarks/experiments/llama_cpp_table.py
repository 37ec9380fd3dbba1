# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with pruned prompts: time to the first token, and accuracy beside a smaller image.

    python benchmarks/experiments/llama_cpp_table.py times --model demo_smol      # first, also with demo_qwen
    python benchmarks/experiments/llama_cpp_table.py answers --model demo_smol    # also with demo_qwen
    python benchmarks/experiments/llama_cpp_table.py page                         # write docs/serving/llama-cpp.md

`times` measures in turn, in one process and on one thread: unpruned, `divprune` at two keeps, an oracle that decodes
the same number of rows without a selection, and smaller images. `answers` asks held-out questions of every kind, drawn
with a fixed seed, in turn: unpruned, pruned to a quarter, a smaller image with the same number of tokens, and the
largest image with the same time to the first token (by the rows of `times`). Each row is appended to the file as soon
as it is measured, and a second call continues. The decoder of demo_smol has weights in Q8_0, and the decoder of
demo_qwen in float32.

llama.cpp resizes all images of demo_smol to the size of its tower. For smaller images, this script exports towers with
interpolated position embeddings.
"""

from __future__ import annotations

import base64
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import calm_threads  # noqa: F401
import numpy as np
import torch
import typer
from common import RESULTS, fill_page, header
from PIL import Image

import tokenprune
from tokenprune.budgets import Budget
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines
from tokenprune_bench.metrics import ending
from tokenprune_bench.paired import Answers, compare_paired
from tokenprune_demo.heldout import Example, get_heldout_folder, load_heldout

FILE = RESULTS / "llama_cpp.jsonl"
PAGE = Path(__file__).parents[2] / "docs/serving/llama-cpp.md"
BEGIN, END = "<!-- llama_cpp:begin (benchmarks/experiments/llama_cpp_table.py page) -->", "<!-- llama_cpp:end -->"
KEEPS = (0.25, 0.11)
SAME_TOKENS = 0.5  # scale of the sides at a quarter of the tokens
SCALES = (SAME_TOKENS, 0.55, 0.6, 0.7, 0.8, 0.9)
UNIT = {"demo_qwen": 16, "demo_smol": 14}  # pixels per visual token
MAX_NEW_TOKENS = {"demo_qwen": 4, "demo_smol": 24}
MAX_TOKENS = 450  # of a demo_qwen image: the exported tower needs 15 seconds for 784 tokens
TIMED_TOKENS = (100, 200, 400)  # of the demo_qwen images in `times`
ROUNDS = 5
SETTINGS = {
    "unpruned": "unpruned",
    "pruned": "`divprune`, a quarter",
    "same tokens": "smaller image, same tokens",
    "same time": "smaller image, same time",
}
Setting = tuple[str, Any]  # "unpruned", "divprune" or "oracle" with a budget, or "image" with a scale

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Model = Annotated[str, typer.Option(help="demo_qwen or demo_smol.")]
Seconds = Annotated[float, typer.Option(help="Stop after this time. The next call continues.")]


class Engine:
    """A shipped model in llama.cpp, on one thread."""

    def __init__(self, name: str) -> None:
        from llama_cpp import Llama
        from llama_cpp_export import write_all

        torch.set_num_threads(1)
        self.name, self.folder = name, tempfile.TemporaryDirectory()
        with torch.no_grad():
            self.files = write_all(name, Path(self.folder.name), quantize=name == "demo_smol")
        self.handlers = {1.0: self._create_handler(self.files / "mmproj.gguf")}
        options = dict(n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        self.llm = Llama(str(self.files / "decoder.gguf"), chat_handler=self.handlers[1.0], **options)
        self.patch_options = {"positions": "renumbered"} if name == "demo_smol" else {}

    def _create_handler(self, path: Path) -> Any:
        from llama_cpp.llama_chat_format import MTMDChatHandler

        return MTMDChatHandler(clip_model_path=str(path), verbose=False)

    def _find_handler(self, scale: float) -> Any:
        """Return the handler for images of this scale. demo_smol needs a tower for each."""
        if self.name == "demo_qwen":
            return self.handlers[1.0]
        if scale not in self.handlers:
            from llama_cpp_export import write_smol_tower

            path = self.files / f"mmproj-{scale}.gguf"
            model, _ = tokenprune.demo_model(self.name)
            with torch.no_grad():
                write_smol_tower(path, model, scale)
            self.handlers[scale] = self._create_handler(path)
        return self.handlers[scale]

    def set_up(self, setting: Setting, image: Image.Image) -> Image.Image:
        """Patch or unpatch the model, and return the image to ask about."""
        kind, value = setting
        if hasattr(self.llm.chat_handler._mtmd_cpp, "module"):
            tokenprune.llama_cpp.unpatch(self.llm)
        scale = value if kind == "image" else 1.0
        self.llm.chat_handler = self._find_handler(scale)
        if kind in ("divprune", "oracle"):
            tokenprune.llama_cpp.patch(self.llm, "divprune", keep=value, **self.patch_options)
        if kind == "oracle":
            proxy = self.llm.chat_handler._mtmd_cpp
            proxy._reduce = partial(_take_first, proxy, value)
        return resize(image, scale, UNIT[self.name])

    def ask(self, setting: Setting, image: Image.Image, question: str, max_tokens: int = 1) -> tuple[str, float]:
        """Return the answer, and the time to the first token in seconds."""
        image, buffer = self.set_up(setting, image), io.BytesIO()
        image.save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        text = question.lower() if self.name == "demo_qwen" else question
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        begin, first, parts = time.perf_counter(), None, []
        options = dict(temperature=0, max_tokens=max_tokens, repeat_penalty=1.0, stream=True)
        for chunk in self.llm.create_chat_completion([{"role": "user", "content": content}], **options):
            if (part := chunk["choices"][0]["delta"].get("content")) is not None:
                first = time.perf_counter() - begin if first is None else first
                parts.append(part)
        return "".join(parts).strip(), time.perf_counter() - begin if first is None else first


def _take_first(proxy: Any, keep: float, ctx: Any, chunk: Any, count: int) -> tuple[np.ndarray, Any]:
    """Return the first rows of an image instead of a selection."""
    width = proxy.llm.n_embd()
    rows = np.ctypeslib.as_array(proxy.module.mtmd_get_output_embd(ctx), (count * width,)).reshape(count, width)
    size = max(1, round(keep * count))
    kept = np.ascontiguousarray(rows[:size], np.float32)
    return kept, type("First", (), {"kept": range(size), "count": count})()


def resize(image: Image.Image, scale: float, unit: int) -> Image.Image:
    """Return an image whose sides are complete tokens."""
    return image.resize([max(2, round(side * scale / unit)) * unit for side in image.size], Image.Resampling.BICUBIC)


def count_tokens(image: Image.Image, unit: int) -> int:
    return (image.width // unit) * (image.height // unit)


class Rows:
    """The rows of a command and a model. `add` appends a row to the file, so that an aborted run loses nothing."""

    def __init__(self, kind: str, model: str, seconds: float) -> None:
        import llama_cpp

        lines = read_lines(FILE)
        self.key = {"kind": kind, "model": model}
        self.rows = [row for row, _ in lines if self.key.items() <= row.items()]
        self.writer = JsonLinesWriter(FILE, lines[-1][1] if lines else 0)
        self.end = time.monotonic() + seconds
        about = header(torch.device("cpu")) | {"threads": 1, "llama_cpp": llama_cpp.__version__}
        self.writer.write({"kind": "run", "command": kind, "model": model} | about)

    def add(self, **row: Any) -> None:
        row = self.key | row | {"load": round(os.getloadavg()[0], 2)}
        self.rows.append(row)
        self.writer.write(row)

    def has(self, **fields: Any) -> bool:
        return any(fields.items() <= row.items() for row in self.rows)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.end


def draw(name: str) -> list[Example]:
    """Return the held-out questions in an order with a fixed seed, in turn of every kind."""
    by_kind: dict[str, list[Example]] = {}
    for example in load_heldout(folder=get_heldout_folder(name)):
        if name == "demo_smol" or count_tokens(example.image, UNIT[name]) <= MAX_TOKENS:
            by_kind.setdefault(example.kind, []).append(example)
    for examples in by_kind.values():
        random.Random(0).shuffle(examples)
    return [example for group in zip_longest(*by_kind.values()) for example in group if example is not None]


@app.command()
def times(model: Model = "demo_smol", rounds: int = ROUNDS, seconds: Seconds = 330) -> None:
    """Measure the time to the first token, in turn."""
    rows, engine, unit = Rows("times", model, seconds), Engine(model), UNIT[model]
    examples = draw(model)[:1] if model == "demo_smol" else [
        min(draw(model), key=lambda example: abs(count_tokens(example.image, unit) - target)) for target in TIMED_TOKENS
    ]  # fmt: skip
    settings: list[Setting] = [("unpruned", None)]
    settings += [(name, keep) for keep in KEEPS for name in ("divprune", "oracle")]
    settings += [("image", scale) for scale in SCALES]
    for setting in settings:  # warm up
        engine.ask(setting, examples[0].image, examples[0].question)
    for turn in range(rounds):
        for example in examples:
            tokens = count_tokens(resize(example.image, 1.0, unit), unit)
            for name, value in settings:
                fields = {"tokens": tokens, "round": turn, "setting": name, "value": value}
                if rows.has(**fields) or rows.is_late:
                    continue
                _, first = engine.ask((name, value), example.image, example.question)
                if name == "divprune":
                    fields["overhead_ms"] = round(tokenprune.llama_cpp.stats(engine.llm).overhead_ms, 2)
                rows.add(**fields, seconds=round(first, 4))
    print(f"{len(rows.rows)} of {rounds * len(examples) * len(settings)} rows")


def find_ratios(rows: Sequence[dict[str, Any]], tokens: int) -> dict[Setting, float]:
    """Return the unpruned time divided by the time of each setting: the median over rounds."""
    rounds: dict[int, dict[Setting, float]] = {}
    for row in rows:
        if row["tokens"] == tokens:
            rounds.setdefault(row["round"], {})[row["setting"], row["value"]] = row["seconds"]
    ratios: dict[Setting, list[float]] = {}
    for seconds in rounds.values():
        for setting, value in seconds.items():
            ratios.setdefault(setting, []).append(seconds["unpruned", None] / value)
    return {setting: statistics.median(values) for setting, values in ratios.items()}


def find_scale(rows: Sequence[dict[str, Any]], tokens: int) -> float:
    """Return the largest scale of an image that is as fast as a pruned prompt, at the closest number of tokens."""
    measured = min({row["tokens"] for row in rows}, key=lambda value: abs(value - tokens))
    ratios = find_ratios(rows, measured)
    return max([scale for scale in SCALES if ratios["image", scale] >= ratios["divprune", KEEPS[0]]], default=SCALES[0])


@app.command()
def answers(model: Model = "demo_qwen", seconds: Seconds = 540) -> None:
    """Ask questions of every kind with each setting, in turn."""
    timed = [row for row, _ in read_lines(FILE) if row["kind"] == "times" and row["model"] == model]
    rows, engine, unit = Rows("answers", model, seconds), Engine(model), UNIT[model]
    for index, example in enumerate(draw(model)):
        if rows.is_late:
            break
        if rows.has(index=index):
            continue
        tokens, kept = (count_tokens(resize(example.image, scale, unit), unit) for scale in (1.0, SAME_TOKENS))
        scale = find_scale(timed, tokens)
        settings: dict[str, Setting] = {
            "unpruned": ("unpruned", None), "pruned": ("divprune", Budget(tokens=kept)),
            "same tokens": ("image", SAME_TOKENS), "same time": ("image", scale),
        }  # fmt: skip
        results: dict[str, Any] = {}
        for name, setting in settings.items():
            text, first = engine.ask(setting, example.image, example.question, MAX_NEW_TOKENS[model])
            results[name] = {"right": int(ending(text, example.answer)), "seconds": round(first, 4)}
        rows.add(index=index, question=example.kind, tokens=tokens, kept=kept, scale=scale, **results)
    print(len(rows.rows), {name: sum(row[name]["right"] for row in rows.rows) for name in SETTINGS})


def write_times(model: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the table rows of a model."""
    lines = []
    for tokens in sorted({row["tokens"] for row in rows}):
        ratios, scale = find_ratios(rows, tokens), find_scale(rows, tokens)
        cells = [f"{ratios['divprune', keep]:.2f}x ({ratios['oracle', keep]:.2f}x)" for keep in KEEPS]
        cells += [f"{ratios['image', SAME_TOKENS]:.2f}x", f"{ratios['image', scale]:.2f}x ({scale:g})"]
        lines.append(_join(f"`{model}`", tokens, *cells))
    return lines


def write_answers(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of right answers: a row for each setting, and a column for each kind of question."""
    kinds = sorted({row["question"] for row in rows})
    counts = [sum(row["question"] == kind for row in rows) for kind in kinds]
    titles = ["setting", "first token", f"all ({len(rows)})", "`divprune` minus this"]
    titles += [f"{kind} ({count})" for kind, count in zip(kinds, counts, strict=True)]
    lines = [_join(*titles), _join("---", *["---:"] * (len(titles) - 1))]
    for name, title in SETTINGS.items():
        right = [row[name]["right"] for row in rows]
        speed = statistics.median(row["unpruned"]["seconds"] / row[name]["seconds"] for row in rows)
        gap = _compare([row["pruned"]["right"] for row in rows], right)
        cells = [title, f"{speed:.2f}x", f"{100 * statistics.mean(right):.0f}"]
        cells.append(
            "" if name == "pruned" else f"{100 * gap.difference:+.0f} [{100 * gap.low:+.0f}, {100 * gap.high:+.0f}]"
        )
        for kind in kinds:
            cells.append(f"{100 * statistics.mean(row[name]['right'] for row in rows if row['question'] == kind):.0f}")
        lines.append(_join(*cells))
    return lines


def _join(*cells: Any) -> str:
    """Return a table row. Without spaces, as docs/ has a limit of words and `wc` counts separators."""
    return f"|{'|'.join(map(str, cells))}|"


def _compare(ours: list[int], reference: list[int]) -> Any:
    """Return the paired difference of two lists of right (1) and wrong (0) answers."""
    first, second = (Answers([values], ["".join(map(str, values))]) for values in (ours, reference))
    return compare_paired(first, second)


@app.command()
def page() -> None:
    """Write the tables into the page."""
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row, _ in read_lines(FILE):
        by_kind.setdefault((row["kind"], row["model"]), []).append(row)
    timed = [row for model in UNIT for row in by_kind["times", model]]
    loads = [row["load"] for row in timed]
    rounds = [len({row["round"] for row in by_kind["times", model]}) for model in UNIT]
    lines = [
        "Time to the first token, unpruned divided by each setting: one thread, in turn, median of "
        f"{min(rounds)} rounds, load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores. In brackets: an "
        "oracle without a selection, or the scale of the sides.",
        "",
        _join("model", "visual tokens", *[f"`divprune` {keep}" for keep in KEEPS], *list(SETTINGS.values())[2:]),
        _join("---", *["---:"] * 5),
    ]
    for model in UNIT:
        lines += write_times(model, by_kind["times", model])
    lines += [
        "",
        "Right answers in percent by kind of question (number of questions, drawn with a fixed seed), with the 95 % "
        "interval of paired differences in points. [Raw data](../../benchmarks/results/llama_cpp.jsonl).",
    ]
    for model in UNIT:
        lines += ["", f"`{model}`:", "", *write_answers(by_kind["answers", model])]
    fill_page(PAGE, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    app()
