# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError
from tokenprune.kernels.merging import threshold_match
from tokenprune.methods.encoder.thresholds import Thresholds, find_shipped
from tokenprune.methods.fitted import LazyFit
from tokenprune.methods.registry import register
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.method import Site
from tokenprune.selection.sites.encoder import EncoderMethod, Matcher, Tower


@register("dymu", site=Site.IN_ENCODER, paper="arXiv 2504.17040, NeurIPS 2025", merges=True)
@dataclass(frozen=True)
class DyMU(EncoderMethod):
    """Merge the tokens inside the vision tower that are more similar than calibrated thresholds: simple images keep
    fewer tokens than detailed ones.

    `keep` is an average over images like those of the calibration: each image gets a number of its own, which no
    other image of a batch changes. It must be one of the shares that the thresholds were calibrated for.

    thresholds: what `tokenprune fit dymu` wrote (a path), or what `tokenprune_bench.calibration.calibrate` returned.
    Without them, those that the package ships for this model, if it does (it does for the demo model).
    proportional: add the logarithm of a token's size to its attention logits, so that a merged token counts as often as
    its members did.
    max_r: tokens that a block merges in one image at most; half of them is the limit in any case.
    vtu: virtual unmerging in the decoder: "off", or "expanded", which applies its weights to the merged tokens and its
    attention to all positions. It saves no KV memory (docs/methods/dymu.md).
    exact: every image keeps exactly the number of patches that `keep` asks for: what merges in which block is still
    its content's choice, but no block goes below that number, and where the thresholds would leave more than the blocks
    after can still merge, the best pairs below the threshold merge too. For those who must know the number before the
    image, such as vLLM.

    Source: Wang et al., "DyMU: Dynamic Merging and Virtual Unmerging for Efficient VLMs", sections 3.1 (dynamic
    token merging) and 3.2 (virtual token unmerging). `exact` is ours.

    Differs from the paper: similarity is the cosine of the keys, mean over heads, as in the authors' code (the paper
    says dot product); at the tower's end every patch gets the feature of its merged token back, and the language model
    sees one token for each merged one, at the position of its first patch. Alone, in a batch and in calibration an
    image is treated alike, by order of place. The authors' code in batches, and so in calibration, reorders images that
    merge nothing, divides by the size + 1e-4 and lets odd images merge more than half, by which thresholds differ by up
    to 3e-3; alone, without a class token, it orders what is left by similarity (up to 4 tokens of 113 on average).
    Linear schedules are straight lines over the blocks that are read; theirs differ by up to 16 merges a block, and
    reversed on LLaVA by 42, which are lost in a block that nobody reads (docs/methods/dymu.md, measured).
    """

    ragged = True
    fit = LazyFit("tokenprune_bench.calibration.run", "fit_dymu")
    fit_limit: ClassVar[int | None] = None

    thresholds: str | Path | Thresholds | None = field(default=None, metadata={"file": True})
    proportional: bool = True
    max_r: Annotated[int, Ge(1)] | None = None
    vtu: Literal["off", "expanded"] = "off"
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.thresholds, (str, Path)):
            object.__setattr__(self, "thresholds", Thresholds.load(self.thresholds))

    @property
    def inexact(self) -> str | None:
        return None if self.exact else "each image keeps its own number of tokens. Pass exact=True."

    @property
    def calibrated_for(self) -> Fingerprint | None:
        return None if self._given is None else self._given.fingerprint

    @property
    def _given(self) -> Thresholds | None:
        assert not isinstance(self.thresholds, (str, Path))  # read by __post_init__
        return self.thresholds

    def check_served(self, kind: str, dtype: str, blocks: int) -> None:
        found = self._given
        if found is None:
            raise OptionError(
                f"{self.name} needs thresholds=PATH in the server's setting, a file by `tokenprune fit dymu`: those "
                "that ship with the package are recognised by weights, which vLLM keeps in another form"
            )
        made_for = found.fingerprint.kind, found.fingerprint.dtype, {len(values) for values in found.values.values()}
        ours = kind, dtype, {blocks}
        if made_for != ours:
            towers = [f"a {kind} in {dtype} with {max(blocks)} blocks" for kind, dtype, blocks in (made_for, ours)]
            raise OptionError(
                f"{self.name}: these thresholds were calibrated for {towers[0]}, and this tower is {towers[1]}: run "
                "`tokenprune fit dymu` for this model in the dtype that it is served in"
            )

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what merges the pairs above each block's threshold."""
        if self.is_identity(budget):
            return [None] * tower.blocks
        thresholds = self._given or find_shipped(tower.fingerprint)
        thresholds.check(tower.fingerprint)
        match = partial(threshold_match, protected=tower.protected, limit=self.max_r)
        values = thresholds.for_keep(budget.keep).tolist()
        self._check(
            len(values) == tower.blocks,
            f"thresholds are for a tower of {len(values)} blocks, and this one has {tower.blocks}: run `tokenprune "
            "fit dymu` for this model",
        )
        if not self.exact:
            return [partial(match, threshold=value) if value < 1 else None for value in values]
        floor = tower.left(budget) + tower.protected
        return [
            # A threshold of 1 means that nothing merges, whatever rounding makes of the cosine of equal keys.
            partial(match, threshold=value if value < 1 else math.inf, floor=floor, ceiling=ceiling)
            for value, ceiling in zip(values, self._ceilings(floor, tower), strict=False)
        ] + [None] * (tower.blocks - tower.read)

    def _ceilings(self, floor: int, tower: Tower) -> list[int]:
        """Return for each block whose output is read how many tokens it may leave at most, so that the blocks after it
        can get down to `floor`; raises BudgetError if all of them together cannot."""
        ceilings = [floor]
        for _ in range(tower.read):
            more = ceilings[-1] - tower.protected  # a block merges half of its patches at most
            ceilings.append(ceilings[-1] + (more if self.max_r is None else min(more, self.max_r)))
        if ceilings.pop() < tower.tokens:
            raise BudgetError(
                f"dymu cannot leave exactly {floor - tower.protected} of {tower.patches} patches: a block merges at "
                f"most half of its tokens{'' if self.max_r is None else f' and max_r={self.max_r}'}, and {tower.read} "
                "blocks count; ask for more"
            )
        return ceilings[::-1]
