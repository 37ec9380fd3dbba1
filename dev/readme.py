# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md: the methods from the registry, the numbers from the committed raw files.

python dev/readme.py            # rewrite README.md and docs/images/bench.png
python dev/readme.py --check    # exit with 1 where README.md is not what this would write (the test suite calls it)
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

import tokenprune

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "benchmarks/results/bench.jsonl"
PREFILL = ROOT / "benchmarks/results/prefill.jsonl"
SITES = {
    "PRE_ENCODER": "pixels",
    "IN_ENCODER": "vision tower",
    "PRE_LLM": "pre-LLM",
    "ATTENTION": "prefill attention",
    "IN_LLM": "in-LLM",
    "DECODE": "decoding",
}


def link(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return f"[{name}]({name})"


def methods() -> str:
    """The table of methods, from the registry."""
    lines = ["| method | acts | query-aware | prefix-cache-safe | what it does | source |", "|---|---|---|---|---|---|"]
    for name in tokenprune.available_methods():
        info = tokenprune.method_info(name)
        yes = {True: "yes", False: "no"}
        summary = info.summary.split(". ")[0].rstrip(".")
        lines.append(
            f"| `{name}` | {SITES[info.site]} | {yes[info.query_aware]} | {yes[info.prefix_cache_safe]} "
            f"| {summary} | {info.paper} |"
        )
    return "\n".join(lines)


def bench() -> str:
    """The benchmark's tables, from its raw file."""
    from tokenprune.bench.results import read_records, summarise
    from tokenprune.bench.tables import tables, to_markdown

    if not BENCH.exists():
        return "(not measured yet)"
    results = summarise(read_records(BENCH))
    parts = ["![accuracy against visual tokens](docs/images/bench.png)"]
    for table in tables(results):
        parts.append(to_markdown(table).strip())
    parts.append(
        f"Raw data: [{BENCH.relative_to(ROOT)}]({BENCH.relative_to(ROOT)}), written by `tokenprune bench --json`."
    )
    return "\n\n".join(parts)


def prefill() -> str:
    """The table of prefill times, from its raw file."""
    if not PREFILL.exists():
        return "(not measured yet)"
    header, *records = (json.loads(line) for line in PREFILL.read_text().splitlines())
    lines = ["| method | prefill, ms | speed-up | efficiency against the oracle |", "|---|---|---|---|"]
    lines.append(f"| unpatched | {1000 * statistics.median(header['unpatched']):.0f} | 1.00 | |")
    for record in records:
        middle = 1000 * statistics.median(record["seconds"])
        lines.append(f"| `{record['method']}` | {middle:.0f} | {record['speedup']:.2f} | {record['efficiency']:.3f} |")
    setting = (
        f"Prefill of {header['visual']} -> {header['keep']} visual tokens beside {header['text']} text tokens; a "
        f"decoder of {header['parameters'] / 1e6:.0f} M random parameters on {header['device']}, "
        f"{header['threads']} threads, torch {header['torch']}, transformers {header['transformers']}. The oracle is "
        "the unpatched decoder on a prompt that never had the other tokens (for cuts inside the decoder, both lengths "
        "weighted by their layers): 1.0 means that choosing and removing tokens is free."
    )
    return "\n\n".join([setting, "\n".join(lines), f"By `python benchmarks/prefill.py`; raw data: {link(PREFILL)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    before = after = path.read_text()
    for name, make in (("methods", methods), ("bench", bench), ("prefill", prefill)):
        block = re.compile(rf"(<!-- {name}:begin[^\n]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        text = make()
        after = block.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", after)
    if args.check:
        sys.exit(before != after)
    path.write_text(after)
    if BENCH.exists():
        from tokenprune.bench.plot import plot_png
        from tokenprune.bench.results import read_records, summarise

        (ROOT / "docs/images/bench.png").write_bytes(plot_png(summarise(read_records(BENCH))))


if __name__ == "__main__":
    main()
