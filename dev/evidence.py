# SPDX-License-Identifier: Apache-2.0
"""Write tokenprune/assets/evidence.json: what `tokenprune recommend` goes by, from the published tables and our runs.

python dev/evidence.py            # write it anew, after a run of benchmarks/ that it reads
python dev/evidence.py --check    # exit with 1 where the file is not what this would write

Nothing in the file is typed in here: published numbers come from benchmarks/papers, ours from benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tokenprune/assets/evidence.json"
RESULTS, PAPERS = ROOT / "benchmarks/results", ROOT / "benchmarks/papers"
# Which kinds of our questions stand for a task; (): all of them.
IMAGES = {"chat": (), "documents": ("digits", "word"), "grounding": ("grounding", "position")}
RUNS = {
    "all_methods-demo_qwen.jsonl": IMAGES,
    "all_methods-demo_vlm.jsonl": IMAGES,
    "bench_videos.jsonl": {"video": ()},
}
UNPRUNED = 576
# Which published numbers stand for a task: the mean that a source prints, or one benchmark.
PUBLISHED = {"chat": None, "documents": "textvqa"}


def evidence() -> dict[str, Any]:
    """Return the content of the file."""
    return {
        "made_by": "python dev/evidence.py",
        "accuracy": list(accuracy()),
        "published": list(published()),
        "speed": [*published_speed(), *measured_speed()],
    }


def accuracy() -> Iterator[dict[str, Any]]:
    """Yield how many questions of a task each method answered right in our runs; of the unpatched model too."""
    from tokenprune.bench.significance import pooled_interval

    for name, tasks in RUNS.items():
        header, *records = read(name)
        kinds = [header["kinds"][int(one)] for one in header["kind_of_question"]]
        for record in records:
            if record["record"] != "result":
                continue
            for task, wanted in tasks.items():
                places = [place for place, kind in enumerate(kinds) if not wanted or kind in wanted]
                right = ["".join(one[place] for place in places) for one in record["right"]]
                share, low, high = pooled_interval(right)
                plain = {"method": record["method"], "keep": record["keep"]}
                setting = record.get("setting", plain)
                yield {
                    "task": task,
                    "method": record["method"],
                    "keep": record["keep"],
                    **({} if setting == plain else {"setting": setting}),
                    "right": [round(100 * one, 1) for one in (share, low, high)],
                    "questions": len(places),
                    "model": record["environment"]["model"],
                    "file": f"benchmarks/results/{name}",
                }


def published() -> Iterator[dict[str, Any]]:
    """Yield what papers print of methods that are ours: percent of the unpruned model."""
    import tokenprune

    ours = set(tokenprune.available_methods())
    data = json.loads((PAPERS / "llava15_7b.json").read_text())
    whole = {row["source"]: row["values"] for row in data["rows"] if row["method"] == "unpatched"}
    for row in data["rows"]:
        if row["method"] not in ours:
            continue
        source = data["sources"][row["source"]]
        for task, key in PUBLISHED.items():
            if key is None:
                percent, what = row.get("average"), "the mean over its benchmarks"
            else:
                value, full = row["values"].get(key), whole.get(row["source"], {}).get(key)
                doubted = key in row.get("doubt", {})
                percent = None if value is None or full is None or doubted else round(100 * value / full, 1)
                what = "TextVQA"
            if percent is not None:
                table = "" if source["table"] == "not recorded" else f", {source['table']}"
                yield {
                    "task": task,
                    "method": row["method"],
                    "tokens": row["budget"],
                    "of": UNPRUNED,
                    "counts": data["means"][row["means"]],
                    "percent": percent,
                    "what": what,
                    "model": data["model"],
                    "source": f"{source['title'].partition(':')[0]}, arXiv {source['arxiv']}{table}",
                }


def published_speed() -> Iterator[dict[str, Any]]:
    for row in json.loads((PAPERS / "speedups.json").read_text()):
        ratio = row.get("ratio") or round(row["before"] / row["after"], 2)
        device = f" on {row['device']}" if row["device"] else ""
        setting = "at what setting is not said" if row["setting"] == "not said" else row["setting"]
        told = f"{row['measured']} x{ratio:g} as fast: {row['model']}{device}, {setting}"
        yield {"method": row["method"], "published": True, "told": told, "source": f"{row['source']}, {row['where']}"}


def measured_speed() -> Iterator[dict[str, Any]]:
    """Yield our times: of a prefill on a CPU, and of a server."""
    header, *records = read("cpu/efficiency.jsonl")
    for record in records:
        if "speedup" in record:
            told = (
                f"prefill x{record['speedup']['p50']:.1f} as fast: a decoder of {header['parameters'] / 1e6:.0f} M "
                f"parameters on {header['threads']} CPU threads, {record['visual']} to {record['keep']} tokens"
            )
            source = "benchmarks/results/cpu/efficiency.jsonl"
            yield {"method": record["method"], "published": False, "told": told, "source": source}
    served = read("serving.jsonl")
    best = max(served, key=lambda one: (one["concurrency"], one["speedup"]))
    told = (
        f"a vLLM server answers x{best['speedup']:.1f} as many requests a second: {best['concurrency']} at once, "
        f"{fmean(one['prompt_tokens'] for one in served if one['setting'] == 'off'):.0f} to "
        f"{best['prompt_tokens']:.0f} prompt tokens, a decoder of 100 M parameters on {best['cpus']} CPU cores"
    )
    source = "benchmarks/results/serving.jsonl"
    yield {"method": best["method"], "published": False, "told": told, "source": source}


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def text() -> str:
    """Return the file: an entry a line, so that changes can be read."""
    parts = []
    for name, value in evidence().items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    made = text()
    if parser.parse_args().check:
        sys.exit(not FILE.is_file() or FILE.read_text() != made)
    FILE.write_text(made)


if __name__ == "__main__":
    main()
