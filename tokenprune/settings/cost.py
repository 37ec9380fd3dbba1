# SPDX-License-Identifier: Apache-2.0
"""The cost of a call before it is made: FLOPs of tower and decoder in closed form, unpatched and under methods, and the
most that each site can save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.models.tower_shape import TowerShape, count_view_patches
from tokenprune.selection.method import Method, Site
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.selection.sites.units import UnitDropper

TEXT = 64  # tokens of text where nobody says how many
IN_LLM_LAYER = 2  # where methods inside the decoder usually cut
# Shares of a GPU's peak that the decoder's prefill and the tower reach, as fitted to an H200
# (docs/serving/capacity.md).
DECODER_OF_PEAK, TOWER_OF_PEAK = 0.65, 0.28


@dataclass(frozen=True)
class Load:
    """The size of one prompt.

    views: patches of each image, tile or frame. visual: tokens that the decoder is handed for them. text: the others.
    """

    views: tuple[int, ...]
    visual: int
    text: int = TEXT

    @classmethod
    def from_config(cls, config: Any, *, tokens: int | None = None, tiles: int | None = None, text: int = TEXT) -> Load:
        """Return the load of one image.

        tokens: visual tokens, where images have their own size (Qwen); tiles: how many views it is cut into, where they
        have not. Separators between rows and tiles are not counted. Raises OptionError where the family needs the
        other, UnsupportedModelError where its tower is not known.
        """
        tower, family = TowerShape.from_config(config), config.model_type
        if text < 0 or any(number is not None and number < 1 for number in (tokens, tiles)):
            raise OptionError("an image has at least one token and one tile, and a prompt no fewer than 0 of text")
        if tower.view is None:
            if tiles is not None:
                raise OptionError(f"images of {family} have their own size: say how many visual tokens, not tiles")
            views: tuple[int, ...] = (tower.unit * (1024 if tokens is None else tokens),)
        else:
            if tokens is not None:
                raise OptionError(f"images of {family} are cut into views of one size: say how many tiles, not tokens")
            views = (tower.view,) * (tiles or 1)
        return cls(views, tower.visual_tokens(views), text)

    @classmethod
    def from_inputs(cls, config: Any, inputs: Any, visual: int) -> Load:
        """Return the load of a prompt that a processor made; `visual` of its slots are visual tokens."""
        return cls(tuple(count_view_patches(config, inputs)), visual, inputs["input_ids"].numel() - visual)


@dataclass(frozen=True)
class Cost:
    """The cost of one prefill. tower, decoder: FLOPs, those of the projector with the tower's. tokens: visual ones,
    averaged over the decoder's layers. cache: numbers in the cache after it."""

    tower: float
    decoder: float
    tokens: float
    cache: float

    @property
    def flops(self) -> float:
        return self.tower + self.decoder

    @property
    def tower_share(self) -> float:
        return self.tower / self.flops

    @property
    def tower_time(self) -> float:
        """Share of the prefill's time on a GPU that the tower takes, whose narrow products reach less of the peak."""
        tower = self.tower * DECODER_OF_PEAK / TOWER_OF_PEAK
        return tower / (tower + self.decoder)


@dataclass(frozen=True)
class CostModel:
    """The closed forms of one model. tower: None where that of its family is not known; it counts nothing then."""

    decoder: DecoderShape
    tower: TowerShape | None = None

    @classmethod
    def from_config(cls, config: Any) -> CostModel:
        """config: of the whole model. Raises UnsupportedModelError for a tower that is not known."""
        return cls(DecoderShape.from_config(config.get_text_config()), TowerShape.from_config(config))

    def compute_cost(
        self,
        load: Load,
        *,
        pixels: float = 1.0,
        merged: Sequence[float] | None = None,
        per_layer: Sequence[float] | None = None,
    ) -> Cost:
        """Return what a prefill costs.

        pixels: share of the patches that reach the tower, with as many visual tokens. merged: see `TowerShape.flops`.
        per_layer: visual tokens that each decoder layer sees; default: all that the tower makes of those.
        """
        views = [view * pixels for view in load.views] if pixels else []
        tower = self.tower.flops(views, merged) if self.tower is not None else 0.0
        share = pixels * (1.0 if merged is None else merged[-1])
        visual = [load.visual * share] * self.decoder.layers if per_layer is None else list(per_layer)
        decoder = self.decoder.prefill_flops([load.text + tokens for tokens in visual])
        cache = sum((load.text + tokens) * width for tokens, width in zip(visual, self.decoder.kv_widths, strict=True))
        return Cost(tower, decoder, sum(visual) / len(visual), 2 * cache)

    def predict(self, load: Load, methods: Sequence[Method], budgets: Sequence[Budget]) -> Cost:
        """Return what a prefill costs under methods with their budgets, composed as `patch` composes them.

        The content of an image is not known ahead. A method is assumed to keep its budget, a merge in the tower to
        remove equally many tokens in each block, and a unit dropper to remove all of them at its block. Raises
        BudgetError as the methods would.
        """
        pixels, merged, visual = 1.0, None, float(load.visual)
        per_layer: list[float] | None = None
        layers = self.decoder.layers
        pairs = sorted(zip(methods, budgets, strict=True), key=lambda pair: (pair[0].site.order, pair[0].cut_layer))
        for method, budget in pairs:
            if budget.is_identity() or method.site is Site.ATTENTION or isinstance(method, ImageChooser):
                continue
            if method.site in (Site.PRE_ENCODER, Site.IN_ENCODER):
                share = self._left(budget, visual, 0, load.text) / visual
                visual *= share if method.removes else 1.0
                if method.site is Site.PRE_ENCODER:
                    pixels *= share
                elif self.tower is not None:
                    merged = _tower_shares(method, share, self.tower.layers)
                continue
            arrived = visual
            for stage, own in method.stages(budget, layers):
                per_layer = [visual] * layers if per_layer is None else per_layer
                if own.is_identity():
                    continue
                visual = min(visual, self._left(own, visual, stage.cut_layer, load.text, arrived))
                per_layer[stage.cut_layer :] = [visual] * (layers - stage.cut_layer)
        return self.compute_cost(load, pixels=pixels, merged=merged, per_layer=per_layer or [visual] * layers)

    def _left(self, budget: Budget, count: float, layer: int, text: int, original: float | None = None) -> int:
        return budget.resolve(
            [max(1, round(count))],
            layer=layer,
            shape=self.decoder,
            text_tokens=text,
            original=None if original is None else [max(1, round(original))],
        )[0]


def _tower_shares(method: Method, share: float, blocks: int) -> list[float]:
    """Return the share of tokens that enters each block of the tower, and the share that leaves the last block."""
    if isinstance(method, UnitDropper):
        first = method.block(blocks)
        return [1.0] * first + [share] * (blocks + 1 - first)
    return [1 - (1 - share) * block / blocks for block in range(blocks + 1)]


@dataclass(frozen=True)
class Limit:
    """The most that a site can make a prefill faster by, as a ratio of FLOPs: at a `keep`, and where it leaves no
    visual token at all (the text stays). what: where it is taken to cut."""

    site: Site
    what: str
    at_keep: float
    limit: float


def compute_site_limits(model: CostModel, load: Load, keep: float, layer: int = IN_LLM_LAYER) -> list[Limit]:
    """Return what each site can save at most, in the order in which data meets them. layer: of a cut in the decoder.

    What choosing costs is left out, and a method may cut later than here: nothing is faster than this by its FLOPs.
    Of a step of decoding, which reads rather than computes, see `compute_decode_limit`.
    """
    whole, layers = model.compute_cost(load).flops, model.decoder.layers
    blocks = 0 if model.tower is None else model.tower.layers
    layer = min(layer, layers - 1)

    def ratios(cost: Any) -> tuple[float, float]:
        return whole / cost(keep).flops, whole / cost(0.0).flops

    def inside(share: float) -> Cost:
        return model.compute_cost(load, per_layer=[load.visual] * layer + [share * load.visual] * (layers - layer))

    return [
        Limit(Site.PRE_ENCODER, "smaller images", *ratios(lambda share: model.compute_cost(load, pixels=share))),
        Limit(
            Site.IN_ENCODER,
            "a merge in the tower's first block",
            *ratios(lambda share: model.compute_cost(load, merged=[1.0] + [share] * blocks)),
        ),
        Limit(
            Site.PRE_LLM,
            "a cut at the decoder's entry",
            *ratios(lambda share: model.compute_cost(load, per_layer=[share * load.visual] * layers)),
        ),
        Limit(Site.IN_LLM, f"a cut at decoder layer {layer}", *ratios(inside)),
    ]


def compute_decode_limit(model: CostModel, load: Load, keep: float, rows: int = 1) -> tuple[float, float]:
    """Return by what ratio a step of decoding can get faster at most, at `keep` and without visual tokens, where it
    takes as long as reading weights and cache: weights once, the cache of each of `rows` prompts."""
    weights = model.decoder.num_weights

    def read(share: float) -> float:
        return weights + rows * model.compute_cost(load, per_layer=[share * load.visual] * model.decoder.layers).cache

    return read(1.0) / read(keep), read(1.0) / read(0.0)


# LLaVA-1.5-7B, by the closed forms of its config, and one image with 64 tokens of text: what a list of methods without
# a model refers to. No config is read for it, which would take seconds.
LLAVA_7B = CostModel(
    DecoderShape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128),
    TowerShape(
        layers=24,
        hidden=1024,
        attention=1024,
        intermediate=4096,
        mlp_matrices=2,
        patch_numbers=588,
        unit=1,
        projector=4096 * (1024 + 4096),
        protected=1,
        view=576,
    ),
)
LLAVA_7B_LOAD = Load((576,), 576)
