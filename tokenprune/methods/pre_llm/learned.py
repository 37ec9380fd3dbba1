# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import select_farthest_weighted
from tokenprune.methods.fitted import LazyFit
from tokenprune.methods.registry import register
from tokenprune.methods.selector import Selector, describe_question, describe_tokens
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LOWEST = -30.0  # logarithm of the smallest weight, which is not 0 in float32


@register("learned", site=Site.PRE_LLM, paper="none (an addition)")
@dataclass(frozen=True)
class Learned(Pruner):
    """Keep tokens by a small scoring head fitted to the model and the user's images.

    The head reads the features of a token, its row and column, its norm and its cosine to the mean of the image. If it
    was fitted with the question, it also reads the mean embedding of the text after the image.

    Args:
        selector: Path of a file written by `tokenprune fit learned`. None: all tokens score equally, so the choice is
            that of `divprune`, with a note in `Stats.notes`.
        diversity: 0 keeps the highest scores. Otherwise each pick maximizes exp(score) * distance ** diversity, where
            distance is the cosine distance to the nearest earlier pick, as in `divprune`.

    Source:
        An addition. Learned selectors of other projects train several million parameters, often together with the
        model; this head has at most 1 % of the model's parameters and is fitted to the frozen model's own answers.

    Examples:
        >>> model = tokenprune.patch(model, Learned(diversity=2.0), keep=0.25)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).keep_ratio
        0.25
    """

    fit = LazyFit("tokenprune_bench.calibration.selector_fitting", "fit_learned")
    fit_limit: ClassVar[int | None] = None
    fit_question: ClassVar[str | None] = None  # use the question of the drawn scene
    default_equals: ClassVar[str | None] = "divprune"
    never_nan: ClassVar[bool] = True

    selector: str | Path | None = field(default=None, metadata={"file": True})
    diversity: Annotated[float, Ge(0), Le(16)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fitted  # noqa: B018 (raise errors of the file early)

    @cached_property
    def _fitted(self) -> Selector | None:
        return None if self.selector is None else Selector.load(self.selector)

    @property
    def query_aware(self) -> bool:
        return self._fitted is not None and self._fitted.uses_question

    @property
    def fitted_width(self) -> int | None:
        return None if self._fitted is None else self._fitted.num_features

    def check_model(self, decoder: torch.nn.Module) -> None:
        if self._fitted is not None and self.selector is not None:
            self._fitted.check_decoder(self.name, self.selector, decoder)

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        if self._fitted is None:
            tokens.note(f"{self.name} chooses like divprune without a selector")
            return torch.zeros(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
        self._check(
            self.fitted_width == tokens.hidden.shape[2],
            f"{self.selector} is for a hidden size of {self.fitted_width}, not {tokens.hidden.shape[2]}. Run "
            "`tokenprune fit learned` with this model.",
        )
        question = describe_question(tokens) if self._fitted.uses_question else None
        return self._fitted.score(describe_tokens(tokens), question)

    def select(self, tokens: VisualTokens) -> Selection:
        score = self.score(tokens)
        if not self.diversity:
            return Selection.top(score, tokens)
        # The logarithm of exp(score) * distance ** diversity, divided by diversity, ranks the tokens equally.
        highest = score.masked_fill(~tokens.mask, -torch.inf).amax(1, keepdim=True)
        weight = ((score - highest) / self.diversity).clamp(min=_LOWEST).exp()
        keep = select_farthest_weighted(tokens.hidden, tokens.mask, weight, tokens.budget, max(tokens.keep))
        return Selection(keep, counts=tokens.keep)
