# SPDX-License-Identifier: Apache-2.0
"""Measure the error of `tokenprune capacity` on rows that its assumptions were not fitted to.

    python benchmarks/experiments/capacity_errors.py           # print the table
    python benchmarks/experiments/capacity_errors.py --page    # write it into docs/results/serving.md

The rows are nine vLLM measurements on an H200: three servers with three budgets each. The defaults of `Assumptions`
were fitted to these rows, so their error is in-sample. This script fits `compute`, `tower`, `each` and, for servers
without CUDA graphs, `launch` again (least squares of the logarithms of the rates) without one row, or without all rows
of one server, and predicts the rows left out. `host` is the median first token of the remaining rows of the same server
or, if that server is left out, of the other two servers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
from common import fill_page
from transformers import LlavaConfig, Qwen2_5_VLConfig

from tokenprune.integrations.vllm.capacity import Assumptions, Capacity, Server, build_load
from tokenprune.integrations.vllm.gpus import GPUS
from tokenprune.settings.cost import Load

ROOT = Path(__file__).resolve().parents[2]
RAW, PAGE = ROOT / "benchmarks/results/nvidia-h200/h_vllm_times.jsonl", ROOT / "docs/results/serving.md"
BEGIN, END = "<!-- errors:begin (benchmarks/experiments/capacity_errors.py --page) -->", "<!-- errors:end -->"
QWEN_7B = Qwen2_5_VLConfig(
    text_config=dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                     num_key_value_heads=4, vocab_size=152064),
    vision_config=dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584),
    tie_word_embeddings=False,
)  # fmt: skip
# For each server: model config, text tokens and image tokens per request, and whether it runs eagerly.
SERVERS: dict[str, tuple[Any, int, int | None, bool]] = {
    "llava7b.default": (LlavaConfig(), 39, None, False),
    "llava7b.eager": (LlavaConfig(), 39, None, True),
    "qwen7b.eager": (QWEN_7B, 41, 2116, True),
}
FITTED = ("compute", "tower", "each", "launch")


@cache
def build_server(name: str) -> tuple[Server, Load]:
    """Return a server of `SERVERS` and the load of its requests."""
    config, text, tokens, _ = SERVERS[name]
    return Server.from_config(config, GPUS["H200"]), build_load(config, 1, tokens=tokens, tiles=None, text=text)


@dataclass(frozen=True)
class Row:
    """Measured row: server, budget, answer tokens, requests per second, and seconds to the first token."""

    server: str
    keep: float
    answer: int
    rate: float
    first: float

    @property
    def eager(self) -> bool:
        return SERVERS[self.server][3]

    def predict(self, assumed: dict[str, float]) -> Capacity:
        """Return the prediction for this row. `launch` counts only if the server runs eagerly."""
        values = assumed if self.eager else assumed | {"launch": 0.0}
        server, load = build_server(self.server)
        return replace(server, assumed=Assumptions(at_once=64, **values)).capacity(load, self.keep, 1, self.answer)


def read_rows() -> list[Row]:
    rows = []
    for line in RAW.read_text().splitlines()[1:]:
        row = json.loads(line)
        if row["engine"] in SERVERS:
            keep = 1.0 if row["setting"] == "off" else float(row["setting"].split()[1])
            rows.append(Row(row["engine"], keep, row["answer"], row["rate"], row["first_ms"] / 1000))
    return rows


def defaults() -> dict[str, float]:
    return {name: getattr(Assumptions(), name) for name in FITTED}


@cache
def fit(rows: tuple[Row, ...]) -> dict[str, float]:
    """Fit the assumptions by coordinate descent on the squared errors of the logarithms of the rates."""

    def loss(values: dict[str, float]) -> float:
        return sum(math.log(row.predict(values).rate / row.rate) ** 2 for row in rows)

    best: dict[str, float] = defaults() | {"launch": 0.01}
    lowest, step = loss(best), 1.5
    while step > 1.002:
        improved = False
        for name in FITTED:
            for factor in (step, 1 / step):
                trial = best | {name: min(best[name] * factor, 1.0)}
                if (value := loss(trial)) < lowest:
                    best, lowest, improved = trial, value, True
        if not improved:
            step = math.sqrt(step)
    return best


def predict_left_out(row: Row, others: tuple[Row, ...]) -> tuple[float, float]:
    """Return the relative errors of a row's rate and first token, with assumptions fitted to `others`."""
    neighbors = [other for other in others if other.server == row.server] or others
    capacity = row.predict(fit(others) | {"host": statistics.median(other.first for other in neighbors)})
    return capacity.rate / row.rate - 1, capacity.first_token / row.first - 1


def compute_errors() -> list[dict[str, Any]]:
    """Return for each row the relative errors of rate and first token.

    "default" uses the defaults, "launch" adds a launch time of 13 ms for eager servers, "row" leaves out the row, and
    "server_out" leaves out all rows of its server.
    """
    rows, errors = read_rows(), []
    for row in rows:
        plain, launched = row.predict(defaults()), row.predict(defaults() | {"launch": 0.013})
        errors.append({
            "server": row.server, "keep": row.keep,
            "default": (plain.rate / row.rate - 1, plain.first_token / row.first - 1),
            "launch": (launched.rate / row.rate - 1, launched.first_token / row.first - 1),
            "row": predict_left_out(row, tuple(other for other in rows if other != row)),
            "server_out": predict_left_out(row, tuple(other for other in rows if other.server != row.server)),
        })  # fmt: skip
    return errors


KINDS = ("default", "launch", "row", "server_out")


def page() -> str:
    """Return the table of docs/results/serving.md: the range of errors over the three budgets of each server."""
    errors = compute_errors()
    lines = [
        "| server | | defaults | `--launch 13ms` | without the row | without the server |",
        "|---|---|---|---|---|---|",
    ]
    for server, (part, kind) in itertools.product(SERVERS, enumerate(("rate", "first token"))):
        of_server = [row for row in errors if row["server"] == server]
        ends = [(min(values), max(values)) for values in ([row[kind][part] for row in of_server] for kind in KINDS)]
        cells = " | ".join(f"{low:+.0%}…{high:+.0%}" for low, high in ends)
        lines.append(f"| {server} | {kind} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table into docs/results/serving.md")
    if parser.parse_args().page:
        fill_page(PAGE, BEGIN, END, page())
    else:
        print(page())


if __name__ == "__main__":
    main()
