# SPDX-License-Identifier: Apache-2.0
"""What choosing and removing tokens must cost on a GPU, per model and method: a prediction, and its check.

    python experiments/selection_cost.py               # predict, into experiments/results/selection_cost.jsonl; no GPU
    python experiments/selection_cost.py --measure     # on a GPU: predicted, measured and their ratio, line by line,
                                                      # into experiments/results/<device>/selection_cost.jsonl
    python experiments/selection_cost.py --measure --tiny   # proves the code on a CPU

launch_costs.py has the model of time. A method's line is one call of its `select` on bfloat16 features of one request,
a ninth of the visual tokens stay, and the merge, where it merges. "the cut" is what the engine does behind each: the
order, hidden states, positions. tome and dymu: one merge in each layer of the tower but the last.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import RESULTS, device_name, header, results_path, write
from gpu_targets import A100, H100
from model_shapes import MODELS, Decoder, Model, Tower
from rich.console import Console
from rich.table import Table
from scaling_inputs import SHARE, TEXT, MadeUp

import tokenprune
from tokenprune import VisualTokens
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.selection import merge_tokens
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.ops.merging import best_partners, bipartite_match, most, ragged_merge
from tokenprune.shapes.decoder import DecoderShape
from tokenprune.view.segments import Segments

METHODS = ("uniform", "random", "fastv", "dyrate", "dart", "divprune", "vscan", "pool", "tome", "dymu", "the cut")
PREDICTED = (A100, H100)
TINY = Model("tiny", Tower(2, 2, 32, 37), Decoder(2, 4, 2, 16, 64, 128, 90))


def prepared(name: str, model: Model, device: torch.device) -> Callable[[], Any]:
    """Return a function that does once what a line tells of."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if name in ("tome", "dymu"):
        return _merging(name, model.tower, device, dtype)
    shape = model.decoder
    length, stay = shape.visual + TEXT, shape.visual // SHARE

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    hidden = made(1, length, shape.width)
    place = torch.arange(shape.visual, device=device)[None]
    mask = torch.ones_like(place, dtype=torch.bool)
    if name == "the cut":
        positions = torch.arange(length, device=device).expand(3, 1, -1)

        def cut() -> Any:
            slots = partition(torch.nn.functional.pad(mask, (0, TEXT)))[:, : stay + TEXT]
            return gather_tokens(hidden, slots, 1), gather_tokens(positions, slots, 2)

        return cut
    method = tokenprune.method(name)
    query, key = (made(1, length, n, shape.head_width).transpose(1, 2) for n in (shape.heads, shape.kv_heads))
    seen = Observation(query, key, None, shape.head_width**-0.5)
    source = MadeUp(hidden=hidden, seen=seen, count=shape.visual, needs=method.needs)
    across = max(w for w in range(1, math.isqrt(shape.visual) + 1) if shape.visual % w == 0)
    segments = Segments([0], [0], [shape.visual], place, mask, [(1, shape.visual // across, across)], ["image"])
    tokens = VisualTokens(segments, [stay], source)

    def select() -> Any:
        tokens.__dict__.pop("last_row_attention", None)
        source.__dict__.pop("last_row", None)
        chosen = method.select(tokens)
        return chosen if chosen.assign is None else merge_tokens(hidden[:, : shape.visual], chosen, segments, place)

    return select


def _merging(name: str, tower: Tower, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.randn(tower.images, tower.tokens, tower.width, device=device, dtype=dtype)
    keys = torch.randn(tower.images, tower.tokens, tower.head_width, device=device, dtype=dtype)
    weight = torch.ones(x.shape[:2], device=device)
    gone = min(round(tower.tokens * (1 - 1 / SHARE) / (tower.layers - 1)), most(tower.tokens, protected=1))

    def merge() -> Any:
        for _ in range(tower.layers - 1):
            match name:
                case "tome":
                    found = bipartite_match(keys, gone, protected=1)
                case _:
                    # As threshold_match does it, once the host knows how many; the wait for that is not counted.
                    best, partner = best_partners(keys, protected=1)
                    found = ragged_merge(best, partner, [gone] * len(x), 1, [tower.tokens] * len(x))
            found.mean(x, weight)

    return merge


def predict(models: tuple[Model, ...], methods: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a record of each model and method, with the seconds that launch_costs.py says."""
    from launch_costs import Counter
    from offline_driver import OfflineDriver

    driver = OfflineDriver()
    for model in models:
        shape = model.decoder
        closed = DecoderShape(shape.layers, shape.width, shape.inner, shape.heads, shape.kv_heads, shape.head_width)
        prefill = closed.prefill_flops([shape.visual + TEXT] * shape.layers)
        for name in methods:
            run = prepared(name, model, torch.device("meta"))
            with ExitStack() as stack:
                # Not inference_mode, in which operations are not taken apart before they are counted.
                stack.enter_context(torch.no_grad())
                stack.enter_context(driver.compiling(H100))
                counter = stack.enter_context(Counter())
                run()
            yield {
                "model": model.name, "method": name, "visual": shape.visual, "launches": counter.launches,
                "kernels": sum(work.kernel for work in counter.works),
                "bytes": sum(work.bytes for work in counter.works), "flops": sum(work.flops for work in counter.works),
                "predicted_us": {gpu.name: round(1e6 * counter.seconds(gpu), 1) for gpu in PREDICTED},
                "prefill_us": {gpu.name: round(1e6 * prefill / gpu.flops["bfloat16"]) for gpu in PREDICTED},
            }  # fmt: skip


def measure(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Microseconds of a run: the median of `rounds`, behind two that do not count. On a GPU the work of several is
    handed over at once, so that what the host takes shows only where it is the slower one."""
    taken = []
    for number in range(rounds + 2):
        if device.type == "cuda":
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # cycles, about 10 ms, in which the host gets ahead
            begin.record()
            run()
            done.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(done) / 1e3
        else:
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
        taken += [1e6 * seconds] if number >= 2 else []
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--models", nargs="+", help="names; default: all")
    parser.add_argument("--measure", action="store_true", help="run them too, on the device that is there")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="one small model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = (TINY,) if args.tiny else tuple(m for m in MODELS if args.models is None or m.name in args.models)
    methods = args.methods.split(",")
    records = list(predicted(models, methods))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.measure:
        against = next((gpu.name for gpu in PREDICTED if gpu.name.split()[0] in device_name(device)), H100.name)
        by_name = {model.name: model for model in models}
        with torch.inference_mode():
            for record in records:
                run = prepared(record["method"], by_name[record["model"]], device)
                record["measured_us"] = round(measure(run, device, args.rounds), 1)
                record["against"], record["ratio"] = against, record["measured_us"] / record["predicted_us"][against]
    Console(width=120).print(shown(records))
    where = results_path(device, "selection_cost", args.tiny) if args.measure else RESULTS / "selection_cost.jsonl"
    if args.json or args.measure or not args.tiny:
        first = header(device) if args.measure else {"prediction": True, "share": SHARE, "text": TEXT}
        write(args.json or where, [first, *records])


def predicted(models: tuple[Model, ...], methods: list[str]) -> list[dict[str, Any]]:
    """Predict in a process of its own: what compiles for a GPU that is not there must not run kernels too."""
    import multiprocessing
    import os

    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_predictions, (models, methods))
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _predictions(models: tuple[Model, ...], methods: list[str]) -> list[dict[str, Any]]:
    return list(predict(models, methods))


def shown(records: list[dict[str, Any]]) -> Table:
    gpus = [gpu.name for gpu in PREDICTED]
    table = Table(title="Choosing and removing tokens: predicted, not measured, unless a column says so")
    for column in ("model", "method", "launches", *(f"{name}, µs" for name in gpus), "measured, µs", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for one in records:
        measured = [f"{one['measured_us']:.0f}", f"{one['ratio']:.2f}"] if "measured_us" in one else ["", ""]
        times = [f"{one['predicted_us'][name]:.0f}" for name in gpus]
        table.add_row(one["model"], one["method"], str(one["launches"]), *times, *measured)
    return table


if __name__ == "__main__":
    main()
