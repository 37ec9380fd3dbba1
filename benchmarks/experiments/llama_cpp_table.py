# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with pruned prompts: time to the first token, and accuracy beside a smaller image.

    python benchmarks/experiments/llama_cpp_table.py times --model demo_smol      # the next two also with demo_qwen
    python benchmarks/experiments/llama_cpp_table.py answers                      # demo_qwen; about 6 minutes
    python benchmarks/experiments/llama_cpp_table.py page                         # write docs/serving/llama-cpp.md

`times` measures in turn, in one process and on one thread: unpruned, `divprune` at two keeps, and an oracle that
decodes the same number of rows without a selection. `answers` asks held-out questions of every kind in turn: unpruned,
pruned to a quarter, a smaller image with the same number of tokens, and a smaller image with the same time to the first
token. The decoder of demo_smol has weights in Q8_0, and that of demo_qwen in float32.
"""

from __future__ import annotations

import base64
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import calm_threads  # noqa: F401
import numpy as np
import torch
import typer
from common import RESULTS, fill_page, header
from PIL import Image
from rows import write

import tokenprune
from tokenprune_bench.paired import Answers, compare_paired
from tokenprune_demo.heldout import Example, get_heldout_folder, load_heldout

FILE = RESULTS / "llama_cpp.jsonl"
PAGE = Path(__file__).parents[2] / "docs/serving/llama-cpp.md"
BEGIN, END = "<!-- llama_cpp:begin (benchmarks/experiments/llama_cpp_table.py page) -->", "<!-- llama_cpp:end -->"
KEEPS = (0.25, 0.11)
UNIT = 16  # pixels per visual token of demo_qwen
SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LIMIT_S = 420
SETTINGS = {
    "unpruned": "unpruned",
    "pruned": "`divprune`, a quarter",
    "same tokens": "smaller image, same tokens",
    "same time": "smaller image, same time",
}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Model = Annotated[str, typer.Option(help="demo_qwen or demo_smol.")]


class Engine:
    """A shipped model in llama.cpp, on one thread."""

    def __init__(self, name: str) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_chat_format import MTMDChatHandler
        from llama_cpp_export import write_all

        torch.set_num_threads(1)
        self.name, self.folder = name, tempfile.TemporaryDirectory()
        with torch.no_grad():
            files = write_all(name, Path(self.folder.name), quantize=name == "demo_smol")
        handler = MTMDChatHandler(clip_model_path=str(files / "mmproj.gguf"), verbose=False)
        options = dict(n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        self.llm = Llama(str(files / "decoder.gguf"), chat_handler=handler, **options)
        self.patch_options = {"positions": "renumbered"} if name == "demo_smol" else {}

    def patch(self, keep: float | int | None, select: bool = True) -> None:
        """Set the budget; None unpatches. select=False keeps the first rows, without a selection."""
        if hasattr(self.llm.chat_handler._mtmd_cpp, "module"):
            tokenprune.llama_cpp.unpatch(self.llm)
        if keep is None:
            return
        tokenprune.llama_cpp.patch(self.llm, "divprune", keep=keep, **self.patch_options)
        proxy = self.llm.chat_handler._mtmd_cpp
        if not select:
            proxy._reduce = partial(_take_first, proxy, keep)

    def ask(self, image: Image.Image, question: str, max_tokens: int = 4) -> tuple[str, float]:
        """Return the answer, and the time to the first token in seconds."""
        buffer = io.BytesIO()
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


def resize(image: Image.Image, scale: float) -> Image.Image:
    """Return an image whose sides are whole tokens."""
    return image.resize([max(2, round(side * scale / UNIT)) * UNIT for side in image.size], Image.Resampling.BICUBIC)


def count_tokens(image: Image.Image) -> int:
    return (image.width // UNIT) * (image.height // UNIT)


def save(kind: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a kind, and keep those of other kinds."""
    import json

    lines = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    write(FILE, [*(line for line in lines if line["kind"] != kind), *({"kind": kind} | row for row in rows)])


def describe() -> dict[str, Any]:
    import llama_cpp

    return header(torch.device("cpu")) | {"llama_cpp": llama_cpp.__version__, "threads": 1}


def sample(name: str, count: int, kinds: int = 1) -> list[Example]:
    examples = load_heldout(folder=get_heldout_folder(name))
    if kinds == 1:
        return examples[:: max(1, len(examples) // count)][:count]
    by_kind: dict[str, list[Example]] = {}
    for example in examples:
        by_kind.setdefault(example.kind, []).append(example)
    picked = [of_kind[:: max(1, len(of_kind) // count)][:count] for of_kind in by_kind.values()]
    return [example for group in zip(*picked, strict=True) for example in group]


@app.command()
def times(model: Model = "demo_smol", images: int = 3, rounds: int = 5) -> None:
    """Measure the time to the first token, in turn."""
    engine, seconds = Engine(model), {}
    examples = sample(model, images) if model == "demo_smol" else [
        example for example in sample(model, 200) if example.image.size == (448, 448)
    ][:images]  # fmt: skip
    settings: dict[str, Callable[[], None]] = {"unpruned": partial(engine.patch, None)}
    for keep in KEEPS:
        settings[f"divprune {keep}"] = partial(engine.patch, keep)
        settings[f"oracle {keep}"] = partial(engine.patch, keep, select=False)
    overhead = []
    for turn in range(rounds + 1):  # the first round warms up
        for example in examples:
            for name, set_up in settings.items():
                set_up()
                _, first = engine.ask(example.image, example.question, max_tokens=1)
                if turn:
                    seconds.setdefault(name, []).append(first)
                    if name == f"divprune {KEEPS[0]}":
                        overhead.append(tokenprune.llama_cpp.stats(engine.llm).overhead_ms)
    base = statistics.median(seconds["unpruned"])
    rows = [
        {"model": model, "setting": name, "seconds": [round(value, 4) for value in values],
         "ratio": round(base / statistics.median(values), 3)}
        for name, values in seconds.items()
    ]  # fmt: skip
    save(f"times {model}", [describe() | {"overhead_ms": round(statistics.median(overhead), 2)}, *rows])
    for row in rows:
        print(row["setting"], row["ratio"])


def find_scale(engine: Engine, examples: list[Example]) -> float:
    """Return the largest scale of an image whose time to the first token is that of a pruned prompt."""
    seconds: dict[Any, list[float]] = {}
    for _ in range(2):
        for example in examples:
            for scale in ("pruned", *SCALES):
                image = resize(example.image, 1.0 if scale == "pruned" else scale)
                engine.patch(KEEPS[0] if scale == "pruned" else None)
                seconds.setdefault(scale, []).append(engine.ask(image, example.question, max_tokens=1)[1])
    medians = {scale: statistics.median(values) for scale, values in seconds.items()}
    return max([scale for scale in SCALES if medians[scale] <= medians["pruned"]], default=SCALES[0])


@app.command()
def answers(per_kind: int = 20) -> None:
    """Ask questions of every kind with each setting, in turn."""
    engine = Engine("demo_qwen")
    scale = find_scale(engine, sample("demo_qwen", 6))
    begin, rows = time.monotonic(), []
    for number, example in enumerate(sample("demo_qwen", per_kind, kinds=9)):
        if number % 9 == 0 and time.monotonic() - begin > LIMIT_S:
            break
        image = resize(example.image, 1.0)
        small = resize(example.image, 0.5)
        trials = {
            "unpruned": (None, image), "pruned": (count_tokens(small), image), "same tokens": (None, small),
            "same time": (None, resize(example.image, scale)),
        }  # fmt: skip
        row: dict[str, Any] = {"question": example.kind, "tokens": count_tokens(image), "kept": count_tokens(small)}
        for name, (keep, shown) in trials.items():
            engine.patch(None if keep is None else tokenprune.Budget(tokens=keep))
            text, first = engine.ask(shown, example.question)
            row[name] = {"right": int(text == example.answer), "seconds": round(first, 4)}
        rows.append(row)
    save("answers", [describe() | {"scale": scale}, *rows])
    print(scale, len(rows), {name: sum(row[name]["right"] for row in rows) for name in SETTINGS})


def _load() -> dict[str, list[dict[str, Any]]]:
    import json

    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    return {kind: [line for line in lines if line["kind"] == kind] for kind in {line["kind"] for line in lines}}


def write_times(head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table row of a model."""
    ratios = {row["setting"]: row["ratio"] for row in rows}
    cells = [f"{ratios[f'divprune {keep}']:.2f}x ({ratios[f'oracle {keep}']:.2f}x)" for keep in KEEPS]
    return f"| `{rows[0]['model']}` | {' | '.join(cells)} | {len(rows[0]['seconds'])} | {head['load']:.1f} |"


def write_answers(head: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of accuracy by kind of question."""
    lines = [f"| questions | n | {' | '.join(SETTINGS.values())} |", f"|---|{'---:|' * (len(SETTINGS) + 1)}"]
    for kind in (*sorted({row["question"] for row in rows}), None):
        part = [row for row in rows if kind in (None, row["question"])]
        right = {name: [row[name]["right"] for row in part] for name in SETTINGS}
        cells = []
        for name, values in right.items():
            cell = f"{100 * sum(values) / len(part):.0f}"
            if name.startswith("same"):
                gap = _compare(right["pruned"], values)
                cell += f" ({100 * gap.difference:+.0f}: {100 * gap.low:+.0f} to {100 * gap.high:+.0f})"
            cells.append(cell)
        lines.append(f"| {kind or '**all**'} | {len(part)} | {' | '.join(cells)} |")
    medians = {name: statistics.median(row[name]["seconds"] for row in rows) for name in SETTINGS}
    cells = [f"{medians['unpruned'] / medians[name]:.2f}x" for name in SETTINGS]
    return [*lines, f"| first token | | {' | '.join(cells)} |"]


def _compare(ours: list[int], theirs: list[int]) -> Any:
    """Return the paired difference of two lists of right (1) and wrong (0) answers."""
    first, second = (Answers([values], ["".join(map(str, values))]) for values in (ours, theirs))
    return compare_paired(first, second)


@app.command()
def page() -> None:
    """Write the tables into the page."""
    results = _load()
    lines = [
        "Time to the first token, unpruned divided by pruned, on one thread, in turn. In brackets: an oracle without a "
        "selection.",
        "",
        f"| model | keep {KEEPS[0]} | keep {KEEPS[1]} | rounds | load |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind in sorted(kind for kind in results if kind.startswith("times")):
        head, *rows = results[kind]
        lines.append(write_times(head, rows))
    lines += ["", "The machine ran other work, see the load. [Raw data](../../benchmarks/results/llama_cpp.jsonl)."]
    if "answers" in results:
        head, *rows = results["answers"]
        lines += [
            "",
            "Right answers of `demo_qwen` in percent. In brackets: `divprune` minus this column in points, with the 95 "
            f"% interval of paired differences. The same time is reached at {head['scale']} of each side.",
            "",
        ]
        lines += write_answers(head, rows)
    fill_page(PAGE, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    app()
