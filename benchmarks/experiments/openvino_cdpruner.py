# SPDX-License-Identifier: Apache-2.0
"""CDPruner as OpenVINO GenAI has it, beside our `cdpruner`: the same model, images, questions and numbers of tokens.

    pip install openvino-genai
    python benchmarks/experiments/openvino_cdpruner.py           # measure, into results/openvino_cdpruner.jsonl
    python benchmarks/experiments/openvino_cdpruner.py --page    # write the table into docs/results/serving.md

The shipped Qwen2.5-VL is exported (openvino_export.py) and asked its held-out questions by both engines, in float32.
Which tokens VLMPipeline keeps it does not tell; here its language model is exchanged for one that answers with the
places of the tokens it was given. So three things can be told apart: whether both choose the same tokens, whether the
choice is the one that GenAI's source describes (`described`), and whether the same tokens give the same answer.
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
PRUNED = 75  # per cent
WEIGHTS = (0.0, 0.5, 1.0)
COLUMNS = 24  # of the largest grid of tokens
SPLIT = "CDPRUNER_SPLIT_THRESHOLD"  # GenAI reads it from the environment; 0 chooses among all tokens at once


class Pipeline:
    """VLMPipeline on the exported model. language: stands in for its language model."""

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
        """Return the tokens of a greedy answer. to_the_end: do not stop at the model's end token."""
        import numpy as np

        genai, said = self.genai, []

        class Listener(genai.StreamerBase):
            def write(self, token: Any) -> Any:
                said.extend(token if isinstance(token, list) else [token])
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = self.pipeline.get_generation_config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, to_the_end, False
        config.apply_chat_template = False
        config.pruning_ratio, config.relevance_weight = pruned, weight
        pixels = self.tensor(np.asarray(image)[None])
        self.pipeline.generate(prompt, images=[pixels], generation_config=config, streamer=Listener())
        return said


@dataclass
class Asked:
    """One question, as our side sees it."""

    example: Example
    image: Any
    prompt: str
    inputs: dict[str, Any]
    visual: Tensor  # bool `[n]`, the visual places of the prompt
    features: Tensor  # `[tokens, D]`
    around: Tensor  # `[m, D]`, embeddings of all text outside of the image's tags
    answers: dict[Any, str] = field(default_factory=dict)

    @property
    def first(self) -> int:
        return int(self.visual.nonzero()[0])


def asked(subject: Model, images: int, kinds: tuple[str, ...]) -> Iterator[Asked]:
    """Questions about images whose sides are whole tokens, so that neither engine resizes."""
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
            found = subject.model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
            embedded = subject.model.get_input_embeddings()(ids)
        features = torch.cat([*getattr(found, "pooler_output", found)])
        yield Asked(example, image, subject.prompt([image], example.question), inputs, visual, features, embedded[text])


def described(kept: Tensor, features: Tensor, text: Tensor, weight: float, halves: bool) -> float:
    """Return which share of `kept` is what GenAI's source says. kept: places, ascending. features: `[n, D]`. text:
    `[m, D]`.

    Relevance is the cosine to one mean embedding of all text, before and behind the image; the kernel is a linear mix
    of cosines and of cosines weighed by it. With `halves` each half of the tokens is a set of its own, and gives half
    of what is kept.
    """
    ends = [0, len(features) // 2, len(features)] if halves else [0, len(features)]
    numbers = [len(kept) // 2, len(kept) - len(kept) // 2] if halves else [len(kept)]
    common = 0
    for (start, end), number in zip(itertools.pairwise(ends), numbers, strict=True):
        found = {place - start for place in kept.tolist() if start <= place < end}
        common += max(len(found & set(one)) for one in greedy(features[start:end], text, weight, number))
    return common / len(kept)


def greedy(features: Tensor, text: Tensor, weight: float, number: int) -> Iterator[list[int]]:
    """Yield what may be kept of one set of tokens: one choice for each token that may be the first, since rounding
    decides where several are worth the same."""
    x, mean = normalize(features.double(), dim=1), normalize(text.double().mean(0), dim=0)
    relevance = x @ mean
    relevance = (relevance - relevance.min()) / (relevance.max() - relevance.min() + 1e-6)
    kernel = (x @ x.T) * (1 - weight + weight * torch.outer(relevance, relevance))
    worth = kernel.diagonal()
    for pick in (worth > worth.max() - 1e-5).nonzero().flatten().tolist():
        gain, rows, picks = worth.clone(), torch.zeros(0, len(x), dtype=torch.double), []
        for _ in range(number):
            row = (kernel[pick] - rows[:, pick] @ rows) / gain[pick].clamp(min=1e-10).sqrt()
            rows, gain = torch.cat([rows, row[None]]), gain - row**2
            gain[pick] = -torch.inf
            picks.append(pick)
            pick = int(gain.argmax())
        yield sorted(picks)


def seen(one: Asked, probe: Pipeline, weight: float) -> Tensor:
    """Return the places of the visual tokens that GenAI's language model is given, ascending."""
    from openvino_export import FIRST_CODE

    tokens = int(one.visual.sum())
    codes = probe.ask(one.prompt, one.image, tokens + 1, PRUNED, weight, to_the_end=True)
    length, *places = (code - FIRST_CODE for code in codes)
    columns = int(one.inputs["image_grid_thw"][0, 2]) // 2
    places = places[: length - int((~one.visual).sum())]
    return torch.tensor([place // COLUMNS * columns + place % COLUMNS for place in places])


def logit_gap(subject: Model, one: Asked, folder: Path) -> float:
    """Return by how much the exported language model's logits differ from ours, at most; all tokens stay."""
    import openvino as ov

    given: dict[str, Any] = {}
    hook = subject.model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: given.update(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        expected = subject.model(**one.inputs).logits
    hook.remove()
    language = ov.compile_model(folder / "openvino_language_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    said = language({
        "inputs_embeds": given["inputs_embeds"].numpy(), "attention_mask": one.inputs["attention_mask"].numpy(),
        "position_ids": given["position_ids"][-3:].numpy(), "beam_idx": torch.zeros(1, dtype=torch.int).numpy(),
    })["logits"]  # fmt: skip
    return float((torch.from_numpy(said) - expected).abs().max())


def ours(subject: Model, one: Asked, theta: float, number: int) -> tuple[Tensor, str]:
    """Return the places that our `cdpruner` keeps, and the answer."""
    with tokenprune.patched(subject.model, "cdpruner", keep=number, theta=theta, record=True, guard="off"):
        (answer,) = subject.generate(one.inputs)
        kept = torch.tensor(tokenprune.stats(subject.model).cuts[0].kept[0])
    return kept[one.visual[kept]] - one.first, answer


def with_tokens(subject: Model, one: Asked, places: Tensor) -> str:
    """Return our answer to the tokens that another chose."""
    Replay.kept = torch.zeros(1, int(one.visual.sum()), dtype=torch.bool)
    Replay.kept[0, places] = True
    with tokenprune.patched(subject.model, "replay", keep=len(places), guard="off"):
        return subject.generate(one.inputs)[0]


def right(one: Asked, answer: str) -> bool:
    return one.example.is_right(answer.rstrip("."))


def measure(subject: Model, questions: list[Asked], folder: Path) -> Iterator[dict[str, Any]]:
    from openvino_export import export, probe

    exported = folder / "model"
    exported.mkdir()
    export(subject.model, subject.processor, exported)
    vocabulary, width = subject.model.get_input_embeddings().weight.shape
    decode = subject.processor.tokenizer.decode
    tokens = subject.max_new_tokens

    def answer(one: Asked, pipeline: Pipeline, pruned: int, weight: float) -> str:
        said = pipeline.ask(one.prompt, one.image, tokens, pruned, weight, to_the_end=False)
        return decode(said, skip_special_tokens=True)

    whole = Pipeline(exported)
    plain = [(subject.generate(one.inputs)[0], answer(one, whole, 0, 0.5)) for one in questions]
    yield {
        "pruned": 0, "questions": len(questions), "same_answer": sum(a == b for a, b in plain),
        "right": sum(right(one, b) for one, (_, b) in zip(questions, plain, strict=True)),
        "right_ours": sum(right(one, a) for one, (a, _) in zip(questions, plain, strict=True)),
        "logit_gap": logit_gap(subject, questions[0], exported),
    }  # fmt: skip
    for threshold in (None, "0"):
        if threshold is not None:
            os.environ[SPLIT] = threshold
        whole = Pipeline(exported)  # reads the environment
        looking = Pipeline(exported, probe(width, vocabulary, questions[0].first, COLUMNS))
        for weight, one in itertools.product(WEIGHTS, questions):
            theirs = seen(one, looking, weight)
            mine, said = ours(subject, one, weight, len(theirs))
            their_answer = answer(one, whole, PRUNED, weight)
            yield {
                "image": one.example.path.name, "question": one.example.question, "weight": weight,
                "halves": threshold is None, "tokens": int(one.visual.sum()), "theirs": theirs.tolist(),
                "ours": mine.tolist(), "right": right(one, their_answer), "right_ours": right(one, said),
                "described": described(theirs, one.features, one.around, weight, threshold is None),
                "same_answer": their_answer == with_tokens(subject, one, theirs),
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
    theirs, mine = set(row["theirs"]), set(row["ours"])
    return len(theirs & mine) / len(theirs | mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--page", action="store_true", help="write the table of an earlier run into the page")
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
