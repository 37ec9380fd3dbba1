# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from tokenprune.methods.multi_cut import SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Selection, Site
from tokenprune.selection.tokens import VisualTokens

_EPSILON = 1e-6  # of the authors' code


@register("clse", site=Site.IN_LLM, needs=("embeddings", "last_row_attention"), paper="arXiv 2606.24165, ECCV 2026")
@dataclass(frozen=True)
class CLSE(SharedBudgetCuts):
    """Keep the attended tokens whose high spatial frequencies change most in the first layers (CLSE).

    The features of an image form a grid. A Gaussian high-pass filter of the grid's Fourier transform, averaged over the
    channels, gives the share of high frequencies of a token, at the input of the decoder and at the first cut. The
    relative change, standardized over the image, passes through a sigmoid and weights the attention of the prompt's
    last token. Two later cuts rank by this attention only, because the remaining tokens form no grid.

    `keep` is the average number of tokens over the decoder's layers. The default 1/3 matches the authors' "192 tokens".

    Args:
        layers: Decoder layers of the three cuts. None: layers 1, 11 and 21 of 32, scaled to the depth of the decoder.
        cutoff: Width of the filter as a share of half of the shorter side of the grid.
        temperature: Temperature of the sigmoid. A small value separates changing and constant tokens sharply.

    Source:
        Chen et al., "CLSE: Cross-Layer Spectral Evolution for Token Pruning in Multimodal Large Language Models" (arXiv
        2606.24165), the authors' code for LLaVA-1.5. The paper's text was not available.

    Differences from the paper:
        - Token counts follow `keep` in the ratio 330 : 210 : 62 of the 192-token setting, instead of tables.
        - Images without a known grid are ranked by attention at all cuts.
        - Videos are transformed frame by frame and use the three cuts of images. The authors cut videos once.
        - Each image has its own budget.

    Examples:
        >>> model = tokenprune.patch(model, CLSE(layers=[1, 2, 4]), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        3
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 1 / 3
    depths = (1 / 32, 11 / 32, 21 / 32)
    sizes = (330.0, 210.0, 62.0)

    cutoff: Annotated[float, Gt(0)] = 0.1
    temperature: Annotated[float, Gt(0)] = 0.1

    def choose(self, tokens: VisualTokens, cut: int) -> Selection:
        score = tokens.last_row_attention.mean(dim=1)
        if cut == 0:
            score = score * self._change(tokens)
        return Selection.top(score, tokens)

    def _change(self, tokens: VisualTokens) -> torch.Tensor:
        """Return the weight of each token by the change of its high frequencies, shape (S, N), float32."""
        weight = torch.ones(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
        for index, (count, grid) in enumerate(zip(tokens.counts, tokens.grids, strict=True)):
            if grid is None or count == 1:
                continue
            before, after = (
                self._compute_high_frequencies(hidden[index, :count], grid)
                for hidden in (tokens.embeddings, tokens.hidden)
            )
            change = ((after - before).abs() / (before.mean() + before + _EPSILON)).clamp(max=1)
            standardized = (change - change.mean()) / (change.std() + _EPSILON)
            weight[index, :count] = (standardized / self.temperature).sigmoid()
        return weight

    def _compute_high_frequencies(self, features: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return the mean magnitude over the channels behind the high-pass filter, shape (N,), float32."""
        frames, height, width = grid
        spectrum = torch.fft.fft2(features.float().view(frames, height, width, -1), dim=(1, 2))
        row, column = (torch.arange(side, device=features.device) - side // 2 for side in (height, width))
        distance = (row[:, None] ** 2 + column**2).float()
        deviation = max(min(height // 2, width // 2) * self.cutoff, _EPSILON)
        gain = torch.fft.ifftshift(1 - (-distance / (2 * deviation**2)).exp())
        return torch.fft.ifft2(spectrum * gain[None, ..., None], dim=(1, 2)).abs().mean(-1).flatten()
