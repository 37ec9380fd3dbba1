# SPDX-License-Identifier: Apache-2.0
"""Compare CDPruner of OpenVINO GenAI with our `cdpruner`: same model, images, questions and token counts.

    pip install openvino-genai
    python benchmarks/experiments/openvino_cdpruner.py           # measure, into results/openvino_cdpruner.jsonl
    python benchmarks/experiments/openvino_cdpruner.py --page    # write the table into docs/results/serving.md

The shipped Qwen2.5-VL is exported (openvino_export.py), and both engines answer its held-out questions in float32.
VLMPipeline does not report the kept tokens. A probe replaces its language model and answers with the positions of its
input tokens. This answers three questions: whether both engines choose the same tokens, whether the choice follows the
formula in GenAI's source (`described`), and whether the same tokens give the same answer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from asking import Replay
from common import RESULTS, fill_page, header, read, write
from torch import Tensor
from torch.nn.functional import normalize

import tokenprune
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_demo.heldout import Example, load_heldout

FILE = RESULTS / "openvino_cdpruner.jsonl"
PAGE = Path(__file__).parents[2] / "docs/results/serving.md"
BEGIN, END = "<!-- openvino:begin (benchmarks/experiments/openvino_cdpruner.py --page) -->", "<!-- openvino:end -->"
PRUNED = 75  # percent
WEIGHTS = (0.0, 0.5, 1.0)
COLUMNS = 24  # columns of the largest token grid
SPLIT = "CDPRUNER_SPLIT_THRESHOLD"  # environment variable of GenAI; 0 selects among all tokens at once


class Pipeline:
    """VLMPipeline on the exported model. `language` replaces its language model."""

    def __init__(self, folder: Path, language: Any = None) -> None:
        import openvino as ov
        import openvino_genai as genai

        self.genai, self.tensor = genai, ov.Tensor
        if language is not None:
            other = Path(tempfile.mkdtemp(dir=folder.parent))
            for file in folder.iterdir():
                (other / file.name).symlink_to(file)
            for file in other.glob("openvino_language_model.*"):
                file.unlink()
            ov.save_model(language, other / "openvino_language_model.xml")
            folder = other
        self.pipeline = genai.VLMPipeline(folder, "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_PRECISION_HINT="f32")

    def ask(self, prompt: str, image: Any, tokens: int, pruned: int, weight: float, to_the_end: bool) -> list[int]:
        """Return the tokens of a greedy answer. If `to_the_end` is set, ignore the model's end token."""
        import numpy as np

        genai, tokens_out = self.genai, []

        class Listener(genai.StreamerBase):
            def write(self, token: Any) -> Any:
                tokens_out.extend(token if isinstance(token, list) else [token])
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = self.pipeline.get_generation_config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, to_the_end, False
        config.apply_chat_template = False
        config.pruning_ratio, config.relevance_weight = pruned, weight
        pixels = self.tensor(np.asarray(image)[None])
        self.pipeline.generate(prompt, images=[pixels], generation_config=config, streamer=Listener())
        return tokens_out


@dataclass
class Asked:
    """A question and its inputs and features in our engine."""

    example: Example
    image: Any
    prompt: str
    inputs: dict[str, Any]
    visual: Tensor  # bool, shape (sequence,): the visual tokens of the prompt
    features: Tensor  # shape (tokens, hidden)
    around: Tensor  # embeddings of all text outside of the image's tags, shape (text tokens, hidden)
    answers: dict[Any, str] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return int(self.visual.nonzero()[0])


def asked(subject: Model, images: int, kinds: tuple[str, ...]) -> Iterator[Asked]:
    """Yield questions about images whose sides are multiples of the token size, so that neither engine resizes them."""
    config, unit = subject.model.config, 16
    chosen: set[int] = set()
    for example in load_heldout(kinds=kinds, folder=subject.heldout):
        if max(example.image.size) > (COLUMNS - 1) * unit or (len(chosen) == images and example.index not in chosen):
            continue
        chosen.add(example.index)
        image = example.image.resize([round(side / unit) * unit for side in example.image.size])
        inputs = subject.inputs([image], [example.question])
        ids = inputs["input_ids"][0]
        visual = ids == config.image_token_id
        text = ~visual & (ids != config.vision_start_token_id) & (ids != config.vision_end_token_id)
        with torch.no_grad():
            encoded = subject.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
            embedded = subject.model.get_input_embeddings()(ids)
        features = torch.cat([*getattr(encoded, "pooler_output", encoded)])
        yield Asked(example, image, subject.prompt([image], example.question), inputs, visual, features, embedded[text])


def compute_agreement(kept: Tensor, features: Tensor, text: Tensor, weight: float, halves: bool) -> float:
    """Return the share of `kept` that the formula of GenAI's source selects.

    Relevance is the cosine to the mean embedding of all text before and after the image. The kernel is a linear mix of
    the cosines and of the cosines weighted by relevance. With `halves`, each half of the tokens is a separate set and
    gives half of the kept tokens.

    Args:
        kept: Ascending indices of kept tokens.
        features: Shape (tokens, hidden).
        text: Shape (text tokens, hidden).
        weight: Weight of the relevance.
        halves: Whether to split the tokens.
    """
    ends = [0, len(features) // 2, len(features)] if halves else [0, len(features)]
    counts = [len(kept) // 2, len(kept) - len(kept) // 2] if halves else [len(kept)]
    common = 0
    for (start, end), count in zip(itertools.pairwise(ends), counts, strict=True):
        kept_here = {index - start for index in kept.tolist() if start <= index < end}
        common += max(len(kept_here & set(choice)) for choice in greedy(features[start:end], text, weight, count))
    return common / len(kept)


def greedy(features: Tensor, text: Tensor, weight: float, count: int) -> Iterator[list[int]]:
    """Yield selections from one set of tokens, one per possible first token: rounding decides between equal gains."""
    x, mean = normalize(features.double(), dim=1), normalize(text.double().mean(0), dim=0)
    relevance = x @ mean
    relevance = (relevance - relevance.min()) / (relevance.max() - relevance.min() + 1e-6)
    kernel = (x @ x.T) * (1 - weight + weight * torch.outer(relevance, relevance))
    worth = kernel.diagonal()
    for pick in (worth > worth.max() - 1e-5).nonzero().flatten().tolist():
        gain, rows, picks = worth.clone(), torch.zeros(0, len(x), dtype=torch.double), []
        for _ in range(count):
            row = (kernel[pick] - rows[:, pick] @ rows) / gain[pick].clamp(min=1e-10).sqrt()
            rows, gain = torch.cat([rows, row[None]]), gain - row**2
            gain[pick] = -torch.inf
            picks.append(pick)
            pick = int(gain.argmax())
        yield sorted(picks)


def find_theirs(question: Asked, probe: Pipeline, weight: float) -> Tensor:
    """Return the ascending indices of the visual tokens that reach GenAI's language model."""
    from openvino_export import FIRST_CODE

    tokens = int(question.visual.sum())
    codes = probe.ask(question.prompt, question.image, tokens + 1, PRUNED, weight, to_the_end=True)
    length, *positions = (code - FIRST_CODE for code in codes)
    columns = int(question.inputs["image_grid_thw"][0, 2]) // 2
    positions = positions[: length - int((~question.visual).sum())]
    return torch.tensor([position // COLUMNS * columns + position % COLUMNS for position in positions])


def logit_gap(subject: Model, question: Asked, folder: Path) -> float:
    """Return the maximum difference of logits between the exported language model and ours, with all tokens."""
    import openvino as ov

    captured: dict[str, Any] = {}
    hook = subject.model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        expected = subject.model(**question.inputs).logits
    hook.remove()
    language = ov.compile_model(folder / "openvino_language_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    logits = language({
        "inputs_embeds": captured["inputs_embeds"].numpy(), "attention_mask": question.inputs["attention_mask"].numpy(),
        "position_ids": captured["position_ids"][-3:].numpy(), "beam_idx": torch.zeros(1, dtype=torch.int).numpy(),
    })["logits"]  # fmt: skip
    return float((torch.from_numpy(logits) - expected).abs().max())


def ours(subject: Model, question: Asked, theta: float, keep: int) -> tuple[Tensor, str]:
    """Return the indices of the tokens that our `cdpruner` keeps, and the answer."""
    with tokenprune.patched(subject.model, "cdpruner", keep=keep, theta=theta, record=True, guard="off"):
        (answer,) = subject.generate(question.inputs)
        kept = torch.tensor(tokenprune.stats(subject.model).cuts[0].kept[0])
    return kept[question.visual[kept]] - question.first, answer


def with_tokens(subject: Model, question: Asked, indices: Tensor) -> str:
    """Return our answer with the given tokens."""
    Replay.kept = torch.zeros(1, int(question.visual.sum()), dtype=torch.bool)
    Replay.kept[0, indices] = True
    with tokenprune.patched(subject.model, "replay", keep=len(indices), guard="off"):
        return subject.generate(question.inputs)[0]


def right(question: Asked, answer: str) -> bool:
    return question.example.is_right(answer.rstrip("."))


def measure(subject: Model, questions: list[Asked], folder: Path) -> Iterator[dict[str, Any]]:
    from openvino_export import export, probe

    exported = folder / "model"
    exported.mkdir()
    export(subject.model, subject.processor, exported)
    vocabulary, width = subject.model.get_input_embeddings().weight.shape
    decode = subject.processor.tokenizer.decode
    tokens = subject.max_new_tokens

    def answer(question: Asked, pipeline: Pipeline, pruned: int, weight: float) -> str:
        ids = pipeline.ask(question.prompt, question.image, tokens, pruned, weight, to_the_end=False)
        return decode(ids, skip_special_tokens=True)

    pipeline = Pipeline(exported)
    plain = [(subject.generate(question.inputs)[0], answer(question, pipeline, 0, 0.5)) for question in questions]
    yield {
        "pruned": 0, "questions": len(questions), "same_answer": sum(a == b for a, b in plain),
        "right": sum(right(question, b) for question, (_, b) in zip(questions, plain, strict=True)),
        "right_ours": sum(right(question, a) for question, (a, _) in zip(questions, plain, strict=True)),
        "logit_gap": logit_gap(subject, questions[0], exported),
    }  # fmt: skip
    for threshold in (None, "0"):
        if threshold is not None:
            os.environ[SPLIT] = threshold
        pipeline = Pipeline(exported)  # reads the environment
        probed = Pipeline(exported, probe(width, vocabulary, questions[0].first, COLUMNS))
        for weight, question in itertools.product(WEIGHTS, questions):
            their_tokens = find_theirs(question, probed, weight)
            our_tokens, our_answer = ours(subject, question, weight, len(their_tokens))
            their_answer = answer(question, pipeline, PRUNED, weight)
            yield {
                "image": question.example.path.name, "question": question.example.question, "weight": weight,
                "halves": threshold is None, "tokens": int(question.visual.sum()), "theirs": their_tokens.tolist(),
                "ours": our_tokens.tolist(), "right": right(question, their_answer),
                "right_ours": right(question, our_answer),
                "described": compute_agreement(
                    their_tokens, question.features, question.around, weight, threshold is None
                ),
                "same_answer": their_answer == with_tokens(subject, question, their_tokens),
            }  # fmt: skip


def page() -> None:
    first, (plain, *rows) = read(FILE)
    count = plain["questions"]
    kept = sum(len(row["theirs"]) for row in rows) / len(rows)
    tokens = sum(row["tokens"] for row in rows) / len(rows)
    lines = [
        f"{count} questions about {first['images']} images, {PRUNED} % pruned: both keep {kept:.1f} of {tokens:.0f} "
        f"tokens. OpenVINO GenAI {first['openvino_genai']}. Unpruned prompt logits differ by at most "
        f'{plain["logit_gap"]:.0e}. "Matches its source" counts the selections that the published formula reproduces '
        "in float64, with the mean share of equal tokens.",
        "",
        "| `relevance_weight` | sets | matches its source | overlap with `cdpruner` (IoU) | correct, OpenVINO "
        "| correct, `cdpruner` | equal answers to equal tokens |",
        "|---|---|---|---|---|---|---|",
        f"| not pruned | | | | {plain['right']} | {plain['right_ours']} | {plain['same_answer']} of {count} |",
    ]
    for halves, weight in itertools.product((True, False), WEIGHTS):
        part = [row for row in rows if row["halves"] == halves and row["weight"] == weight]
        lines.append(
            f"| {weight:g} | {'two' if halves else 'one'} | {sum(row['described'] == 1 for row in part)} "
            f"({sum(row['described'] for row in part) / count:.0%}) | "
            f"{sum(map(_overlap, part)) / count:.2f} | "
            f"{sum(row['right'] for row in part)} | {sum(row['right_ours'] for row in part)} | "
            f"{sum(row['same_answer'] for row in part)} of {count} |"
        )
    source = "benchmarks/results/openvino_cdpruner.jsonl"
    lines += ["", f"By `python benchmarks/experiments/openvino_cdpruner.py`; raw data: [{source}](../../{source})."]
    fill_page(PAGE, BEGIN, END, "\n".join(lines))


def _overlap(row: dict[str, Any]) -> float:
    their_tokens, our_tokens = set(row["theirs"]), set(row["ours"])
    return len(their_tokens & our_tokens) / len(their_tokens | our_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--page", action="store_true", help="write the table of the committed file into the page")
    args = parser.parse_args()
    if args.page:
        page()
        return
    import openvino_genai

    torch.manual_seed(0)
    subject = load_model("demo_qwen", device="cpu")
    questions = list(asked(subject, args.images, ("colour", "presence", "count", "position", "thing")))
    first = header(torch.device("cpu"), openvino_genai=openvino_genai.__version__, images=args.images)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(subject, questions, Path(folder)))
    write(FILE, [first, *rows])


if __name__ == "__main__":
    main()
