# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from tokenprune.errors import OptionError
from tokenprune.methods.decode.rate_predictor import RatePredictor
from tokenprune.methods.fitted import LazyFit
from tokenprune.methods.registry import register
from tokenprune.models.fingerprint import fingerprint
from tokenprune.models.per_layer import per_layer
from tokenprune.selection.method import Site
from tokenprune.selection.sites.decode import DecodeMethod, Share, TokenType


@register(
    "dyrate", site=Site.DECODE, needs=("last_row_attention",), paper="arXiv 2501.14204 (abstract)", reconstruction=True
)
@dataclass(frozen=True)
class DyRate(DecodeMethod):
    """Keep the visual tokens attended to most, and ever fewer of them as the answer grows and looks away.

    `keep` is what prefill leaves (k_0, by the rule of fastv); decoding can only lower it. keep=1.0 prunes nothing.

    rate: "attn_mass" follows the share of attention that goes to the images, without training; "schedule" takes
    `schedule`; "predictor" asks a linear classifier that `tokenprune fit dyrate` fitted to this model.
    layer: int >= 1; layers before it keep every token, and the attention of the last of these is observed.
    mode: "evict" frees the memory of dropped tokens; "mask" keeps it, and the attention is given a mask.
    k_min: smallest share of a prompt's visual tokens, in 0..1; `keep` caps it. At least one token stays.
    max_rate: highest rate, in 0..1.
    monotone: False (not with "evict") lets tokens that prefill kept return.
    batch_policy: "ragged" gives each row its own rate, "shared" the highest of the batch.
    grid: int K >= 1; the rate is one of 0, 1/K .. (K-1)/K ("attn_mass" rounds down to it, "schedule" does not use it).
    ema: weight in 0..1 of the past in the running mean of the attention share.
    warmup: decode steps before the first decision.
    update_every: steps from one decision to the next; "schedule" decides at every step.
    schedule: rates in 0..1 for decode steps 1, 2, ...; the last one stays.
    predictor: path of its file.

    Source: Liang et al., "Dynamic Token Reduction during Generation for Vision Language Models", the abstract: a
    lightweight predictor turns the attention distribution into a rate during generation. From secondary sources: four
    token types, a linear classifier, rates (k-1)/K, the ranking of FastV.

    Differs from the paper: its full text could not be read and no code is public, so this is a reconstruction with
    decisions of ours, not a reproduction: the default "attn_mass" and all numbers; the layer; masses taken where no
    token is missing yet; `keep` as the share after prefill; no token returns after "evict"; images of a prompt
    compete while decoding; labels by KL divergence instead of training end to end.
    """

    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.5
    fit = LazyFit("tokenprune_bench.calibration.rate_fitting", "fit_dyrate")
    fit_limit: ClassVar[int | None] = 24
    fit_question: ClassVar[str | None] = None

    rate: Literal["attn_mass", "schedule", "predictor"] = "attn_mass"
    grid: Annotated[int, Ge(1)] = 10
    ema: Annotated[float, Ge(0), Lt(1)] = 0.5
    warmup: Annotated[int, Ge(0)] = 4
    update_every: Annotated[int, Ge(1)] = 8
    schedule: Sequence[Share] = ()
    predictor: str | Path | None = field(default=None, metadata={"file": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = self.rate == "schedule"
        self._check(wanted == bool(self.schedule), "schedule=[...] and rate='schedule' go together: give both or none")
        self._check(
            self.rate != "predictor" or self.predictor is not None,
            "rate='predictor' needs a classifier fitted to the model: run `tokenprune fit dyrate --model MODEL --out "
            "predictor.safetensors` (or tokenprune_bench.calibration.fit_dyrate(...)) and pass "
            "predictor='predictor.safetensors'",
        )
        self._check(
            self.rate == "predictor" or self.predictor is None, "predictor= is used by rate='predictor' only: add that"
        )
        if self.rate == "predictor":
            fitted = self._fitted  # a file that is missing or broken is refused before a model is touched
            self._check(
                (fitted.grid, fitted.layer) == (self.grid, self.layer),
                f"{self.predictor} was fitted for grid={fitted.grid}, layer={fitted.layer}: pass these options",
            )

    @cached_property
    def _fitted(self) -> RatePredictor:
        assert self.predictor is not None
        return RatePredictor.load(self.predictor)

    def decides(self, step: int) -> bool:
        return self.rate == "schedule" or (step > self.warmup and (step - self.warmup - 1) % self.update_every == 0)

    def next_rate(self, masses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        if self.rate == "schedule":
            step = masses.shape[1] - 1
            return torch.full_like(share, self.schedule[min(step, len(self.schedule)) - 1])
        if self.rate == "predictor":
            return self._fitted.predict(masses[:, -1]).double() / self.grid
        lowest = torch.full_like(share, self.k_min).minimum(share)
        kept = lowest + (share - lowest) * self._attention_left(masses)
        return ((1 - kept) * self.grid + 1e-6).floor().clamp(max=self.grid - 1) / self.grid

    def _attention_left(self, masses: torch.Tensor) -> torch.Tensor:
        """float64 `[B]` in 0..1: running mean of the images' share of attention against that of the prompt's end.

        The text before the images is left out of the share: its first token is where attention goes to rest.
        """
        mean = masses.double().mean(dim=2)
        seen = mean[..., TokenType.IMG]
        share = seen / (mean.sum(-1) - mean[..., TokenType.SYS]).clamp(min=1e-12)
        age = torch.arange(share.shape[1] - 1, -1, -1, device=share.device)
        weight = (1 - self.ema) * self.ema ** age.double()
        weight[0] = self.ema ** age[0].double()  # the mean starts at the prompt's end
        now, first = (share * weight).sum(1), share[:, 0]
        return torch.where(first > 0, now / first.clamp(min=1e-12), (now > 0).double()).clamp(0, 1)

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self.rate != "predictor":
            return
        heads = per_layer(decoder.config, "num_attention_heads")[self.layer - 1]  # where its attention is read
        if self._fitted.weight.shape[1] != len(TokenType) * heads or self._fitted.model != fingerprint(decoder):
            raise OptionError(
                f"{self.name}: {self.predictor} was fitted to another model (or to this one in another dtype): run "
                "`tokenprune fit dyrate` with this model"
            )
