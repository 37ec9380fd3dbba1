# SPDX-License-Identifier: Apache-2.0
"""Write evidence.json of `tokenprune recommend`: what speaks for the methods of the table of advice, and against them.

python dev/evidence.py            # write it anew, after a run of experiments/ that it reads, or a change of the table
python dev/evidence.py --check    # exit with 1 where the file is not what this would write

Nothing in the file is typed in here: published numbers come from experiments/papers, ours from benchmarks/results.
What each entry says of itself (questions, keep, photographs, asked, size, sure) is what advice.py grades it by.
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
# The kinds of our questions behind each kind of evidence; (): all of them.
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
SMALLER = "downsample"  # what `recommend` shows beside each row
# The published numbers behind each kind of evidence: the mean that a source prints, or one benchmark.
PUBLISHED = {"general": None, "reading": "textvqa"}
NEAR = 2.0  # points within which two papers print the same
SURE = 1.96  # standard errors of an interval of 95 %
Entry = dict[str, Any]


def entries() -> Iterator[Entry]:
    """Yield the entries of the file, those of the advised methods and of a smaller image alone."""
    from tokenprune_bench.recommend.advice import load_advice

    advised = {one.method for one in load_advice().values()} | {SMALLER}
    for made in (published(), accuracy(), published_speed(), measured_speed()):
        yield from (one for one in made if one["method"] in advised)


def entry(method: str, questions: str | None, keep: float | None, text: str, source: str, **more: Any) -> Entry:
    """Return an entry. questions: None where any will do. keep: None where the number holds at any."""
    return {"method": method, "questions": questions, "keep": keep, "figure": text, "source": source} | more


def accuracy() -> Iterator[Entry]:
    """Yield how many questions of each kind a method answered right in our runs, on drawn images and small models."""
    for name, tasks in RUNS.items():
        kinds, records = _run(name)
        whole = next(one for one in records if one["method"] == "unpatched")
        chance = {one["keep"]: one for one in records if one["method"] == "random"}
        for record in records:
            if record["method"] in ("unpatched", "random") or record["keep"] not in chance:
                continue
            for task, wanted in tasks.items():
                places = [place for place, kind in enumerate(kinds) if not wanted or kind in wanted]
                if not places:  # the run has no questions of this kind
                    continue
                ours, full, by_chance = (_means(one, places) for one in (record, whole, chance[record["keep"]]))
                beyond = [100 * (a - b) for a, b in zip(ours, by_chance, strict=True)]
                error = SURE * stdev(beyond) / sqrt(len(beyond))
                low, high = fmean(beyond) - error, fmean(beyond) + error
                keep = record["stats"]["keep_ratio"]
                share = f" ({_share(record):.0%} averaged over layers)" if abs(_share(record) - keep) > 0.005 else ""
                text = (
                    f"{100 * fmean(ours):.1f} % of {len(places)} drawn questions right at keep {keep:.2g}{share}, "
                    f"unpatched {100 * fmean(full):.1f}, "
                    f"{fmean(beyond):+.1f} [{low:.1f}, {high:.1f}] over random; {record['environment']['model']}"
                )
                yield entry(
                    record["method"], task, round(keep, 3), text, f"benchmarks/results/{name}", about="accuracy",
                    kind="measured by us", asked=len(places), photographs=False, sure=low > 0,
                    size=_size(record["environment"]["model"]),
                )  # fmt: skip


def _run(name: str) -> tuple[list[str], list[Entry]]:
    """Return the kind of each question of a run, and its results as the benchmark writes them."""
    header, records = rows.read(RESULTS / name)
    records = [one for one in records if one["record"] == "result"]
    if "kind_of_question" in header:
        return [header["kinds"][int(one)] for one in header["kind_of_question"]], records
    alike = {"environment": {"model": header["model"]}}
    for one in records:  # whose methods act ahead of the first layer
        stats = {"keep_ratio": one["keep"], "visual_tokens_average": one["keep"], "visual_tokens_in": 1}
        one |= alike | {"right": [one["right"]], "stats": stats}
    return header["kinds"], records


def _means(record: Entry, places: list[int]) -> list[float]:
    """Return for each question how many of the seeds answered it right."""
    return [fmean(one[place] == "1" for one in record["right"]) for place in places]


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
    """Yield what papers print: percent of the unpruned model."""
    data = json.loads((PAPERS / "llava15_7b.json").read_text())
    whole = {row["source"]: row["values"] for row in data["rows"] if row["method"] == "unpatched"}
    found = []
    for row in data["rows"]:
        source = data["sources"][row["source"]]
        for questions, key in PUBLISHED.items():
            if key is None:
                percent, what = row.get("average"), "the mean over its benchmarks"
            else:
                value, full = row["values"].get(key), whole.get(row["source"], {}).get(key)
                doubted = key in row.get("doubt", {})
                percent = None if value is None or full is None or doubted else round(100 * value / full, 1)
                what = "TextVQA"
            if percent is not None and row["method"] != "unpatched":
                found.append((row, source, questions, percent, what))
    for row, source, questions, percent, what in found:
        others = [
            other
            for other, printed, asked, theirs, _ in found
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
    """Yield the published times that say how many tokens stay."""
    found = json.loads((PAPERS / "speedups.json").read_text())
    ratios = [row.get("ratio") or row["before"] / row["after"] for row in found]
    for row, ratio in zip(found, ratios, strict=True):
        counts = re.fullmatch(r"(\d+) to (\d+) tokens", row["setting"])
        if counts is None:
            continue
        # Sources that measured this method on this model and setting within a tenth of each other.
        same = [
            other
            for other, theirs in zip(found, ratios, strict=True)
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
    for one in records:
        if "timing" in one:
            model, timing = one["environment"]["model"], one["timing"]
            text = (
                f"{timing['ttft_ms_unpatched']['p50']:.0f} to {timing['ttft_ms']['p50']:.0f} ms from the image to the "
                f"first token, tower included: {model}, keep {one['keep']:g}, {one['threads']} CPU threads"
            )
            sure = timing["ttft_ratio"]["p80"] < 1
            yield timed(one["method"], None, one["keep"], text, "headline.jsonl", sure=sure, size=_size(model))
    header, records = rows.quiet(RESULTS / "cpu/efficiency.jsonl")
    for one in records:
        if "speedup" in one:
            text = (
                f"prefill x{one['speedup']['p50']:.1f} as fast: a decoder of {header['parameters'] / 1e6:.0f} M random "
                f"parameters on {header['threads']} CPU threads, {one['visual']} to {one['keep']} tokens, the tower "
                "left out"
            )
            share = round(one["keep"] / one["visual"], 3)
            size = float(header["parameters"])
            yield timed(one["method"], None, share, text, "cpu/efficiency.jsonl", size=size)
    served = rows.lines(RESULTS / "serving.jsonl")
    if served:
        best = max(served, key=lambda one: (one["concurrency"], one["speedup"]))
        off = fmean(one["prompt_tokens"] for one in served if one["setting"] == "off")
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
    times = {one["way"]: one["values"][-1] for one in video if one["what"] == "prefill, ms"}
    if len(times) == 2:
        text = f"prefill of {frames} frames in blocks x{times['full'] / times['blocks']:.1f} as fast, all tokens there"
        yield timed("pevlm", "long-video", None, f"{text}: a small random decoder on a CPU", "pevlm.jsonl")


def choosing(timed: Any) -> Iterator[Entry]:
    """Yield how long `dart` takes to choose among most tokens, beside `divprune`, from scaling.jsonl."""
    _, records = rows.quiet(RESULTS / "cpu/scaling.jsonl")
    points = {one["method"]: one["points"] for one in records if one["what"] == "selection"}
    if not {"dart", "divprune"} <= points.keys():
        return
    far = max(set(points["dart"]) & set(points["divprune"]), key=int)
    if all("seconds" in points[name][far] for name in ("dart", "divprune")):
        ours, other = (1e3 * points[name][far]["seconds"] for name in ("dart", "divprune"))
        text = f"choosing among {far} tokens takes it {ours:.0f} ms, `divprune` {other:.0f} ms, on a CPU"
        yield timed("dart", "long-prompts", None, text, "cpu/scaling.jsonl")


def text() -> str:
    """Return the file: an entry a line, so that changes can be read."""
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in entries())
    return f'{{\n "made_by": "python dev/evidence.py",\n "evidence": [\n{lines}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    made = text()
    if parser.parse_args().check:
        sys.exit(not FILE.is_file() or FILE.read_text() != made)
    FILE.write_text(made)


if __name__ == "__main__":
    main()
