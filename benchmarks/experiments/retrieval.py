# SPDX-License-Identifier: Apache-2.0
"""Compare ways to reduce the vectors of a document: drop tokens inside the model, or merge vectors afterwards.

    python benchmarks/experiments/retrieval_training.py --out FOLDER
    python benchmarks/experiments/retrieval.py --model FOLDER
    python benchmarks/experiments/retrieval.py --page

A ColQwen2 that was trained on drawn documents retrieves 240 other documents. A question names three of the four things
that a document shows, and only one document shows these three. Each document has 256 visual vectors and the vectors of
its text, which are kept. `random` runs with three seeds. DocPruner's threshold is set to give the same number of
vectors on average. Row means are means of runs of patches in row-major order. The 95 % intervals are bootstraps over
questions. The raw file results/retrieval.jsonl also has times, which the page omits: the machine was loaded, and the
tower takes nine tenths of the encoding.

Expectations before the first run: at equal vectors Ward above pool, pool not below random, and divprune close to
random; half of the vectors cost less than 1 point of recall with Ward and 1 to 5 points with pool; at 28 vectors Ward
reaches 80 % of the full recall, random less than 40 %, and DocPruner is in between.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import code_version, fill_page, header
from retrieval_training import TEST_SEED, TOKENS, WIDTH, Page, Prompts, draw, features, question
from rows import read, write
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor
from transformers import ColQwen2ForRetrieval
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tokenprune

VECTORS = (128, 85, 28, 10)
ENTRY = ("random", "uniform", "divprune", "dart", "pool", "tome")
SEEDS = 3  # for random
TIMED, REPEATS = (128, 28), 3
DOCUMENTS, BATCH = 240, 8
RESULTS = Path(__file__).parents[1] / "results/retrieval.jsonl"
DOCS = Path(__file__).parents[2] / "docs/results/retrieval.md"
PLACES = {tokenprune.Site.IN_ENCODER: "tower", tokenprune.Site.PRE_LLM: "entry", tokenprune.Site.IN_LLM: "layer 2"}
NAMES = {"unpruned": "all vectors", "row_means": "row means", "docpruner": "DocPruner", "ward": "Ward"}


def unique_questions(pages: list[Page]) -> list[tuple[int, str]]:
    """Return (page index, question) of all questions that exactly one page answers."""
    questions = []
    for index, page in enumerate(pages):
        for left_out in range(4):
            named = {fact for fact_index, fact in enumerate(page.facts) if fact_index != left_out}
            if sum(named <= set(other.facts) for other in pages) == 1:
                questions.append((index, question(page, left_out)))
    return questions


def stored(features: Tensor, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(pooler_output=features)


class Retriever:
    """The model with its documents, and the vectors of the questions."""

    def __init__(self, folder: Path) -> None:
        self.model = ColQwen2ForRetrieval.from_pretrained(folder).eval()
        self.prompts = Prompts(self.model)
        self.pages = [draw(TEST_SEED, index) for index in range(DOCUMENTS)]
        questions = unique_questions(self.pages)
        self.right = torch.tensor([page for page, _ in questions])
        with torch.no_grad():
            vectors = tokenprune.vectors(self.model(**self.prompts.questions([text for _, text in questions])))
        self.asked, self.lengths = (
            torch.cat(vectors),
            torch.tensor([len(question_vectors) for question_vectors in vectors]),
        )
        self.visual = self.prompts.page == self.model.config.vlm_config.image_token_id
        self.features = features(self.model, self.prompts, self.pages).float()

    @torch.no_grad()
    def encode(self, tower: bool = False) -> tuple[list[Tensor], float]:
        """Return the vectors of each document, and the average number of visual vectors.

        Most methods act after the vision tower, whose output is cached per document. With `tower`, the tower runs.
        """
        encoded: list[Tensor] = []
        for start in range(0, len(self.pages), BATCH):
            inputs = self.prompts.pages(self.pages[start : start + BATCH])
            if not tower:
                self.model.vlm.visual.forward = partial(stored, self.features[start : start + BATCH].flatten(0, 1))
            encoded += tokenprune.vectors(self.model(**inputs))
            vars(self.model.vlm.visual).pop("forward", None)
        text = int((~self.visual).sum())
        return encoded, statistics.fmean(len(vectors) - text for vectors in encoded)

    @torch.no_grad()
    def attention(self) -> Tensor:
        """Return the attention of a page's last token to its patches in the last layer, shape (documents, TOKENS)."""
        implementation = self.model.vlm.config._attn_implementation
        self.model.vlm.set_attn_implementation("eager")
        weights = []
        for start in range(0, len(self.pages), BATCH):
            output = self.model(**self.prompts.pages(self.pages[start : start + BATCH]), output_attentions=True)
            weights.append(output.attentions[-1][:, :, -1, self.visual].mean(1))
        self.model.vlm.set_attn_implementation(implementation)
        return torch.cat(weights)

    def result(self, where: str, method: str, vectors: int, encoded: list[Tensor], mean: float) -> dict[str, Any]:
        """Rank all documents for each question and return a record."""
        closest = torch.stack([(self.asked @ page.T).amax(1) for page in encoded], 1)  # (question tokens, documents)
        scores = torch.stack([of_question.mean(0) for of_question in closest.split(self.lengths.tolist())])
        of_right = scores.gather(1, self.right[:, None])
        ranks = (scores > of_right).sum(1)
        others = scores.scatter(1, self.right[:, None], -torch.inf).amax(1)
        return {
            "record": "result", "where": where, "method": method, "vectors": vectors, "mean": round(mean, 1),
            "ranks": ranks.tolist(), "margin": round((of_right[:, 0] - others).mean().item(), 4),
        }  # fmt: skip


def ward(vectors: Tensor, num_vectors: int) -> Tensor:
    """Merge vectors into normalized means of Ward clusters."""
    cluster = torch.tensor(fcluster(linkage(vectors.numpy(), "ward"), num_vectors, "maxclust")) - 1
    sums = torch.zeros(int(cluster.max()) + 1, WIDTH).index_add_(0, cluster, vectors)
    return torch.nn.functional.normalize(sums, dim=-1)


def row_means(vectors: Tensor, num_vectors: int) -> Tensor:
    return torch.nn.functional.normalize(
        torch.stack([run.mean(0) for run in vectors.tensor_split(num_vectors)]), dim=-1
    )


def docpruner(attention: Tensor, num_vectors: int) -> Tensor:
    """Return a mask, shape (documents, TOKENS), of attention above mean + k deviations.

    k is chosen so that documents keep `num_vectors` on average.
    """
    standard = (attention - attention.mean(1, keepdim=True)) / attention.std(1, keepdim=True)
    limit = standard.flatten().sort(descending=True).values[num_vectors * len(attention)]
    return (standard > limit) | (standard == standard.amax(1, keepdim=True))


def cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    with torch.inference_mode():
        run()
    return time.process_time() - start


def measure(retriever: Retriever) -> list[dict[str, Any]]:
    all_vectors, mean = retriever.encode()
    rows = [retriever.result("none", "unpruned", TOKENS, all_vectors, mean)]
    visual, text = [page[retriever.visual] for page in all_vectors], [page[~retriever.visual] for page in all_vectors]
    attention = retriever.attention()

    def late(name: str, num_vectors: int, choose: Callable[[int, Tensor], Tensor]) -> None:
        start = time.process_time()
        merged = [choose(index, page) for index, page in enumerate(visual)]
        seconds = (time.process_time() - start) / len(visual)
        encoded = [torch.cat(both) for both in zip(merged, text, strict=True)]
        record = retriever.result("after", name, num_vectors, encoded, statistics.fmean(map(len, merged)))
        rows.append(record | {"seconds": round(seconds, 5)})
        print(_short(rows[-1]), flush=True)

    for num_vectors in VECTORS:
        chosen = docpruner(attention, num_vectors)
        late("ward", num_vectors, lambda index, page, n=num_vectors: ward(page, n))
        late("row_means", num_vectors, lambda index, page, n=num_vectors: row_means(page, n))
        late("docpruner", num_vectors, lambda index, page, chosen=chosen: page[chosen[index]])
    batch = retriever.prompts.pages(retriever.pages[:BATCH])
    for num_vectors in VECTORS:
        for name in ENTRY:
            for seed in range(SEEDS if name == "random" else 1):
                options = {"seed": seed} if name == "random" else {}
                plain, fewer = [], []
                try:
                    with tokenprune.patched(retriever.model, name, keep=num_vectors / TOKENS, **options):
                        encoded, mean = retriever.encode(tower=name == "tome")
                    for _ in range(REPEATS if num_vectors in TIMED and not seed else 0):
                        plain.append(cpu_seconds(lambda: retriever.model(**batch)))
                        with tokenprune.patched(retriever.model, name, keep=num_vectors / TOKENS, **options):
                            fewer.append(cpu_seconds(lambda: retriever.model(**batch)))
                except tokenprune.TokenPruneError as refusal:
                    rows.append({"record": "refused", "method": name, "vectors": num_vectors, "reason": str(refusal)})
                    continue
                record = retriever.result("entry", name, num_vectors, encoded, mean)
                rows.append(record | options | ({"time": round(min(fewer) / min(plain), 3)} if plain else {}))
                print(_short(rows[-1]), flush=True)
    return rows


def _short(row: dict[str, Any]) -> str:
    return f"{row['where']} {row['method']} {row['vectors']}: {100 * recall(row).mean():.1f} {row.get('time', '')}"


def recall(row: dict[str, Any]) -> np.ndarray:
    return (np.array(row["ranks"]) == 0).astype(float)


def gain(row: dict[str, Any]) -> np.ndarray:
    """Return nDCG@5 of each question. Each question has one right page."""
    ranks = np.array(row["ranks"])
    return np.where(ranks < 5, 1 / np.log2(ranks + 2), 0.0)


def compute_interval(values: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean difference in points."""
    resampled = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    low, high = np.percentile(100 * (values - other)[resampled].mean(1), [2.5, 97.5])
    return float(low), float(high)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page's table: recall@1 for each number of vectors, and nDCG@5 at half.

    Bold if the interval of the difference from Ward at the same number of vectors excludes 0.
    """
    results = [row for row in rows if row["record"] == "result"]
    unpruned = next(row for row in results if row["where"] == "none")
    lines = [
        "| where, what | " + " | ".join(map(str, VECTORS)) + " | nDCG@5 at 128 |",
        "|---|" + "---|" * (len(VECTORS) + 1),
    ]
    for stage in ("after", "entry"):
        for name in dict.fromkeys(row["method"] for row in results if row["where"] == stage):
            cells = []
            for num_vectors in VECTORS:
                same = [
                    row
                    for row in results
                    if (row["where"], row["method"], row["vectors"]) == (stage, name, num_vectors)
                ]
                if not same:
                    cells.append("refused")
                    continue
                recalls = np.mean([recall(row) for row in same], 0)
                best = next(row for row in results if (row["method"], row["vectors"]) == ("ward", num_vectors))
                low, high = compute_interval(recalls, recall(best))
                text = f"{100 * recalls.mean():.1f}"
                cells.append(text if low <= 0 <= high else f"**{text}**")
            half = [row for row in results if (row["where"], row["method"], row["vectors"]) == (stage, name, 128)]
            ndcg = f"{100 * np.mean([gain(row) for row in half]):.1f}" if half else ""
            label = NAMES.get(name, f"[`{name}`](../methods/{name}.md)")
            label_of_site = "after" if stage == "after" else PLACES[tokenprune.method_info(name).site]
            lines.append(f"| {label_of_site}: {label} | {' | '.join(cells)} | {ndcg} |")
    num_questions = len(unpruned["ranks"])
    full_recall = f"{100 * recall(unpruned).mean():.1f} %"
    text = f"{num_questions} questions, {DOCUMENTS} documents; with all 256 vectors recall@1 is {full_recall}"
    lines += ["", f"{text} and nDCG@5 {100 * gain(unpruned).mean():.1f}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--page", action="store_true", help="write the table into docs/results/retrieval.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.model is not None:
        about = {"documents": DOCUMENTS, "code": code_version(), "model": "ColQwen2 of retrieval_training.py"}
        write(RESULTS, [header(torch.device("cpu"), **about), *measure(Retriever(args.model))])
    if args.page:
        fill_page(DOCS, "<!-- table -->", "<!-- end of table -->", table(read(RESULTS)[1]))


if __name__ == "__main__":
    main()
