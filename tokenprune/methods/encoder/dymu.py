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
    """Merge tokens above calibrated similarities inside the vision tower (DyMU).

    Each block merges token pairs with a similarity above the block's threshold. The thresholds are calibrated so that
    images keep the share `keep` on average. Each image has its own count, independent of the other images in the batch,
    and simple images keep fewer tokens than detailed ones. `keep` must be one of the calibrated shares.

    Args:
        thresholds: Path of a file written by `tokenprune fit dymu`, or the result of
            `tokenprune_bench.calibration.calibrate`. None: thresholds that ship with the package, which include the
            demo model.
        proportional: Add the logarithm of a token's size to its attention logits, so that a merged token counts as
            often as its members.
        max_r: Maximum number of tokens that a block merges per image. A block merges at most half of the tokens.
        vtu: Virtual token unmerging in the decoder. "off", or "expanded": apply weights to merged tokens and attention
            to all positions. It saves no KV memory (docs/results/methods.md).
        exact: Keep exactly the number of patches that `keep` requests (an addition). The content still decides the
            merged pairs. No block goes below the count, and pairs below the threshold merge where later blocks could
            not reach it. Required if the count must be known before encoding, as in vLLM.

    Source:
        Wang et al., "DyMU: Dynamic Merging and Virtual Unmerging for Efficient VLMs" (arXiv 2504.17040), sections 3.1
        (dynamic token merging) and 3.2 (virtual token unmerging).

    Differences from the paper:
        - Similarity is the cosine of the keys, averaged over heads, as in the authors' code. The paper uses the dot
          product.
        - At the end of the tower every patch gets the feature of its merged token. The language model sees one token
          per group, at the position of its first patch.
        - Results do not depend on batching, and tokens keep their order. In batches, and so in calibration, the
          authors' code reorders images without merges, divides by size + 1e-4, and lets odd images merge more than
          half; thresholds differ by up to 3e-3. For single images without a class token it sorts the rest by similarity
          (up to 4 tokens of 113 on average).
        - Linear schedules are straight lines over the blocks that the model reads. The authors' schedules differ by up
          to 16 merges per block, and by 42 for reversed ones on LLaVA, in a block whose output is unused. See
          docs/results/methods.md for measurements.

    Examples:
        >>> model = tokenprune.patch(model, DyMU(exact=True), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        128
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
        return None if self._loaded_thresholds is None else self._loaded_thresholds.fingerprint

    @property
    def _loaded_thresholds(self) -> Thresholds | None:
        assert not isinstance(self.thresholds, (str, Path))  # loaded by __post_init__
        return self.thresholds

    def check_served(self, kind: str, dtype: str, blocks: int) -> None:
        thresholds = self._loaded_thresholds
        if thresholds is None:
            raise OptionError(
                f"{self.name} requires thresholds=PATH in vLLM, which stores weights in a different form than the "
                "shipped thresholds expect. Write the file with `tokenprune fit dymu`."
            )
        calibrated = (
            thresholds.fingerprint.kind,
            thresholds.fingerprint.dtype,
            {len(values) for values in thresholds.values.values()},
        )
        actual = kind, dtype, {blocks}
        if calibrated != actual:
            towers = [f"a {kind} in {dtype} with {max(blocks)} blocks" for kind, dtype, blocks in (calibrated, actual)]
            raise OptionError(
                f"{self.name}: the thresholds are for {towers[0]}, but this tower is {towers[1]}. Run `tokenprune fit "
                "dymu` for this model in its serving dtype."
            )

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return a matcher per block that merges the pairs above the block's threshold."""
        if self.is_identity(budget):
            return [None] * tower.blocks
        thresholds = self._loaded_thresholds or find_shipped(tower.fingerprint)
        thresholds.check(tower.fingerprint)
        match = partial(threshold_match, protected=tower.protected, limit=self.max_r)
        values = thresholds.for_keep(budget.keep).tolist()
        self._check(
            len(values) == tower.blocks,
            f"the thresholds are for {len(values)} blocks, but the tower has {tower.blocks}. Run `tokenprune fit dymu` "
            "for this model.",
        )
        if not self.exact:
            return [partial(match, threshold=value) if value < 1 else None for value in values]
        floor = tower.count_kept(budget) + tower.protected
        return [
            # A threshold of 1 disables merging, even if rounding gives equal keys a cosine above 1.
            partial(match, threshold=value if value < 1 else math.inf, floor=floor, ceiling=ceiling)
            for value, ceiling in zip(values, self._compute_ceilings(floor, tower), strict=False)
        ] + [None] * (tower.blocks - tower.blocks_read)

    def _compute_ceilings(self, floor: int, tower: Tower) -> list[int]:
        """Return the maximum number of tokens after each block, so that later blocks can still reach `floor`.

        Raises:
            BudgetError: If all blocks together cannot reach `floor`.
        """
        ceilings = [floor]
        for _ in range(tower.blocks_read):
            max_merged = ceilings[-1] - tower.protected  # a block merges at most half of its patches
            ceilings.append(ceilings[-1] + (max_merged if self.max_r is None else min(max_merged, self.max_r)))
        if ceilings.pop() < tower.tokens:
            raise BudgetError(
                f"dymu cannot keep exactly {floor - tower.protected} of {tower.patches} patches: {tower.blocks_read} "
                f"blocks merge at most half{'' if self.max_r is None else f' and max_r={self.max_r}'} of the tokens "
                "each. Pass a larger keep."
            )
        return ceilings[::-1]
