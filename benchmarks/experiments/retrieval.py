# SPDX-License-Identifier: Apache-2.0
"""Fewer vectors of a document: tokens that leave before they are vectors, beside vectors that merge.

    python benchmarks/experiments/retrieval_training.py --out FOLDER
    python benchmarks/experiments/retrieval.py --model FOLDER
    python benchmarks/experiments/retrieval.py --page

A ColQwen2 that was trained on drawn documents finds 240 others by questions that name three of the four things that a
document shows; one document alone shows these three. Each has 256 visual vectors and those of the text around, which
stay. `random` is drawn three times. DocPruner's threshold is the one that leaves that many vectors on average. Row
means are means of equal runs of patches, row by row. Intervals of 95 % draw questions anew. Times stay in the raw data:
the machine was loaded, and nine tenths of the encoding are the tower.

What was expected, before the first run: at equal vectors Ward before pool, pool no worse than random, and divprune near
random; half of the vectors by Ward for less than 1 point of recall, by pool for 1 to 5; at 28 vectors Ward above 80 %
of the recall with all, random below 40 %, and DocPruner between them.
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
SEEDS = 3  # of random
TIMED, REPEATS = (128, 28), 3
DOCUMENTS, BATCH = 240, 8
RESULTS = Path(__file__).parents[1] / "results/retrieval.jsonl"
DOCS = Path(__file__).parents[2] / "docs/results/retrieval.md"
PLACES = {tokenprune.Site.IN_ENCODER: "tower", tokenprune.Site.PRE_LLM: "entry", tokenprune.Site.IN_LLM: "layer 2"}
NAMES = {"unpruned": "all vectors", "row_means": "row means", "docpruner": "DocPruner", "ward": "Ward"}


def unique_questions(pages: list[Page]) -> list[tuple[int, str]]:
    """(page, question) of all questions that one page alone answers."""
    found = []
    for number, page in enumerate(pages):
        for left_out in range(4):
            named = {fact for place, fact in enumerate(page.facts) if place != left_out}
            if sum(named <= set(other.facts) for other in pages) == 1:
                found.append((number, question(page, left_out)))
    return found


def stored(features: Tensor, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(pooler_output=features)


class Retriever:
    """The model, the documents that it looks for, and what it makes of questions."""

    def __init__(self, folder: Path) -> None:
        self.model = ColQwen2ForRetrieval.from_pretrained(folder).eval()
        self.prompts = Prompts(self.model)
        self.pages = [draw(TEST_SEED, number) for number in range(DOCUMENTS)]
        asked = unique_questions(self.pages)
        self.right = torch.tensor([page for page, _ in asked])
        with torch.no_grad():
            said = tokenprune.vectors(self.model(**self.prompts.questions([text for _, text in asked])))
        self.asked, self.lengths = torch.cat(said), torch.tensor([len(one) for one in said])
        self.visual = self.prompts.page == self.model.config.vlm_config.image_token_id
        self.features = features(self.model, self.prompts, self.pages).float()

    @torch.no_grad()
    def encode(self, tower: bool = False) -> tuple[list[Tensor], float]:
        """Return the vectors of each document, and how many visual ones it has on average. tower: whether it runs; most
        methods act after it, and get what it once made of each document."""
        found: list[Tensor] = []
        for start in range(0, len(self.pages), BATCH):
            inputs = self.prompts.pages(self.pages[start : start + BATCH])
            if not tower:
                self.model.vlm.visual.forward = partial(stored, self.features[start : start + BATCH].flatten(0, 1))
            found += tokenprune.vectors(self.model(**inputs))
            vars(self.model.vlm.visual).pop("forward", None)
        text = int((~self.visual).sum())
        return found, statistics.fmean(len(one) - text for one in found)

    @torch.no_grad()
    def attention(self) -> Tensor:
        """`[documents, TOKENS]`: what the last token of a page gives to its patches in the last layer, over heads."""
        kept = self.model.vlm.config._attn_implementation
        self.model.vlm.set_attn_implementation("eager")
        found = []
        for start in range(0, len(self.pages), BATCH):
            output = self.model(**self.prompts.pages(self.pages[start : start + BATCH]), output_attentions=True)
            found.append(output.attentions[-1][:, :, -1, self.visual].mean(1))
        self.model.vlm.set_attn_implementation(kept)
        return torch.cat(found)

    def result(self, where: str, method: str, vectors: int, found: list[Tensor], mean: float) -> dict[str, Any]:
        """Rank all documents for each question."""
        closest = torch.stack([(self.asked @ page.T).amax(1) for page in found], 1)  # of each token of each question
        scores = torch.stack([one.mean(0) for one in closest.split(self.lengths.tolist())])
        own = scores.gather(1, self.right[:, None])
        ranks = (scores > own).sum(1)
        others = scores.scatter(1, self.right[:, None], -torch.inf).amax(1)
        return {
            "record": "result", "where": where, "method": method, "vectors": vectors, "mean": round(mean, 1),
            "ranks": ranks.tolist(), "margin": round((own[:, 0] - others).mean().item(), 4),
        }  # fmt: skip


def ward(vectors: Tensor, number: int) -> Tensor:
    """Return means of clusters, of length 1 again."""
    cluster = torch.tensor(fcluster(linkage(vectors.numpy(), "ward"), number, "maxclust")) - 1
    sums = torch.zeros(int(cluster.max()) + 1, WIDTH).index_add_(0, cluster, vectors)
    return torch.nn.functional.normalize(sums, dim=-1)


def row_means(vectors: Tensor, number: int) -> Tensor:
    return torch.nn.functional.normalize(torch.stack([one.mean(0) for one in vectors.tensor_split(number)]), dim=-1)


def docpruner(attention: Tensor, number: int) -> Tensor:
    """bool `[documents, TOKENS]`: above mean + k deviations, with the one k that leaves `number` on average."""
    standard = (attention - attention.mean(1, keepdim=True)) / attention.std(1, keepdim=True)
    least = standard.flatten().sort(descending=True).values[number * len(attention)]
    return (standard > least) | (standard == standard.amax(1, keepdim=True))


def cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    with torch.inference_mode():
        run()
    return time.process_time() - start


def measure(retriever: Retriever) -> list[dict[str, Any]]:
    whole, mean = retriever.encode()
    rows = [retriever.result("none", "unpruned", TOKENS, whole, mean)]
    visual, text = [page[retriever.visual] for page in whole], [page[~retriever.visual] for page in whole]
    attention = retriever.attention()

    def late(name: str, number: int, choose: Callable[[int, Tensor], Tensor]) -> None:
        start = time.process_time()
        merged = [choose(place, page) for place, page in enumerate(visual)]
        seconds = (time.process_time() - start) / len(visual)
        found = [torch.cat(both) for both in zip(merged, text, strict=True)]
        made = retriever.result("after", name, number, found, statistics.fmean(map(len, merged)))
        rows.append(made | {"seconds": round(seconds, 5)})
        print(_short(rows[-1]), flush=True)

    for number in VECTORS:
        chosen = docpruner(attention, number)
        late("ward", number, lambda place, page, n=number: ward(page, n))
        late("row_means", number, lambda place, page, n=number: row_means(page, n))
        late("docpruner", number, lambda place, page, chosen=chosen: page[chosen[place]])
    batch = retriever.prompts.pages(retriever.pages[:BATCH])
    for number in VECTORS:
        for name in ENTRY:
            for seed in range(SEEDS if name == "random" else 1):
                options = {"seed": seed} if name == "random" else {}
                plain, fewer = [], []
                try:
                    with tokenprune.patched(retriever.model, name, keep=number / TOKENS, **options):
                        found, mean = retriever.encode(tower=name == "tome")
                    for _ in range(REPEATS if number in TIMED and not seed else 0):
                        plain.append(cpu_seconds(lambda: retriever.model(**batch)))
                        with tokenprune.patched(retriever.model, name, keep=number / TOKENS, **options):
                            fewer.append(cpu_seconds(lambda: retriever.model(**batch)))
                except tokenprune.TokenPruneError as refusal:
                    rows.append({"record": "refused", "method": name, "vectors": number, "reason": str(refusal)})
                    continue
                made = retriever.result("entry", name, number, found, mean)
                rows.append(made | options | ({"time": round(min(fewer) / min(plain), 3)} if plain else {}))
                print(_short(rows[-1]), flush=True)
    return rows


def _short(row: dict[str, Any]) -> str:
    return f"{row['where']} {row['method']} {row['vectors']}: {100 * recall(row).mean():.1f} {row.get('time', '')}"


def recall(row: dict[str, Any]) -> np.ndarray:
    return (np.array(row["ranks"]) == 0).astype(float)


def gain(row: dict[str, Any]) -> np.ndarray:
    """nDCG@5 of each question, of which one page is right."""
    ranks = np.array(row["ranks"])
    return np.where(ranks < 5, 1 / np.log2(ranks + 2), 0.0)


def interval(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """95 % of the mean difference in points, questions drawn anew."""
    drawn = np.random.default_rng(0).integers(0, len(one), (2000, len(one)))
    low, high = np.percentile(100 * (one - other)[drawn].mean(1), [2.5, 97.5])
    return float(low), float(high)


def table(rows: list[dict[str, Any]]) -> str:
    """The page's table: recall@1 for each number of vectors, and nDCG@5 at half; bold where an interval of the
    difference from Ward at as many vectors leaves out 0."""
    made = [row for row in rows if row["record"] == "result"]
    whole = next(row for row in made if row["where"] == "none")
    lines = [
        "| where, what | " + " | ".join(map(str, VECTORS)) + " | nDCG@5 at 128 |",
        "|---|" + "---|" * (len(VECTORS) + 1),
    ]
    for where in ("after", "entry"):
        for name in dict.fromkeys(row["method"] for row in made if row["where"] == where):
            cells = []
            for number in VECTORS:
                same = [row for row in made if (row["where"], row["method"], row["vectors"]) == (where, name, number)]
                if not same:
                    cells.append("refused")
                    continue
                found = np.mean([recall(row) for row in same], 0)
                best = next(row for row in made if (row["method"], row["vectors"]) == ("ward", number))
                low, high = interval(found, recall(best))
                said = f"{100 * found.mean():.1f}"
                cells.append(said if low <= 0 <= high else f"**{said}**")
            half = [row for row in made if (row["where"], row["method"], row["vectors"]) == (where, name, 128)]
            ndcg = f"{100 * np.mean([gain(row) for row in half]):.1f}" if half else ""
            label = NAMES.get(name, f"[`{name}`](../methods/{name}.md)")
            place = "after" if where == "after" else PLACES[tokenprune.method_info(name).site]
            lines.append(f"| {place}: {label} | {' | '.join(cells)} | {ndcg} |")
    asked = len(whole["ranks"])
    said = (
        f"{asked} questions, {DOCUMENTS} documents; with all 256 vectors recall@1 is {100 * recall(whole).mean():.1f} %"
    )
    lines += ["", f"{said} and nDCG@5 {100 * gain(whole).mean():.1f}."]
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
