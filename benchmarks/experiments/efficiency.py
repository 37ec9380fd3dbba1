# SPDX-License-Identifier: Apache-2.0
"""How close each method that removes tokens comes to its oracle in prefill, and what it costs a step of decoding.

    python benchmarks/experiments/efficiency.py --resume

Patched: the model's forward on 64 text tokens and an image of 576 (of 2880) visual tokens, of which 64 (320) stay; the
image is encoded beforehand (`mm_encoder_outputs`, as `generate` does). Methods that read the vision tower, or merge in
it, get the 2880 tokens as five images of 576; those that cannot leave so few have the `keep` of their own. Oracle: the
unpatched language model on a prompt that has only the tokens that are left; for cuts inside the decoder, its times at
the lengths that the layers see, weighted by the layers (of more than five lengths, between five of them).

efficiency = oracle time / patched time. floor: the method's own arithmetic, bare (method_floors.py); limit = oracle
time / (oracle + floor), what efficiency can be at most. The three are taken in turn, forwards and backwards, in one
process; ratios are taken pair by pair, and the figures are p20, p50 and p80 of these. CPU time stands beside wall time.
A row at a load above the cores is not written, unless --allow-load marks it (rows.py). In every fifth round
the unpatched model runs too. Steps of decoding: the median of a few behind a prefill, against those of the unpatched
model.

A row is written as soon as it is measured. `--resume` leaves out those that the file has of the same code, model,
threads and rounds; `--missing` those of other code too, which each row names. What is
not measured anew stays in the file.
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

TILE = 576  # tokens of an image of the tower
BLOCKS = 6  # of the tower, which lets those that merge in it leave a ninth
STEPS = 4  # of decoding, behind each prefill of a round with the unpatched model
WHOLE = 5  # rounds from one with the unpatched model to the next
LENGTHS = 5  # at which the oracle of a method is timed at most
Times = tuple[float, float]


def dropping_methods() -> list[str]:
    """Those that take tokens of an image out of the decoder, at its entry or inside, by dropping or merging."""
    return [name for name in tokenprune.available_methods() if _drops(name)]


def _drops(name: str) -> bool:
    info = tokenprune.method_info(name)
    if info.site == Site.IN_ENCODER:
        return issubclass(info.cls, EncoderMethod)  # units of packed patches are dropped in other towers than this one
    method = tokenprune.method(name)
    if find_pixel_observables(method):  # of packed patches, and those are in other towers, too
        return False
    return info.site in (Site.PRE_LLM, Site.IN_LLM, Site.DECODE) and not compares_frames(method)


class Case:
    """One model and prompt; what is timed with it. batch: rows that ask the same."""

    def __init__(self, model: Any, visual: int, keep: int, clock: Clock, batch: int = 1) -> None:
        self.model, self.visual, self.keep, self.clock, self.batch = model, visual, keep, clock, batch
        self.ids = prompt(visual, clock.device, vocabulary=model.config.text_config.vocab_size).expand(batch, -1)
        with torch.inference_mode():
            self.embeds = model.get_input_embeddings()(self.ids)
        self.cache: Any = None

    def pieces(self, name: str) -> int:
        """How many images a method gets."""
        method = tokenprune.method(name)
        in_tower = isinstance(method, EncoderMethod) or any(need.startswith("encoder_") for need in method.needs)
        return self.visual // TILE if in_tower else 1

    def images(self, name: str) -> Any:
        """The encoder's output for a method, to be called while the model is patched with it."""
        pieces = self.pieces(name)
        method = tokenprune.method(name)
        with torch.inference_mode():
            if isinstance(method, EncoderMethod) or any(need.startswith("encoder_") for need in method.needs):
                return self.model.model.get_image_features(self.pixels(self.batch * pieces), return_dict=True)
            return encoded([torch.randn_like(self.embeds[0, : self.visual]) for _ in range(self.batch)])

    def pixels(self, number: int) -> torch.Tensor:
        return torch.randn(number, 3, 336, 336, device=self.embeds.device, dtype=self.embeds.dtype)

    @cached_property
    def thresholds(self) -> Any:
        share = self.keep / self.visual
        return calibrate(self.model, self.pixels(8), keep=share, batch_size=8, progress=False)

    def setting(self, name: str) -> dict[str, Any]:
        """The budget and options of a method: `keep` tokens, or its own budget where it cannot leave so few."""
        if name == "dymu":
            return {"keep": self.keep / self.visual, "thresholds": self.thresholds, "exact": True}
        wanted: list[float | int] = [self.keep // self.pieces(name), tokenprune.method(name).default_keep]
        for keep in wanted:
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
        """Return a function that runs the prefill of the prompt with these features, and keeps its cache."""

        def run() -> None:
            out = self.model(input_ids=self.ids, mm_encoder_outputs={"image": images}, use_cache=True, logits_to_keep=1)
            self.cache = out.past_key_values

        return run

    def step(self) -> float:
        """Seconds of a step of decoding on the cache of the last prefill."""
        token = self.ids[:, -1:]
        return statistics.median(
            self.clock(lambda: self.model(input_ids=token, past_key_values=self.cache, use_cache=True))[0]
            for _ in range(STEPS)
        )

    def oracle(self, visual: int) -> Times:
        return self.clock(self.oracle_of(visual))

    def oracle_of(self, visual: int) -> Callable[[], None]:
        """Return a function that runs the language model on a prompt of so many visual tokens."""
        short = torch.cat([self.embeds[:, : BEFORE + visual], self.embeds[:, BEFORE + self.visual :]], dim=1)

        def run() -> None:
            hidden = self.model.model.language_model(inputs_embeds=short, use_cache=True).last_hidden_state
            self.model.lm_head(hidden[:, -1:])

        return run

    def sizes(self, name: str, layers: list[int]) -> Sizes:
        text, pieces = self.model.config.text_config, self.pieces(name)
        each = tuple(count // pieces for count in layers)
        return Sizes(
            pieces, self.visual // pieces, max(1, min(each)), text.hidden_size, text.num_attention_heads, AFTER, each,
            self.embeds.device, self.embeds.dtype,
        )  # fmt: skip


def lengths(layers: list[int]) -> list[int]:
    """At which of the lengths that layers see the oracle is timed: all, or five from the shortest to the longest."""
    counts = sorted(set(layers))
    if len(counts) <= LENGTHS:
        return counts
    return [counts[round(place * (len(counts) - 1) / (LENGTHS - 1))] for place in range(LENGTHS)]


def weighted(times: dict[int, Times], layers: list[int], which: int) -> float:
    """Seconds of a decoder whose layers see `layers` tokens."""
    known = sorted(times)
    return float(np.interp(layers, known, [times[count][which] for count in known]).mean())


def measure(case: Case, name: str, rounds: int, allow_load: bool) -> dict[str, Any]:
    """Return the record of one method. Raises SystemExit on a loaded machine, unless that is allowed."""
    began, load = time.perf_counter(), Load(allow_load)
    setting, plain = case.setting(name), case.images("random")
    ideal: list[Times] = []
    patched: list[Times] = []
    floors: list[Times] = []
    whole: list[Times] = []
    overhead: list[float] = []
    steps: list[tuple[float, float]] = []

    def encode() -> Any:
        with tokenprune.patched(case.model, name, guard="off", **setting):
            return case.images(name)

    with tokenprune.patched(case.model, name, guard="off", **setting):
        case.prefill(case.images(name))
        layers = tokenprune.stats(case.model).visual_tokens_per_layer
    floor = floor_of(name, case.sizes(name, layers))

    def of_oracle(images: Any, wholly: bool) -> None:
        now = {count: case.oracle(count) for count in lengths(layers)}
        ideal.append((weighted(now, layers, 0), weighted(now, layers, 1)))

    def of_method(images: Any, wholly: bool) -> None:
        with tokenprune.patched(case.model, name, guard="off", **setting):
            patched.append(case.prefill(images))
            overhead.append(tokenprune.stats(case.model).overhead_ms)
            step = case.step() if wholly else 0.0
        if wholly:
            whole.append(case.prefill(plain))
            steps.append((step, case.step()))

    def of_floor(images: Any, wholly: bool) -> None:
        floors.append((0.0, 0.0) if floor is None else case.clock(floor))

    for round_ in range(-1, rounds):
        images = encode()  # outside of what is timed: the tower runs before a prefill
        turns = (of_oracle, of_method, of_floor) if round_ % 2 else (of_floor, of_method, of_oracle)
        for turn in turns:
            turn(images, round_ >= 0 and round_ % WHOLE == 0)
    for taken in (ideal, patched, floors, overhead):
        del taken[0]  # which warmed up
    full = statistics.median(wall for wall, _ in whole)
    pairs = list(zip(ideal, patched, floors, strict=True))
    return {
        "visual": case.visual, "keep": case.keep, "method": name, "site": tokenprune.method_info(name).site,
        "asked": setting["keep"], "layers": layers,
        "ms": ladder([1000 * mine[0] for _, mine, _ in pairs]),
        "oracle_ms": ladder([1000 * best[0] for best, _, _ in pairs]),
        "floor_ms": ladder([1000 * least[0] for _, _, least in pairs]),
        "efficiency": ladder([best[0] / mine[0] for best, mine, _ in pairs]),
        "cpu_efficiency": ladder([best[1] / mine[1] for best, mine, _ in pairs]),
        "limit": ladder([best[0] / (best[0] + least[0]) for best, _, least in pairs]),
        "of_limit": ladder([(best[0] + least[0]) / mine[0] for best, mine, least in pairs]),
        "cpu_of_limit": ladder([(best[1] + least[1]) / mine[1] for best, mine, least in pairs]),
        "speedup": ladder([full / mine[0] for _, mine, _ in pairs]),
        "overhead_ms": ladder(overhead), "overhead_share": ladder([ms / 1000 / full for ms in overhead]),
        "unpatched_ms": ladder([1000 * wall for wall, _ in whole]),
        "step_ms": ladder([1000 * mine for mine, _ in steps]),
        "unpatched_step_ms": ladder([1000 * other for _, other in steps]),
        "step_ratio": ladder([mine / other for mine, other in steps]),
        "seconds": [wall for wall, _ in patched], "cpu_seconds": [cpu for _, cpu in patched],
        "oracle_seconds": [wall for wall, _ in ideal], "floor_seconds": [wall for wall, _ in floors],
        **load.record(), "date": datetime.date.today().isoformat(),
        "took": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def unpatched(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of the unpatched model, of all rounds of one case in which it ran."""
    first = records[0]
    return {"visual": first["visual"], "keep": first["keep"], "method": "unpatched"} | {
        key: ladder([one[f"unpatched_{key}"]["p50"] for one in records]) for key in ("ms", "step_ms")
    }


def lines_of(first: dict[str, Any], records: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a file: its header, and of each case the unpatched model and the methods by name."""
    lines = [first]
    for case in sorted({(one["visual"], one["keep"]) for one in records.values()}):
        own = [records[key] for key in sorted(records) if key[:2] == case]
        lines += [unpatched(own), *own]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="tiny, 100m or vicuna-7b (the default on a GPU)")
    parser.add_argument("--cases", nargs="+", default=["576:64", "2880:320"], help="visual tokens : tokens that stay")
    parser.add_argument("--rounds", type=int, nargs="+", default=[15], help="for each case; the last one repeats")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", default=",".join(dropping_methods()))
    parser.add_argument("--device", default=default_device())
    add_options(parser)
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/efficiency.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()
    on_gpu = device.type == "cuda"
    size = "tiny" if args.tiny else args.model or ("vicuna-7b" if on_gpu else "100m")
    rounds = [2] if args.tiny else args.rounds
    path = args.json or results_path(device, "efficiency", args.tiny)
    model = llava(size, device, torch.bfloat16 if on_gpu else torch.float32, BLOCKS)
    parameters = sum(p.numel() for p in model.model.language_model.parameters())
    first = header(device, model=size, parameters=parameters, text=BEFORE + AFTER, dtype=str(model.dtype))
    key = {"code": code_version(), "model": size, "threads": args.threads}
    records: dict[Any, dict[str, Any]] = {}
    known: dict[Any, dict[str, Any]] = {}  # of the file, which keeps them until they are measured anew
    if (args.resume or args.missing) and path.exists():
        _, found = quiet(path)  # loaded rows are measured anew
        same = [name for name in key if not (args.missing and name == "code")]
        alike = [one for one in found if all(one.get(name) == key[name] for name in ("model", "threads"))]
        known = {(one["visual"], one["keep"], one["method"]): one for one in alike}
        records = {place: one for place, one in known.items() if all(one.get(name) == key[name] for name in same)}
    for number, one in enumerate(args.cases):
        visual, keep = map(int, one.split(":"))
        case, turns = Case(model, visual, keep, Clock(device)), rounds[min(number, len(rounds) - 1)]
        methods = args.methods.split(",")
        for name in methods:
            if len(records.get((visual, keep, name), {}).get("seconds", ())) >= turns:
                continue
            records[visual, keep, name] = measured = measure(case, name, turns, args.allow_load or args.tiny) | key
            write(path, lines_of(first, known | records))
            console.print(
                f"{one} {name}: efficiency {measured['efficiency']['p50']:.3f}, limit {measured['limit']['p50']:.3f}, "
                f"load {measured['load']}, {measured['took']:.0f} s"
            )
        own = [records[visual, keep, name] for name in methods if (visual, keep, name) in records]
        console.print(table(own, f"{one}, {parameters / 1e6:.0f} M parameters, {first['device']}"))


def table(records: list[dict[str, Any]], title: str) -> Table:
    made, plain = Table(title=title), unpatched(records)
    shown = {
        "ms": 1, "speedup": 2, "efficiency": 3, "cpu_efficiency": 3, "limit": 3, "of_limit": 3, "overhead_ms": 2,
        "step_ratio": 2,
    }  # fmt: skip
    names = (
        "ms", "speed-up", "efficiency", "CPU efficiency", "limit", "of the limit", "overhead ms", "step, of unpatched"
    )  # fmt: skip
    for column in ("method", *names, "load"):
        made.add_column(column, justify="left" if column == "method" else "right")
    step = f"{plain['step_ms']['p50']:.1f} ms"
    made.add_row("unpatched", f"{plain['ms']['p50']:.1f}", "1.00", *[""] * 5, step, "")
    for one in records:
        figures = (f"{one[key]['p50']:.{digits}f}" for key, digits in shown.items())
        made.add_row(one["method"], *figures, f"{one['load']:.1f}")
    return made


if __name__ == "__main__":
    main()
