# SPDX-License-Identifier: Apache-2.0
"""Write evidence.json of `tokenprune recommend`: results for and against the methods of the table of advice.

python dev/evidence.py            # rewrite it, after a run of an experiment or a change of the table
python dev/evidence.py --check    # exit with 1 if the file is stale

Published numbers are from experiments/papers, measured numbers from benchmarks/results. advice.py grades an entry by
its fields (questions, keep, photographs, asked, size, sure).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "experiments"))
import rows  # noqa: E402

FILE = ROOT / "benchmarks/tokenprune_bench/recommend/evidence.json"
RESULTS, PAPERS = ROOT / "benchmarks/results", ROOT / "benchmarks/experiments/papers"
# Our kinds of question for each kind of evidence. (): all kinds.
IMAGES = {
    "general": (),
    "reading": ("digits", "word"),
    "pages": ("document", "chart"),
    "places": ("grounding", "position"),
    "counting": ("count",),
}
RUNS = {
    "headline.jsonl": IMAGES,
    "all_methods-demo_smol.jsonl": IMAGES,
    "all_methods-demo_qwen.jsonl": IMAGES,
    "bench.jsonl": IMAGES,
    "bench_videos.jsonl": {"video": ()},
    "pages.jsonl": {"pages": ()},
}
UNPRUNED = 576
SMALLER = "downsample"  # `recommend` shows it beside each row
# The published numbers for each kind of evidence: the mean of a source, or one benchmark.
PUBLISHED = {"general": None, "reading": "textvqa"}
NEAR = 2.0  # points within which two papers print the same
SURE = 1.96  # standard errors of an interval of 95 %
Entry = dict[str, Any]


def entries() -> Iterator[Entry]:
    """Yield the entries of the advised methods and of a smaller image."""
    from tokenprune_bench.recommend.advice import load_advice

    advised = {advice.method for advice in load_advice().values()} | {SMALLER}
    for source_entries in (published(), accuracy(), published_speed(), measured_speed()):
        yield from (item for item in source_entries if item["method"] in advised)


def entry(method: str, questions: str | None, keep: float | None, text: str, source: str, **more: Any) -> Entry:
    """Return an entry. `questions` or `keep` is None if the entry applies to any."""
    return {"method": method, "questions": questions, "keep": keep, "figure": text, "source": source} | more


def accuracy() -> Iterator[Entry]:
    """Yield the accuracy of each method by kind of question in our runs, on drawn images and small models."""
    for name, tasks in RUNS.items():
        kinds, records = _run(name)
        unpatched = next(record for record in records if record["method"] == "unpatched")
        chance = {record["keep"]: record for record in records if record["method"] == "random"}
        for record in records:
            if record["method"] in ("unpatched", "random") or record["keep"] not in chance:
                continue
            for task, question_kinds in tasks.items():
                indices = [index for index, kind in enumerate(kinds) if not question_kinds or kind in question_kinds]
                if not indices:  # the run lacks this kind
                    continue
                ours, full, by_chance = (
                    _means(result, indices) for result in (record, unpatched, chance[record["keep"]])
                )
                beyond = [100 * (a - b) for a, b in zip(ours, by_chance, strict=True)]
                error = SURE * stdev(beyond) / sqrt(len(beyond))
                low, high = fmean(beyond) - error, fmean(beyond) + error
                keep = record["stats"]["keep_ratio"]
                share = f" ({_share(record):.0%} averaged over layers)" if abs(_share(record) - keep) > 0.005 else ""
                text = (
                    f"{100 * fmean(ours):.1f} % of {len(indices)} drawn questions right at keep {keep:.2g}{share}, "
                    f"unpatched {100 * fmean(full):.1f}, "
                    f"{fmean(beyond):+.1f} [{low:.1f}, {high:.1f}] over random; {record['environment']['model']}"
                )
                yield entry(
                    record["method"], task, round(keep, 3), text, f"benchmarks/results/{name}", about="accuracy",
                    kind="measured by us", asked=len(indices), photographs=False, sure=low > 0,
                    size=_size(record["environment"]["model"]),
                )  # fmt: skip


def _run(name: str) -> tuple[list[str], list[Entry]]:
    """Return the kind of each question of a run, and its results as the benchmark writes them."""
    header, records = rows.read(RESULTS / name)
    records = [record for record in records if record["record"] == "result"]
    if "kind_of_question" in header:
        return [header["kinds"][int(number_of_kind)] for number_of_kind in header["kind_of_question"]], records
    shared_fields = {"environment": {"model": header["model"]}}
    for record in records:  # methods before the first layer
        stats = {"keep_ratio": record["keep"], "visual_tokens_average": record["keep"], "visual_tokens_in": 1}
        record |= shared_fields | {"right": [record["right"]], "stats": stats}
    return header["kinds"], records


def _means(record: Entry, indices: list[int]) -> list[float]:
    """Return the share of seeds with a right answer for each question."""
    return [fmean(right[index] == "1" for right in record["right"]) for index in indices]


def _share(record: Entry) -> float:
    stats = record["stats"]
    return stats["visual_tokens_average"] / stats["visual_tokens_in"]


@cache
def _size(model: str) -> float:
    """Return the parameters of a shipped model's decoder."""
    from transformers import AutoConfig

    from tokenprune.models.decoder_shape import DecoderShape
    from tokenprune_demo import MODELS

    config = AutoConfig.from_pretrained(MODELS[model.removesuffix(" (shipped)")])
    return float(DecoderShape.from_config(config.get_text_config()).num_weights)


def published() -> Iterator[Entry]:
    """Yield published accuracy, in percent of the unpruned model."""
    data = json.loads((PAPERS / "llava15_7b.json").read_text())
    unpatched_values = {row["source"]: row["values"] for row in data["rows"] if row["method"] == "unpatched"}
    published_rows = []
    for row in data["rows"]:
        source = data["sources"][row["source"]]
        for questions, key in PUBLISHED.items():
            if key is None:
                percent, what = row.get("average"), "the mean over its benchmarks"
            else:
                value, full = row["values"].get(key), unpatched_values.get(row["source"], {}).get(key)
                doubted = key in row.get("doubt", {})
                percent = None if value is None or full is None or doubted else round(100 * value / full, 1)
                what = "TextVQA"
            if percent is not None and row["method"] != "unpatched":
                published_rows.append((row, source, questions, percent, what))
    for row, source, questions, percent, what in published_rows:
        others = [
            other
            for other, printed, asked, theirs, _ in published_rows
            if (other["method"], other["budget"], asked) == (row["method"], row["budget"], questions)
            and printed["arxiv"] != source["arxiv"]
            and row["method"] not in (printed["proposes"], source["proposes"])
            and abs(theirs - percent) <= NEAR
        ]
        table = "" if source["table"] == "not recorded" else f", {source['table']}"
        text = f"{percent:g} % of the unpruned {data['model']}, {what}, with {row['budget']} of {UNPRUNED} tokens"
        yield entry(
            row["method"], questions, round(row["budget"] / UNPRUNED, 3), text,
            f"{source['title'].partition(':')[0]}, arXiv {source['arxiv']}{table}", about="accuracy", kind="published",
            asked=None, photographs=True, sure=bool(others), size=_billions(data["model"]),
        )  # fmt: skip


def published_speed() -> Iterator[Entry]:
    """Yield published times with a known number of kept tokens."""
    speedups = json.loads((PAPERS / "speedups.json").read_text())
    ratios = [row.get("ratio") or row["before"] / row["after"] for row in speedups]
    for row, ratio in zip(speedups, ratios, strict=True):
        counts = re.fullmatch(r"(\d+) to (\d+) tokens", row["setting"])
        if counts is None:
            continue
        # Sources that measured this method on this model and setting within a tenth of each other.
        same = [
            other
            for other, theirs in zip(speedups, ratios, strict=True)
            if all(other[key] == row[key] for key in ("method", "model", "measured", "setting"))
            and other["source"] != row["source"]
            and max(theirs / ratio, ratio / theirs) <= 1.15
        ]
        device = f" on {row['device']}" if row["device"] else ""
        text = f"{row['measured']} x{ratio:.2f} as fast: {row['model']}{device}, {row['setting']}, the tower left out"
        yield entry(
            row["method"], None, round(int(counts[2]) / int(counts[1]), 3), text, f"{row['source']}, {row['where']}",
            about="time", kind="published", asked=None, photographs=True, sure=bool(same),
            size=_billions(row["model"]),
        )  # fmt: skip


def _billions(model: str) -> float:
    return 1e9 * float(re.search(r"(\d+)B", model)[1])


def measured_speed() -> Iterator[Entry]:
    """Yield our times of quiet rows: from image to first token, of prefill, of a server, of choosing, of blocks."""

    def timed(method: str, questions: str | None, keep: float | None, text: str, name: str, **more: Any) -> Entry:
        base = {"about": "time", "kind": "measured by us", "asked": None, "photographs": True, "size": None}
        return entry(method, questions, keep, text, f"benchmarks/results/{name}", **(base | {"sure": True} | more))

    header, records = rows.quiet(RESULTS / "headline.jsonl")
    for record in records:
        if "timing" in record:
            model, timing = record["environment"]["model"], record["timing"]
            text = (
                f"{timing['ttft_ms_unpatched']['p50']:.0f} to {timing['ttft_ms']['p50']:.0f} ms from the image to the "
                f"first token, tower included: {model}, keep {record['keep']:g}, {record['threads']} CPU threads"
            )
            sure = timing["ttft_ratio"]["p80"] < 1
            yield timed(record["method"], None, record["keep"], text, "headline.jsonl", sure=sure, size=_size(model))
    header, records = rows.quiet(RESULTS / "cpu/efficiency.jsonl")
    for record in records:
        if "speedup" in record:
            text = (
                f"prefill x{record['speedup']['p50']:.1f} as fast: a decoder of {header['parameters'] / 1e6:.0f} M "
                f"random parameters on {header['threads']} CPU threads, {record['visual']} to {record['keep']} tokens, "
                "the tower left out"
            )
            share = round(record["keep"] / record["visual"], 3)
            size = float(header["parameters"])
            yield timed(record["method"], None, share, text, "cpu/efficiency.jsonl", size=size)
    header, records = rows.quiet(RESULTS / "cpu/before_pixels.jsonl")
    by_way = {row["way"]: row["ms"] for row in records if (row["megapixels"], row["cores"]) == (12, 1)}
    if by_way:
        text = (
            f"{by_way['unpatched']:.0f} to {by_way['budget before pixels']:.0f} ms to decode and preprocess a "
            "JPEG of 12 megapixels on a core for Qwen2.5-VL, with max_visual_tokens=320"
        )
        yield timed("divprune", "clients", None, text, "cpu/before_pixels.jsonl")
    served = rows.lines(RESULTS / "serving.jsonl")
    if served:
        best = max(served, key=lambda row: (row["concurrency"], row["speedup"]))
        off = fmean(row["prompt_tokens"] for row in served if row["setting"] == "off")
        text = (
            f"a vLLM server answers x{best['speedup']:.1f} as many requests a second: {best['concurrency']} at once, "
            f"{off:.0f} to {best['prompt_tokens']:.0f} prompt tokens, a decoder of 100 M random parameters on "
            f"{best['cpus']} CPU cores"
        )
        keep = float(best["setting"].removeprefix("keep "))
        yield timed(best["method"], "server", keep, text, "serving.jsonl", size=1e8)
    yield from choosing(timed)
    header, video = rows.quiet(RESULTS / "pevlm.jsonl")
    frames = header["frames"][-1]
    times = {row["way"]: row["values"][-1] for row in video if row["what"] == "prefill, ms"}
    if len(times) == 2:
        text = f"prefill of {frames} frames in blocks x{times['full'] / times['blocks']:.1f} as fast, all tokens there"
        yield timed("pevlm", "long-video", None, f"{text}: a small random decoder on a CPU", "pevlm.jsonl")


def choosing(timed: Any) -> Iterator[Entry]:
    """Yield the selection time of `dart` and `divprune` among most tokens, from scaling.jsonl."""
    _, records = rows.quiet(RESULTS / "cpu/scaling.jsonl")
    points = {record["method"]: record["points"] for record in records if record["what"] == "selection"}
    if not {"dart", "divprune"} <= points.keys():
        return
    far = max(set(points["dart"]) & set(points["divprune"]), key=int)
    if all("seconds" in points[name][far] for name in ("dart", "divprune")):
        ours, other = (1e3 * points[name][far]["seconds"] for name in ("dart", "divprune"))
        text = f"choosing among {far} tokens takes it {ours:.0f} ms, `divprune` {other:.0f} ms, on a CPU"
        yield timed("dart", "long-prompts", None, text, "cpu/scaling.jsonl")


def text() -> str:
    """Return the file with one entry per line, for readable diffs."""
    lines = ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in entries())
    return f'{{\n "made_by": "python dev/evidence.py",\n "evidence": [\n{lines}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    new_text = text()
    if parser.parse_args().check:
        sys.exit(not FILE.is_file() or FILE.read_text() != new_text)
    FILE.write_text(new_text)


if __name__ == "__main__":
    main()
