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
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.models.per_layer import get_layer_values
from tokenprune.selection.method import Site
from tokenprune.selection.sites.decode import DecodeMethod, Share, TokenType


@register(
    "dyrate", site=Site.DECODE, needs=("last_row_attention",), paper="arXiv 2501.14204 (abstract)", reconstruction=True
)
@dataclass(frozen=True)
class DyRate(DecodeMethod):
    """Drop the least attended visual tokens while decoding, more as attention to the image falls.

    `keep` is the share that prefill keeps by the rule of FastV; decoding only drops more tokens. With keep=1.0, no
    token is dropped. The rate follows the images' share of the attention, a fixed schedule, or a classifier that is
    fitted to the model.

    Args:
        rate: "attn_mass" follows the images' share of the attention, without training. "schedule" uses `schedule`.
            "predictor" uses a linear classifier fitted by `tokenprune fit dyrate`.
        layer: First decoder layer that drops tokens, >= 1. Tokens are ranked by the attention of the layer before it.
        mode: "evict" frees the memory of dropped tokens. "mask" keeps it and masks the tokens in attention.
        k_min: Smallest share of a prompt's visual tokens to keep, in [0, 1], at most `keep`. At least one token is
            kept.
        max_rate: Highest pruning rate, in [0, 1].
        monotone: Never lower the rate. False lets tokens that prefill kept return, and requires mode="mask".
        batch_policy: "ragged" gives each row its own rate, "shared" uses the highest rate of the batch.
        grid: Number K of rates: the rate is one of 0, 1/K ... (K-1)/K. "attn_mass" rounds down; "schedule" ignores it.
        ema: Weight in [0, 1) of the past in the running mean of the attention share.
        warmup: Number of decode steps before the first decision.
        update_every: Number of decode steps between decisions. "schedule" decides at every step.
        schedule: Pruning rates in [0, 1] for decode steps 1, 2, ... The last rate applies to all later steps.
        predictor: Path of the classifier's file.

    Source:
        Liang et al., "Dynamic Token Reduction during Generation for Vision Language Models" (arXiv 2501.14204),
        abstract: a lightweight predictor maps the attention distribution to a pruning rate during generation. Secondary
        sources: four token types, a linear classifier, rates (k-1)/K, and the ranking of FastV.

    Differences from the paper:
        - A reconstruction: the full text could not be read and no code is public.
        - The default "attn_mass", all default values and the layer are decisions of this implementation.
        - Attention masses are taken before any token is dropped.
        - `keep` is the share after prefill.
        - Tokens never return after "evict".
        - The images of a prompt compete during decoding.
        - The classifier is fitted to labels from the KL divergence, not trained end to end.

    Examples:
        >>> model = tokenprune.patch(model, DyRate(warmup=0, update_every=2), keep=0.5)
        >>> output = model.generate(**inputs, min_new_tokens=4, max_new_tokens=4)
        >>> len(tokenprune.stats(model).decode_rates)
        3
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
        uses_schedule = self.rate == "schedule"
        self._check(
            uses_schedule == bool(self.schedule), "schedule=[...] requires rate='schedule', and the other way round"
        )
        self._check(
            self.rate != "predictor" or self.predictor is not None,
            "rate='predictor' needs a fitted classifier. Run `tokenprune fit dyrate --model MODEL --out FILE` and pass "
            "predictor=FILE.",
        )
        self._check(self.rate == "predictor" or self.predictor is None, "predictor= requires rate='predictor'")
        if self.rate == "predictor":
            fitted = self._fitted  # raise errors of the file before a model is patched
            self._check(
                (fitted.grid, fitted.layer) == (self.grid, self.layer),
                f"{self.predictor} was fitted for grid={fitted.grid}, layer={fitted.layer}. Pass these options.",
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
        kept = lowest + (share - lowest) * self._compute_attention_ratio(masses)
        return ((1 - kept) * self.grid + 1e-6).floor().clamp(max=self.grid - 1) / self.grid

    def _compute_attention_ratio(self, masses: torch.Tensor) -> torch.Tensor:
        """Return the running mean of the images' attention share, relative to prefill, float64 (B,), in [0, 1].

        The text before the images is excluded, because its first token is an attention sink.
        """
        mean = masses.double().mean(dim=2)
        image_mass = mean[..., TokenType.IMG]
        share = image_mass / (mean.sum(-1) - mean[..., TokenType.SYS]).clamp(min=1e-12)
        age = torch.arange(share.shape[1] - 1, -1, -1, device=share.device)
        weight = (1 - self.ema) * self.ema ** age.double()
        weight[0] = self.ema ** age[0].double()  # the running mean starts at the end of the prompt
        now, first = (share * weight).sum(1), share[:, 0]
        return torch.where(first > 0, now / first.clamp(min=1e-12), (now > 0).double()).clamp(0, 1)

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self.rate != "predictor":
            return
        heads = get_layer_values(decoder.config, "num_attention_heads")[self.layer - 1]  # the observed layer
        if self._fitted.weight.shape[1] != len(TokenType) * heads or self._fitted.model != compute_fingerprint(decoder):
            raise OptionError(
                f"{self.name}: {self.predictor} was fitted to another model or dtype. Run `tokenprune fit dyrate` with "
                "this model."
            )
