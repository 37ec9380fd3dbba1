# SPDX-License-Identifier: Apache-2.0
"""Estimate the cost of a prefill in closed form: FLOPs of tower and decoder, with and without pruning.

Also computes the largest speed-up that a method at each site can reach.
"""

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

TEXT = 64  # default number of text tokens
IN_LLM_LAYER = 2  # typical decoder layer of an IN_LLM cut
# Shares of the peak FLOPs that the decoder's prefill and the tower reach, fitted to an H200 (docs/serving/capacity.md).
DECODER_OF_PEAK, TOWER_OF_PEAK = 0.65, 0.28


@dataclass(frozen=True)
class Load:
    """Size of one prompt.

    Args:
        views: Number of patches of each image, tile or frame.
        visual: Number of visual tokens at the input of the decoder.
        text: Number of text tokens.

    Examples:
        >>> load = Load((576,), visual=576, text=64)
    """

    views: tuple[int, ...]
    visual: int
    text: int = TEXT

    @classmethod
    def from_config(cls, config: Any, *, tokens: int | None = None, tiles: int | None = None, text: int = TEXT) -> Load:
        """Return the load of a prompt with one image.

        Args:
            config: Configuration of the model.
            tokens: Number of visual tokens, for families with images of any size (Qwen). Default: 1024.
            tiles: Number of tiles, for families with tiles of one size. Default: 1. Separators between rows and tiles
                are not counted.
            text: Number of text tokens.

        Raises:
            OptionError: If the family requires the other argument, or a number is out of range.
            UnsupportedModelError: If the vision tower is not supported.

        Examples:
            >>> Load.from_config(model.config, tiles=1).text
            64
        """
        tower, family = TowerShape.from_config(config), config.model_type
        if text < 0 or any(count is not None and count < 1 for count in (tokens, tiles)):
            raise OptionError("Pass tokens >= 1, tiles >= 1 and text >= 0.")
        if tower.view is None:
            if tiles is not None:
                raise OptionError(f"Images of {family} have any size. Pass a number of visual tokens, not of tiles.")
            views: tuple[int, ...] = (tower.unit * (1024 if tokens is None else tokens),)
        else:
            if tokens is not None:
                raise OptionError(f"Images of {family} are split into tiles. Pass a number of tiles, not of tokens.")
            views = (tower.view,) * (tiles or 1)
        return cls(views, tower.visual_tokens(views), text)

    @classmethod
    def from_inputs(cls, config: Any, inputs: Any, visual: int) -> Load:
        """Return the load of a processed prompt with `visual` visual tokens."""
        return cls(tuple(count_view_patches(config, inputs)), visual, inputs["input_ids"].numel() - visual)


@dataclass(frozen=True)
class Cost:
    """Cost of one prefill.

    Args:
        tower: FLOPs of the vision tower and the projector.
        decoder: FLOPs of the decoder.
        tokens: Number of visual tokens, averaged over the decoder layers.
        cache: Number of values in the KV cache after the prefill.
    """

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
        """Estimated share of the prefill time on a GPU. The tower reaches a lower share of the peak FLOPs."""
        tower = self.tower * DECODER_OF_PEAK / TOWER_OF_PEAK
        return tower / (tower + self.decoder)


@dataclass(frozen=True)
class CostModel:
    """Cost model of one architecture.

    Args:
        decoder: Sizes of the decoder.
        tower: Sizes of the vision tower. None if it is unknown. It then costs 0.

    Examples:
        >>> pruned = LLAVA_7B.predict(LLAVA_7B_LOAD, [tokenprune.method("divprune")], [Budget(keep=0.25)])
        >>> LLAVA_7B.compute_cost(LLAVA_7B_LOAD).tokens, pruned.tokens
        (576.0, 144.0)
    """

    decoder: DecoderShape
    tower: TowerShape | None = None

    @classmethod
    def from_config(cls, config: Any) -> CostModel:
        """Return the cost model of a configuration. Raise UnsupportedModelError if its tower is not supported."""
        return cls(DecoderShape.from_config(config.get_text_config()), TowerShape.from_config(config))

    def compute_cost(
        self,
        load: Load,
        *,
        pixels: float = 1.0,
        merged: Sequence[float] | None = None,
        per_layer: Sequence[float] | None = None,
    ) -> Cost:
        """Return the cost of a prefill.

        Args:
            load: Size of the prompt.
            pixels: Share of the patches that enter the tower. The number of visual tokens shrinks in proportion.
            merged: Share of the tokens in each block of the tower. See `TowerShape.flops`.
            per_layer: Number of visual tokens in each decoder layer. Default: all tokens that leave the tower.
        """
        views = [view * pixels for view in load.views] if pixels else []
        tower = self.tower.flops(views, merged) if self.tower is not None else 0.0
        share = pixels * (1.0 if merged is None else merged[-1])
        visual = [load.visual * share] * self.decoder.layers if per_layer is None else list(per_layer)
        decoder = self.decoder.prefill_flops([load.text + tokens for tokens in visual])
        cache = sum((load.text + tokens) * width for tokens, width in zip(visual, self.decoder.kv_widths, strict=True))
        return Cost(tower, decoder, sum(visual) / len(visual), 2 * cache)

    def predict(self, load: Load, methods: Sequence[Method], budgets: Sequence[Budget]) -> Cost:
        """Return the cost of a prefill with methods, combined as in `patch`.

        Every method is assumed to keep exactly its budget. A merge in the tower is assumed to remove the same number of
        tokens in each block, and a `UnitDropper` to remove all of them at its block.

        Args:
            load: Size of the prompt.
            methods: Configured methods.
            budgets: Budget of each method.

        Raises:
            BudgetError: If a budget cannot be reached.
        """
        pixels, merged, visual = 1.0, None, float(load.visual)
        per_layer: list[float] | None = None
        layers = self.decoder.layers
        pairs = sorted(zip(methods, budgets, strict=True), key=lambda pair: (pair[0].site.order, pair[0].cut_layer))
        for method, budget in pairs:
            if budget.is_identity() or method.site is Site.ATTENTION or isinstance(method, ImageChooser):
                continue
            if method.site in (Site.PRE_ENCODER, Site.IN_ENCODER):
                share = self._count_kept(budget, visual, 0, load.text) / visual
                visual *= share if method.removes else 1.0
                if method.site is Site.PRE_ENCODER:
                    pixels *= share
                elif self.tower is not None:
                    merged = _compute_tower_shares(method, share, self.tower.layers)
                continue
            arrived = visual
            for stage, stage_budget in method.stages(budget, layers):
                per_layer = [visual] * layers if per_layer is None else per_layer
                if stage_budget.is_identity():
                    continue
                kept = self._count_kept(stage_budget, visual, stage.cut_layer, load.text, arrived)
                visual = min(visual, kept)
                per_layer[stage.cut_layer :] = [visual] * (layers - stage.cut_layer)
        return self.compute_cost(load, pixels=pixels, merged=merged, per_layer=per_layer or [visual] * layers)

    def _count_kept(self, budget: Budget, count: float, layer: int, text: int, original: float | None = None) -> int:
        return budget.resolve(
            [max(1, round(count))],
            layer=layer,
            shape=self.decoder,
            text_tokens=text,
            original=None if original is None else [max(1, round(original))],
        )[0]


def _compute_tower_shares(method: Method, share: float, blocks: int) -> list[float]:
    """Return the share of the tokens at the input of each tower block, and at the output of the last block."""
    if isinstance(method, UnitDropper):
        first = method.block(blocks)
        return [1.0] * first + [share] * (blocks + 1 - first)
    return [1 - (1 - share) * block / blocks for block in range(blocks + 1)]


@dataclass(frozen=True)
class Limit:
    """Largest possible speed-up of a prefill by methods of one site, as a ratio of FLOPs.

    Args:
        site: Site of the methods.
        what: Description of the assumed cut.
        at_keep: Speed-up at a given `keep`.
        limit: Speed-up if no visual token is kept. Text is always kept.
    """

    site: Site
    what: str
    at_keep: float
    limit: float


def compute_site_limits(model: CostModel, load: Load, keep: float, layer: int = IN_LLM_LAYER) -> list[Limit]:
    """Return the largest possible speed-up of each site, in the order of the data flow.

    The cost of the selection is not included, and real methods may cut later, so these are upper bounds. For a decode
    step, whose time depends on memory reads, see `compute_decode_limit`.

    Args:
        model: Cost model.
        load: Size of the prompt.
        keep: Share of the visual tokens.
        layer: Decoder layer of an IN_LLM cut.

    Examples:
        >>> limits = compute_site_limits(LLAVA_7B, LLAVA_7B_LOAD, keep=0.25)
        >>> [f"{limit.site} x{limit.at_keep:.1f}" for limit in limits][:2]
        ['PRE_ENCODER x3.2', 'IN_ENCODER x3.2']
    """
    flops, layers = model.compute_cost(load).flops, model.decoder.layers
    blocks = 0 if model.tower is None else model.tower.layers
    layer = min(layer, layers - 1)

    def ratios(cost: Any) -> tuple[float, float]:
        return flops / cost(keep).flops, flops / cost(0.0).flops

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
    """Return the largest possible speed-up of a decode step, at `keep` and without visual tokens.

    The time of a step is assumed to be proportional to the memory that it reads: the weights, and the cache of `rows`
    prompts.
    """
    weights = model.decoder.num_weights

    def read(share: float) -> float:
        return weights + rows * model.compute_cost(load, per_layer=[share * load.visual] * model.decoder.layers).cache

    return read(1.0) / read(keep), read(1.0) / read(0.0)


# LLaVA-1.5-7B, and a prompt of one image and 64 text tokens: reference for lists of methods. Constants, because reading
# the configuration would take seconds.
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
