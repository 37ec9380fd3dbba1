# SPDX-License-Identifier: Apache-2.0
"""Measure assisted generation of a shipped model whose draft sees fewer visual tokens.

    python benchmarks/experiments/assisted.py                      # demo_qwen, its held-out questions
    python benchmarks/experiments/assisted.py --page               # write the table into docs/results/drafts.md

The raw file is benchmarks/results/DEVICE/assisted.jsonl. The shipped models answer in one word, so the script measures
two things. First, how often the draft and the target answer with the same word. Second, with the end token suppressed,
the target forwards and the accepted drafts over `--words` words. All answers are compared with unassisted generation.
The script does not measure times.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import fill_page, header, read, results_path, write
from rich.console import Console

import tokenprune
from tokenprune import DraftCost
from tokenprune.settings import Setting
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.tables import Cell, Table, to_markdown, to_rich
from tokenprune_demo.heldout import load_heldout

SETTINGS = "random:0.3,divprune:0.5,divprune:0.3,divprune:0.1,fastv:0.3,divprune:1.0"
DRAFTED = 4
PAGE = Path(__file__).parents[2] / "docs/results/drafts.md"
BEGIN, END = "<!-- assisted:begin (benchmarks/experiments/assisted.py --page) -->", "<!-- assisted:end -->"


@contextmanager
def drafts_of(model: Any, method: str | None, keep: float) -> Iterator[Any]:
    """Yield a draft with the weights of `model`. Method None: a plain copy, which transformers runs without images."""
    draft = copy.deepcopy(model) if method is None else tokenprune.assistant(model, method, keep=keep)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.assistant_confidence_threshold = 0.0
    try:
        yield draft
    finally:
        if method is not None:
            tokenprune.unpatch(draft)


class Written:
    """Counts of assisted generations: query lengths of the target's forwards per prompt, and generated words."""

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.words = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts.

        The first forward of a prompt is the prefill. Each later forward checks the drafts and adds a word.
        """
        rounds = [length - 1 for lengths in self.forwards for length in lengths[1:]]
        total = sum(map(len, self.forwards))
        return {"forwards": total, "words": self.words, "drafted": sum(rounds), "accepted": self.words - total}


@contextmanager
def record_forwards(model: Model, written: Written) -> Iterator[None]:
    def enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        written.forwards[-1].append(kwargs["inputs_embeds"].shape[1])

    handle = model.adapter.decoder.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def ask(model: Model, inputs: dict[str, Any], words: int, **options: Any) -> list[int]:
    """Generate `words` token ids. If `words` is above 1, the end token is suppressed."""
    end = model.model.generation_config.eos_token_id
    if words > 1:
        options["suppress_tokens"] = end if isinstance(end, list) else [end]
    out = options.pop("by", model.model).generate(**inputs, max_new_tokens=words, do_sample=False, **options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def measure(
    model: Model, prompts: Sequence[dict[str, Any]], answers: Sequence[list[int]], method: str | None, keep: float
) -> dict[str, Any]:
    """Return the record of one setting. `answers` are the ids of unassisted generation, for comparison."""
    written, right, equal, words = Written(), 0, 0, len(answers[0])
    with drafts_of(model.model, method, keep) as draft, torch.no_grad():
        for inputs, expected in zip(prompts, answers, strict=True):
            if method is not None:
                right += ask(model, inputs, 1, by=draft) == expected[:1]
            written.forwards.append([])
            with record_forwards(model, written):
                ids = ask(model, inputs, words, assistant_model=draft)
            written.words += len(ids)
            equal += ids == expected
    record = {"method": method, "keep": keep, "prompts": len(prompts), "equal": equal, **written.as_dict()}
    if method is not None:
        tokens = round(sum(model.visual_tokens(prompt) for prompt in prompts) / len(prompts))
        steps = Setting.from_json({"method": method, "keep": keep}).steps()
        cost = DraftCost.from_configs(model.model.config, None, *steps, tokens=tokens, text=16 + words)
        record |= {"same_word": right, "c": cost.c}
    return record


def table(path: Path) -> Table:
    """Return the table of a file of results."""
    about, lines = read(path)
    rows = []
    for row in lines:
        prompts = row["prompts"]
        name = "a copy, without us" if row["method"] is None else f"{row['method']}, keep {row['keep']:g}"
        word, c = ("", "") if row["method"] is None else (f"{row['same_word'] / prompts:.0%}", f"{row['c']:.3f}")
        rows.append([*map(Cell, (
            name, word, f"{row['accepted'] / max(1, row['drafted']):.0%}", f"{row['words'] / prompts:.1f}",
            f"{row['forwards'] / prompts:.1f}", f"{row['equal']} of {prompts}", c,
        ))])  # fmt: skip
    columns = (
        "draft", "its word is the target's", "drafts accepted", "words", "target forwards", "answers equal", "c",
    )  # fmt: skip
    note = (
        f"{about['model']}, {about['questions']} held-out questions, one prompt at a time, {DRAFTED} words drafted a "
        f"round; a draft with the target's weights. Weights {about['weights']}, torch {about['torch']}, transformers "
        f"{about['transformers']}, {about['date']}."
    )
    return Table("Drafts on fewer visual tokens", columns, rows, (note,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_qwen")
    parser.add_argument("--settings", default=SETTINGS, help="comma-separated list of method:keep")
    parser.add_argument(
        "--questions", type=int, default=45, help="number of held-out questions, equally many of each kind"
    )
    parser.add_argument("--words", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/assisted.jsonl")
    parser.add_argument("--page", action="store_true", help="write the table of --json into docs/results/drafts.md")
    args = parser.parse_args()
    path, console = args.json or results_path(torch.device(args.device), "assisted"), Console(width=200)
    if args.page:
        fill_page(PAGE, BEGIN, END, to_markdown(table(path)))
        return
    torch.set_num_threads(args.threads)
    model = load_model(args.model, device=args.device)
    examples = load_heldout(folder=model.heldout)
    kinds = len({example.kind for example in examples})
    images = len(examples) // kinds
    step = max(1, images * kinds // args.questions)
    chosen = [example for index, example in enumerate(examples) if index // kinds % step == 0][: args.questions]
    prompts = [model.inputs([example.images], [example.question]) for example in chosen]
    lines = [
        header(torch.device(args.device), model=args.model, questions=len(chosen), words=args.words,
               weights=model.weights)
    ]  # fmt: skip
    settings = [(name, float(keep)) for name, _, keep in (item.partition(":") for item in args.settings.split(","))]
    with torch.no_grad():
        answers = [ask(model, inputs, args.words) for inputs in prompts]
    for method, keep in [(None, 1.0), *settings]:
        lines.append(measure(model, prompts, answers, method, keep))
        write(path, lines)
    shown = table(path)
    console.print(to_rich(shown))
    console.print(shown.notes[0], markup=False)


if __name__ == "__main__":
    main()
