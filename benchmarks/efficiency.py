# SPDX-License-Identifier: Apache-2.0
"""How close each method that removes tokens comes to its oracle in prefill, and what it costs a step of decoding.

    GOMP_SPINCOUNT=0 python benchmarks/efficiency.py --threads 2

Patched: the model's forward on 64 text tokens and an image of 576 (of 2880) visual tokens, of which 64 (320) stay; the
image is encoded beforehand (`mm_encoder_outputs`, as `generate` does). Methods that read the vision tower get the
2880 tokens as five images of 576. Oracle: the unpatched language model on a prompt that has only the tokens that are
left; for cuts inside the decoder, its times at the lengths that the layers see, weighted by the layers. efficiency =
oracle time / patched time. All variants run in turn in one process; ratios are taken round by round, and the figures
are p20, p50 and p80 of these. CPU time stands beside wall time: where other work shares the machine, wall time tells of
that. Steps of decoding: the median of a few after each prefill, against those of the unpatched model.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import AFTER, BEFORE, Clock, default_device, encoded, header, ladder, llava, prompt, results_path, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tokenprune
from tokenprune import Site
from tokenprune.video import compares_frames

TILE = 576  # tokens of an image of the tower
STEPS = 4  # of decoding, after each prefill
Times = tuple[float, float]


def dropping_methods() -> list[str]:
    """Those that take tokens of an image out of the decoder, at its entry or inside."""
    sites = (Site.PRE_LLM, Site.IN_LLM, Site.DECODE)
    names = [name for name in tokenprune.available_methods() if tokenprune.method_info(name).site in sites]
    return [name for name in names if not compares_frames(tokenprune.method(name))]


class Case:
    """One model and prompt; what is timed with it."""

    def __init__(self, model: Any, visual: int, keep: int, clock: Clock) -> None:
        self.model, self.visual, self.keep, self.clock = model, visual, keep, clock
        self.ids = prompt(visual, clock.device, vocabulary=model.config.text_config.vocab_size)
        with torch.inference_mode():
            self.embeds = model.get_input_embeddings()(self.ids)
        self.cache: Any = None

    def images(self, name: str) -> tuple[Any, int]:
        """The encoder's output for a method, to be called while the model is patched with it; and `keep` for each
        image."""
        needs_tower = "encoder_attention" in tokenprune.method_info(name).needs
        pieces = self.visual // TILE if needs_tower else 1
        with torch.inference_mode():
            if needs_tower:
                pixels = torch.randn(pieces, 3, 336, 336, device=self.embeds.device, dtype=self.embeds.dtype)
                return self.model.model.get_image_features(pixels, return_dict=True), self.keep // pieces
            return encoded([torch.randn_like(self.embeds[0, : self.visual])]), self.keep

    def prefill(self, images: Any) -> Times:
        def run() -> None:
            out = self.model(
                input_ids=self.ids, mm_encoder_outputs={"image": images}, use_cache=True, logits_to_keep=1
            )
            self.cache = out.past_key_values

        return self.clock(run)

    def step(self) -> float:
        """Seconds of a step of decoding on the cache of the last prefill."""
        token = self.ids[:, -1:]
        return statistics.median(
            self.clock(lambda: self.model(input_ids=token, past_key_values=self.cache, use_cache=True))[0]
            for _ in range(STEPS)
        )

    def oracle(self, visual: int) -> Times:
        """The language model on a prompt of so many visual tokens."""
        short = torch.cat([self.embeds[:, : BEFORE + visual], self.embeds[:, BEFORE + self.visual :]], dim=1)

        def run() -> None:
            hidden = self.model.model.language_model(inputs_embeds=short, use_cache=True).last_hidden_state
            self.model.lm_head(hidden[:, -1:])

        return self.clock(run)


def measure(case: Case, methods: list[str], rounds: int, wait: Callable[[Any], Any]) -> tuple[dict, list[dict]]:
    """Return the record of the unpatched model, and one for each method."""
    layers: dict[str, list[int]] = {}
    times: dict[Any, list[Times]] = {}
    steps: dict[str, list[float]] = {}
    overhead: dict[str, list[float]] = {name: [] for name in methods}
    kept: dict[str, Any] = {}
    plain, _ = case.images("random")
    for name in methods:
        _, keep = case.images(name)
        kept[name] = keep
    for round_ in wait(range(-1, rounds)):
        taken: dict[Any, Times] = {"unpatched": case.prefill(plain)}
        now = {"unpatched": case.step()}
        for name in methods:
            with tokenprune.patched(case.model, name, keep=kept[name], guard="off"):
                images, _ = case.images(name)
                taken[name] = case.prefill(images)
                stats = tokenprune.stats(case.model)
                overhead[name] += [stats.overhead_ms] if round_ >= 0 else []
                layers[name] = stats.visual_tokens_per_layer
                now[name] = case.step()
        for visual in sorted({count for counts in layers.values() for count in counts}):
            taken[visual] = case.oracle(visual)
        if round_ >= 0:
            for key, seconds in taken.items():
                times.setdefault(key, []).append(seconds)
            for key, seconds in now.items():
                steps.setdefault(key, []).append(seconds)

    setting = {"visual": case.visual, "keep": case.keep}
    whole = times["unpatched"]
    unpatched = setting | {
        "method": "unpatched", "ms": ladder([1000 * wall for wall, _ in whole]),
        "step_ms": ladder([1000 * second for second in steps["unpatched"]]),
        "seconds": [wall for wall, _ in whole], "cpu_seconds": [cpu for _, cpu in whole],
    }  # fmt: skip
    records = []
    for name in methods:
        ideal = [
            tuple(sum(times[count][at][which] for count in layers[name]) / len(layers[name]) for which in (0, 1))
            for at in range(rounds)
        ]
        pairs = list(zip(ideal, times[name], whole, strict=True))
        share = [ms / 1000 / full[0] for ms, full in zip(overhead[name], whole, strict=True)]
        records.append(setting | {
            "method": name, "site": tokenprune.method_info(name).site, "layers": layers[name],
            "ms": ladder([1000 * mine[0] for _, mine, _ in pairs]),
            "oracle_ms": ladder([1000 * best[0] for best, _, _ in pairs]),
            "efficiency": ladder([best[0] / mine[0] for best, mine, _ in pairs]),
            "cpu_efficiency": ladder([best[1] / mine[1] for best, mine, _ in pairs]),
            "speedup": ladder([full[0] / mine[0] for _, mine, full in pairs]),
            "overhead_ms": ladder(overhead[name]), "overhead_share": ladder(share),
            "step_ms": ladder([1000 * second for second in steps[name]]),
            "step_ratio": ladder([a / b for a, b in zip(steps[name], steps["unpatched"], strict=True)]),
            "seconds": [wall for wall, _ in times[name]], "cpu_seconds": [cpu for _, cpu in times[name]],
        })  # fmt: skip
    return unpatched, records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="tiny, 100m or vicuna-7b (the default on a GPU)")
    parser.add_argument("--cases", nargs="+", default=["576:64", "2880:320"], help="visual tokens : tokens that stay")
    parser.add_argument("--rounds", type=int, nargs="+", default=[11, 5], help="for each case; the last one repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", default=",".join(dropping_methods()))
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--tiny", action="store_true", help="prove the code in seconds")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/<device>/efficiency.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, console = torch.device(args.device), Console()
    on_gpu = device.type == "cuda"
    size = "tiny" if args.tiny else args.model or ("vicuna-7b" if on_gpu else "100m")
    rounds = [2] if args.tiny else args.rounds
    model = llava(size, device, torch.bfloat16 if on_gpu else torch.float32)
    parameters = sum(p.numel() for p in model.model.language_model.parameters())
    methods = args.methods.split(",")
    lines = [header(device, model=size, parameters=parameters, text=BEFORE + AFTER, dtype=str(model.dtype))]
    for number, one in enumerate(args.cases):
        visual, keep = map(int, one.split(":"))
        case = Case(model, visual, keep, Clock(device))
        unpatched, records = measure(
            case, methods, rounds[min(number, len(rounds) - 1)], lambda x, one=one: track(x, one, console=console)
        )
        lines += [unpatched, *records]
        console.print(table(unpatched, records, f"{one}, {parameters / 1e6:.0f} M parameters, {lines[0]['device']}"))
        # After each case: what is measured is kept, whatever happens to the next one.
        write(args.json or results_path(device, "efficiency", args.tiny), lines)


def table(unpatched: dict[str, Any], records: list[dict[str, Any]], title: str) -> Table:
    made = Table(title=title)
    for column in ("method", "ms", "speed-up", "efficiency", "CPU efficiency", "overhead ms", "step, of unpatched"):
        made.add_column(column, justify="left" if column == "method" else "right")
    made.add_row(
        "unpatched", f"{unpatched['ms']['p50']:.1f}", "1.00", "", "", "", f"{unpatched['step_ms']['p50']:.1f} ms"
    )
    shown = {"ms": 1, "speedup": 2, "efficiency": 3, "cpu_efficiency": 3, "overhead_ms": 2, "step_ratio": 3}
    for one in records:
        made.add_row(one["method"], *(f"{one[key]['p50']:.{digits}f}" for key, digits in shown.items()))
    return made


if __name__ == "__main__":
    main()
