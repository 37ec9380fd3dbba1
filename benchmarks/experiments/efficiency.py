# SPDX-License-Identifier: Apache-2.0
"""Measure prefill efficiency of each method that removes tokens, relative to an oracle, and its cost per decoding step.

    python benchmarks/experiments/efficiency.py --resume

Patched: a forward on 64 text tokens and an image of 576 (or 2880) visual tokens, of which 64 (320) are kept. The image
is encoded beforehand (`mm_encoder_outputs`, as `generate` does). Methods that read or merge in the vision tower get the
2880 tokens as five images of 576. Methods that cannot keep so few tokens use their default `keep`. Oracle: the
unpatched language model on a prompt with the kept tokens only. For cuts inside the decoder, the oracle is timed at up
to five of the lengths that the layers see and interpolated over the layers.

efficiency = oracle time / patched time. floor: the arithmetic of the method without the engine (method_floors.py).
limit = oracle time / (oracle + floor), the maximum efficiency. The three take turns in one process, in alternating
order. Ratios are computed pair by pair; the script reports their p20, p50 and p80, for wall and CPU time. In every
fifth round, the unpatched model runs too, and a few decoding steps after each prefill are timed. Rows at a load above
the number of cores are not written unless --allow-load marks them (rows.py).

The script writes each row to benchmarks/results/DEVICE/efficiency.jsonl as soon as it is measured. `--resume` skips
rows of the same code, model, threads and rounds. `--missing` also skips rows of other code versions (stored in each
row). Rows that are not measured again stay in the file.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import (
    AFTER,
    BEFORE,
    Clock,
    Load,
    add_options,
    code_version,
    default_device,
    encoded,
    header,
    ladder,
    llava,
    prompt,
    quiet,
    results_path,
    write,
)
from method_floors import Sizes, floor_of
from rich.console import Console
from rich.table import Table

import tokenprune
from tokenprune import BudgetError, Site
from tokenprune.integrations.shared.towers.tower_scores import find_pixel_observables
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune_bench.calibration import calibrate

TILE = 576  # visual tokens per image
BLOCKS = 6  # blocks of the tower, enough for merging methods to keep one token of nine
STEPS = 4  # decoding steps after each prefill of a round with the unpatched model
UNPATCHED_EVERY = 5  # rounds between runs of the unpatched model
LENGTHS = 5  # maximum number of timed lengths of the oracle
Times = tuple[float, float]


def dropping_methods() -> list[str]:
    """Return the methods that drop or merge image tokens at the decoder's entry or inside it."""
    return [name for name in tokenprune.available_methods() if _drops(name)]


def _drops(name: str) -> bool:
    info = tokenprune.method_info(name)
    if info.site == Site.IN_ENCODER:
        return issubclass(info.cls, EncoderMethod)  # the other methods need towers with packed patches
    method = tokenprune.method(name)
    if find_pixel_observables(method):  # these need towers with packed patches, too
        return False
    return info.site in (Site.PRE_LLM, Site.IN_LLM, Site.DECODE) and not compares_frames(method)


class Case:
    """A model and a prompt, with functions to time. `batch` is the number of equal rows."""

    def __init__(self, model: Any, visual: int, keep: int, clock: Clock, batch: int = 1) -> None:
        self.model, self.visual, self.keep, self.clock, self.batch = model, visual, keep, clock, batch
        self.ids = prompt(visual, clock.device, vocabulary=model.config.text_config.vocab_size).expand(batch, -1)
        with torch.inference_mode():
            self.embeds = model.get_input_embeddings()(self.ids)
        self.cache: Any = None

    def pieces(self, name: str) -> int:
        """Return the number of images that a method gets."""
        method = tokenprune.method(name)
        in_tower = isinstance(method, EncoderMethod) or any(need.startswith("encoder_") for need in method.needs)
        return self.visual // TILE if in_tower else 1

    def images(self, name: str) -> Any:
        """Return the encoder output for a method. Call this while the model is patched with the method."""
        pieces = self.pieces(name)
        method = tokenprune.method(name)
        with torch.inference_mode():
            if isinstance(method, EncoderMethod) or any(need.startswith("encoder_") for need in method.needs):
                return self.model.model.get_image_features(self.pixels(self.batch * pieces), return_dict=True)
            return encoded([torch.randn_like(self.embeds[0, : self.visual]) for _ in range(self.batch)])

    def pixels(self, count: int) -> torch.Tensor:
        return torch.randn(count, 3, 336, 336, device=self.embeds.device, dtype=self.embeds.dtype)

    @cached_property
    def thresholds(self) -> Any:
        share = self.keep / self.visual
        return calibrate(self.model, self.pixels(8), keep=share, batch_size=8, progress=False)

    def setting(self, name: str) -> dict[str, Any]:
        """Return the budget and options of a method: `keep` tokens, or its default if it cannot keep so few."""
        if name == "dymu":
            return {"keep": self.keep / self.visual, "thresholds": self.thresholds, "exact": True}
        budgets: list[float | int] = [self.keep // self.pieces(name), tokenprune.method(name).default_keep]
        for keep in budgets:
            try:
                with tokenprune.patched(self.model, name, guard="off", keep=keep):
                    self.prefill(self.images(name))
                return {"keep": keep}
            except BudgetError:
                continue
        return {"keep": 0.5}

    def prefill(self, images: Any) -> Times:
        return self.clock(self.prefill_of(images))

    def prefill_of(self, images: Any) -> Callable[[], None]:

        def run() -> None:
            out = self.model(input_ids=self.ids, mm_encoder_outputs={"image": images}, use_cache=True, logits_to_keep=1)
            self.cache = out.past_key_values

        return run

    def step(self) -> float:
        """Return the median seconds of a decoding step on the cache of the last prefill."""
        token = self.ids[:, -1:]
        return statistics.median(
            self.clock(lambda: self.model(input_ids=token, past_key_values=self.cache, use_cache=True))[0]
            for _ in range(STEPS)
        )

    def oracle(self, visual: int) -> Times:
        return self.clock(self.oracle_of(visual))

    def oracle_of(self, visual: int) -> Callable[[], None]:
        """Return a function that runs the language model on a prompt with `visual` visual tokens."""
        short = torch.cat([self.embeds[:, : BEFORE + visual], self.embeds[:, BEFORE + self.visual :]], dim=1)

        def run() -> None:
            hidden = self.model.model.language_model(inputs_embeds=short, use_cache=True).last_hidden_state
            self.model.lm_head(hidden[:, -1:])

        return run

    def sizes(self, name: str, layers: list[int]) -> Sizes:
        text, pieces = self.model.config.text_config, self.pieces(name)
        layer_counts = tuple(count // pieces for count in layers)
        return Sizes(
            pieces, self.visual // pieces, max(1, min(layer_counts)), text.hidden_size, text.num_attention_heads, AFTER,
            layer_counts, self.embeds.device, self.embeds.dtype,
        )  # fmt: skip


def lengths(layers: list[int]) -> list[int]:
    """Return the timed lengths of the oracle: all, or five from shortest to longest."""
    counts = sorted(set(layers))
    if len(counts) <= LENGTHS:
        return counts
    return [counts[round(index * (len(counts) - 1) / (LENGTHS - 1))] for index in range(LENGTHS)]


def weighted(times: dict[int, Times], layers: list[int], which: int) -> float:
    """Interpolate the seconds of a decoder whose layers see `layers` tokens. `which` selects wall (0) or CPU (1)."""
    known = sorted(times)
    return float(np.interp(layers, known, [times[count][which] for count in known]).mean())


def measure(case: Case, name: str, rounds: int, allow_load: bool) -> dict[str, Any]:
    """Return the record of one method. Exit on a loaded machine unless `allow_load` is set."""
    began, load = time.perf_counter(), Load(allow_load)
    setting, plain = case.setting(name), case.images("random")
    ideal: list[Times] = []
    patched: list[Times] = []
    floors: list[Times] = []
    unpatched_times: list[Times] = []
    overhead: list[float] = []
    steps: list[tuple[float, float]] = []

    def encode() -> Any:
        with tokenprune.patched(case.model, name, guard="off", **setting):
            return case.images(name)

    with tokenprune.patched(case.model, name, guard="off", **setting):
        case.prefill(case.images(name))
        layers = tokenprune.stats(case.model).visual_tokens_per_layer
    floor = floor_of(name, case.sizes(name, layers))

    def of_oracle(images: Any, with_unpatched: bool) -> None:
        now = {count: case.oracle(count) for count in lengths(layers)}
        ideal.append((weighted(now, layers, 0), weighted(now, layers, 1)))

    def of_method(images: Any, with_unpatched: bool) -> None:
        with tokenprune.patched(case.model, name, guard="off", **setting):
            patched.append(case.prefill(images))
            overhead.append(tokenprune.stats(case.model).overhead_ms)
            step = case.step() if with_unpatched else 0.0
        if with_unpatched:
            unpatched_times.append(case.prefill(plain))
            steps.append((step, case.step()))

    def of_floor(images: Any, with_unpatched: bool) -> None:
        floors.append((0.0, 0.0) if floor is None else case.clock(floor))

    for round_ in range(-1, rounds):
        images = encode()  # not timed: the tower runs before the prefill
        turns = (of_oracle, of_method, of_floor) if round_ % 2 else (of_floor, of_method, of_oracle)
        for turn in turns:
            turn(images, round_ >= 0 and round_ % UNPATCHED_EVERY == 0)
    for times in (ideal, patched, floors, overhead):
        del times[0]  # warm-up
    unpatched_time = statistics.median(wall for wall, _ in unpatched_times)
    pairs = list(zip(ideal, patched, floors, strict=True))
    return {
        "visual": case.visual, "keep": case.keep, "method": name, "site": tokenprune.method_info(name).site,
        "asked": setting["keep"], "layers": layers,
        "ms": ladder([1000 * patched_time[0] for _, patched_time, _ in pairs]),
        "oracle_ms": ladder([1000 * best[0] for best, _, _ in pairs]),
        "floor_ms": ladder([1000 * least[0] for _, _, least in pairs]),
        "efficiency": ladder([best[0] / patched_time[0] for best, patched_time, _ in pairs]),
        "cpu_efficiency": ladder([best[1] / patched_time[1] for best, patched_time, _ in pairs]),
        "limit": ladder([best[0] / (best[0] + least[0]) for best, _, least in pairs]),
        "of_limit": ladder([(best[0] + least[0]) / patched_time[0] for best, patched_time, least in pairs]),
        "cpu_of_limit": ladder([(best[1] + least[1]) / patched_time[1] for best, patched_time, least in pairs]),
        "speedup": ladder([unpatched_time / patched_time[0] for _, patched_time, _ in pairs]),
        "overhead_ms": ladder(overhead), "overhead_share": ladder([ms / 1000 / unpatched_time for ms in overhead]),
        "unpatched_ms": ladder([1000 * wall for wall, _ in unpatched_times]),
        "step_ms": ladder([1000 * patched_time for patched_time, _ in steps]),
        "unpatched_step_ms": ladder([1000 * other for _, other in steps]),
        "step_ratio": ladder([patched_time / other for patched_time, other in steps]),
        "seconds": [wall for wall, _ in patched], "cpu_seconds": [cpu for _, cpu in patched],
        "oracle_seconds": [wall for wall, _ in ideal], "floor_seconds": [wall for wall, _ in floors],
        **load.record(), "date": datetime.date.today().isoformat(),
        "took": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def unpatched(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the unpatched model from all methods' rounds of a case."""
    first = records[0]
    return {"visual": first["visual"], "keep": first["keep"], "method": "unpatched"} | {
        key: ladder([record[f"unpatched_{key}"]["p50"] for record in records]) for key in ("ms", "step_ms")
    }


def lines_of(first: dict[str, Any], records: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of the file: the header, then per case the unpatched model and the methods by name."""
    lines = [first]
    for case in sorted({(record["visual"], record["keep"]) for record in records.values()}):
        of_case = [records[key] for key in sorted(records) if key[:2] == case]
        lines += [unpatched(of_case), *of_case]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="tiny, 100m or vicuna-7b (the default on a GPU)")
    parser.add_argument("--cases", nargs="+", default=["576:64", "2880:320"], help="visual tokens : kept tokens")
    parser.add_argument("--rounds", type=int, nargs="+", default=[15], help="for each case; the last value repeats")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", default=",".join(dropping_methods()))
    parser.add_argument("--device", default=default_device())
    add_options(parser)
    parser.add_argument("--tiny", action="store_true", help="check the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/efficiency.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()
    on_gpu = device.type == "cuda"
    size = "tiny" if args.tiny else args.model or ("vicuna-7b" if on_gpu else "100m")
    num_rounds = [2] if args.tiny else args.rounds
    path = args.json or results_path(device, "efficiency", args.tiny)
    model = llava(size, device, torch.bfloat16 if on_gpu else torch.float32, BLOCKS)
    parameters = sum(p.numel() for p in model.model.language_model.parameters())
    first = header(device, model=size, parameters=parameters, text=BEFORE + AFTER, dtype=str(model.dtype))
    key = {"code": code_version(), "model": size, "threads": args.threads}
    records: dict[Any, dict[str, Any]] = {}
    known: dict[Any, dict[str, Any]] = {}  # rows of the file, kept until they are measured again
    if (args.resume or args.missing) and path.exists():
        _, rows = quiet(path)  # rows of a loaded machine are measured again
        same = [name for name in key if not (args.missing and name == "code")]
        comparable = [row for row in rows if all(row.get(name) == key[name] for name in ("model", "threads"))]
        known = {(row["visual"], row["keep"], row["method"]): row for row in comparable}
        records = {row_key: row for row_key, row in known.items() if all(row.get(name) == key[name] for name in same)}
    for index, case_text in enumerate(args.cases):
        visual, keep = map(int, case_text.split(":"))
        case, turns = Case(model, visual, keep, Clock(device)), num_rounds[min(index, len(num_rounds) - 1)]
        methods = args.methods.split(",")
        for name in methods:
            if len(records.get((visual, keep, name), {}).get("seconds", ())) >= turns:
                continue
            records[visual, keep, name] = measured = measure(case, name, turns, args.allow_load or args.tiny) | key
            write(path, lines_of(first, known | records))
            console.print(
                f"{case_text} {name}: efficiency {measured['efficiency']['p50']:.3f}, "
                f"limit {measured['limit']['p50']:.3f}, load {measured['load']}, {measured['took']:.0f} s"
            )
        of_case = [records[visual, keep, name] for name in methods if (visual, keep, name) in records]
        console.print(table(of_case, f"{case_text}, {parameters / 1e6:.0f} M parameters, {first['device']}"))


def table(records: list[dict[str, Any]], title: str) -> Table:
    result, plain = Table(title=title), unpatched(records)
    columns = {
        "ms": 1, "speedup": 2, "efficiency": 3, "cpu_efficiency": 3, "limit": 3, "of_limit": 3, "overhead_ms": 2,
        "step_ratio": 2,
    }  # fmt: skip
    names = (
        "ms", "speed-up", "efficiency", "CPU efficiency", "limit", "of the limit", "overhead ms", "step, of unpatched"
    )  # fmt: skip
    for column in ("method", *names, "load"):
        result.add_column(column, justify="left" if column == "method" else "right")
    step = f"{plain['step_ms']['p50']:.1f} ms"
    result.add_row("unpatched", f"{plain['ms']['p50']:.1f}", "1.00", *[""] * 5, step, "")
    for record in records:
        figures = (f"{record[key]['p50']:.{digits}f}" for key, digits in columns.items())
        result.add_row(record["method"], *figures, f"{record['load']:.1f}")
    return result


if __name__ == "__main__":
    main()
