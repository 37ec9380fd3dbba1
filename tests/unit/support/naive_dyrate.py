# SPDX-License-Identifier: Apache-2.0
"""dyrate written from its specification: plain loops over an unpatched eager model that gets a new mask each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from basics import pieces
from hooks import removed_after
from oracle import mask_dropped
from tokenprune.integrations.hf import compat
from zoo import Family

OPTIONS = dict(
    rate="attn_mass", layer=3, k_min=0.1, max_rate=1.0, monotone=True, batch_policy="ragged", grid=10, ema=0.5,
    warmup=4, update_every=8, schedule=(),
)  # fmt: skip


class Naive:
    """kept: the visual positions of each row that layers from the cut on attend to. rates, counts: values per step."""

    def __init__(self, family: Family, model: Any, inputs: Any, keep: float, options: dict[str, Any]) -> None:
        self.keep, self.options = keep, OPTIONS | options
        self.pieces = pieces(family, inputs)
        self.visual = [[position for segment in row for position in segment] for row in self.pieces]
        self.real = inputs["attention_mask"].bool()
        self.length = self.real.shape[1]
        self.kept: list[list[int]] = []
        self.prefill: list[list[int]] = []
        self.rate: list[float] = []
        self.history: list[list[Tensor]] = [[] for _ in self.visual]  # for each row, the attention masses of each step
        self.rates: list[list[float]] = []
        self.counts: list[list[int]] = []

    def alive(self, width: int) -> Tensor:
        alive = torch.ones(len(self.visual), width, dtype=torch.bool)
        for row, visual in enumerate(self.visual):
            alive[row, visual] = False
            alive[row, self.kept[row]] = True
        return alive

    def see(self, weights: Tensor) -> None:
        """Update the state with attention weights `[B, H, Q, S]` of the layer before the cut, where S counts all tokens
        so far."""
        total = weights.shape[-1]
        step = total - self.length
        for row, visual in enumerate(self.visual):
            last = int(self.real[row].nonzero().max()) if step == 0 else 0
            attention = weights[row, :, last] if step == 0 else weights[row, :, -1]
            self._see_row(row, visual, attention, step)
        if step:
            self._drop(step, weights[:, :, -1].mean(1))
            self.rates.append(list(self.rate))
            self.counts.append([len(row) for row in self.kept])

    def _see_row(self, row: int, visual: list[int], attention: Tensor, step: int) -> None:
        masses = torch.zeros(len(attention), 4)
        for position in range(attention.shape[1]):
            if position >= self.length:
                kind = 3
            elif position in visual:
                kind = 1
            else:
                kind = 0 if not visual or position < visual[0] else 2
            masses[:, kind] += attention[:, position]
        self.history[row].append(masses)
        if step == 0:
            score = attention.mean(0)
            kept = []
            for segment in self.pieces[row]:
                budget = max(1, round(self.keep * len(segment)))
                kept += sorted(segment, key=lambda position: (-float(score[position]), position))[:budget]
            self.prefill.append(sorted(kept))
            self.kept.append(sorted(kept))
            self.rate.append(1 - len(kept) / len(visual) if visual else 0.0)

    def _drop(self, step: int, score: Tensor) -> None:
        o = self.options
        if o["rate"] == "attn_mass" and (step <= o["warmup"] or (step - o["warmup"] - 1) % o["update_every"]):
            return
        cut = [len(kept) < len(visual) for kept, visual in zip(self.prefill, self.visual, strict=True)]
        rates = [min(self._rate(row, step), o["max_rate"]) if cut[row] else 0.0 for row in range(len(cut))]
        if o["batch_policy"] == "shared":
            rates = [max(rates) if is_cut else 0.0 for is_cut in cut]
        for row, visual in enumerate(self.visual):
            if not cut[row]:
                continue
            self.rate[row] = max(rates[row], self.rate[row]) if o["monotone"] else rates[row]
            budget = math.ceil((1 - self.rate[row]) * len(visual) - 1e-6)
            budget = max(budget, 1, math.ceil(o["k_min"] * len(visual) - 1e-6))
            pool = self.kept[row] if o["monotone"] else self.prefill[row]
            ranked = sorted(pool, key=lambda position: (-float(score[row, position]), position))
            self.kept[row] = sorted(ranked[:budget])

    def _rate(self, row: int, step: int) -> float:
        o = self.options
        if o["rate"] == "schedule":
            return o["schedule"][min(step, len(o["schedule"])) - 1]
        shares = []
        for masses in self.history[row]:
            mean = masses.mean(0).tolist()
            shares.append(mean[1] / max(mean[1] + mean[2] + mean[3], 1e-12))
        average = shares[0]
        for share in shares[1:]:
            average = o["ema"] * average + (1 - o["ema"]) * share
        start = len(self.prefill[row]) / len(self.visual[row])
        lowest = min(o["k_min"], start)
        fraction = min(1.0, average / shares[0]) if shares[0] else 0.0
        rate = 1 - (lowest + (start - lowest) * fraction)
        return min(math.floor(rate * o["grid"] + 1e-6), o["grid"] - 1) / o["grid"]


@contextmanager
def naive(family: Family, model: Any, inputs: Any, keep: float, **options: Any) -> Iterator[Naive]:
    """Within this context, the unpatched eager `model` computes the output of dyrate."""
    state = Naive(family, model, inputs, keep, options)
    decoder = model.get_submodule(family.decoder)
    cut = state.options["layer"]
    last_output: dict[str, Any] = {}

    def look(module: Any, args: Any, output: Any) -> None:
        last_output["weights"] = output[1]

    def enter(module: Any, args: tuple, kwargs: dict, index: int = 0) -> tuple:
        hidden = args[0] if args else kwargs["hidden_states"]
        cache = compat.get_cache(kwargs)
        total = int(cache.layers[0].get_seq_length())  # layer 0 already holds the tokens of this call
        if index == cut:
            weights = last_output.pop("weights")
            # Sliding layers return weights for the last tokens only.
            state.see(torch.nn.functional.pad(weights, (total - weights.shape[-1], 0)))
        alive = state.alive(state.length)
        mask = mask_dropped(kwargs.get("attention_mask"), alive, hidden, cache, index, decoder.config)
        return args, kwargs | {"attention_mask": mask}

    handles = [decoder.layers[cut - 1].self_attn.register_forward_hook(look)]
    for index in range(cut, len(decoder.layers)):
        layer = decoder.layers[index]
        handles.append(
            layer.register_forward_pre_hook(lambda m, a, k, index=index: enter(m, a, k, index), with_kwargs=True)
        )
    with removed_after(handles):
        yield state
