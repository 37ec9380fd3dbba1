# SPDX-License-Identifier: Apache-2.0
"""Base classes of methods: `Method` for all sites, and `Pruner` for methods that select visual tokens.

The base classes of the other sites are in `tokenprune.selection.sites`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.kernels.join import merge_assigned
from tokenprune.kernels.take import top_mask
from tokenprune.selection.options import CallRepr, check_options

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenprune.budgets import Budget
    from tokenprune.selection.tokens import VisualTokens


class Site(enum.StrEnum):
    """Stage of the model at which a method acts, in the order of the data flow.

    A member equals its name as a string. ATTENTION methods remove no token: they change which tokens attend to which.

    Examples:
        >>> tokenprune.Site.PRE_LLM == "PRE_LLM"
        True
        >>> tokenprune.Site.PRE_LLM.description
        'before the language model'
    """

    PRE_ENCODER = "PRE_ENCODER"
    IN_ENCODER = "IN_ENCODER"
    PRE_LLM = "PRE_LLM"
    ATTENTION = "ATTENTION"
    IN_LLM = "IN_LLM"
    DECODE = "DECODE"

    @property
    def order(self) -> int:
        """Index of this site in the data flow."""
        return list(Site).index(self)

    @property
    def description(self) -> str:
        """Phrase that completes "the method acts ...", such as "before the language model"."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Site.PRE_ENCODER: "on pixels",
    Site.IN_ENCODER: "in the vision tower",
    Site.PRE_LLM: "before the language model",
    Site.ATTENTION: "on attention",
    Site.IN_LLM: "in the language model",
    Site.DECODE: "while decoding",
}


@dataclass(frozen=True)
class Selection:
    """Visual tokens to keep, and for merging the kept token that absorbs each dropped token.

    Shapes use S segments (images) and N tokens in the longest segment.

    Args:
        keep: Mask of kept tokens, shape (S, N), bool. False for padding.
        assign: Index of the kept token that absorbs each token, shape (S, N), int64. A kept token has its own index,
            -1 drops a token without merging it. None: no token is merged.
        weight: Weight of each token in the mean of its group, shape (S, N), float. None: all tokens weigh the same.
        counts: Number of kept tokens per segment, as Python ints. None: the engine counts the mask, which waits for
            the device.

    Examples:
        >>> keep = torch.tensor([[True, False, True]])
        >>> tokenprune.Selection(keep, assign=torch.tensor([[0, 2, 2]]), counts=[2]).counts
        [2]
    """

    keep: Tensor
    assign: Tensor | None = None
    weight: Tensor | None = None
    counts: list[int] | None = None

    @staticmethod
    def top(score: Tensor, tokens: VisualTokens) -> Selection:
        """Keep the tokens with the highest scores in each segment.

        Ties go to the lower index, and NaN ranks lowest.

        Args:
            score: Score of each token, shape (S, N), float. Padding is ignored.
            tokens: Visual tokens with their budget.

        Examples:
            >>> from tokenprune.testing import visual_tokens
            >>> tokens = visual_tokens(torch.zeros(1, 4, 8), keep=2)
            >>> tokenprune.Selection.top(torch.tensor([[0.1, 0.9, 0.3, 0.2]]), tokens).keep
            tensor([[False,  True,  True, False]])
        """
        keep = top_mask(score, tokens.mask, tokens.budget, max(tokens.keep))
        return Selection(keep, counts=tokens.keep)

    def apply(self, rows: Tensor, index: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Replace the row of each kept token by the weighted mean of the tokens assigned to it.

        Every engine merges with this function. Without `assign`, the rows are returned unchanged.

        Args:
            rows: Features in any layout, shape (..., D).
            index: Row of each token in the flattened `rows`, shape (S, N), int64. None: the rows are the S * N tokens.
            mask: Mask of tokens, shape (S, N), bool. Padding is False. None: no padding.

        Returns:
            Features of the same shape. The rows of dropped tokens are unchanged, so select the kept rows afterwards.

        Examples:
            >>> selection = tokenprune.Selection(torch.tensor([[True, False, True]]), assign=torch.tensor([[0, 2, 2]]))
            >>> rows = torch.tensor([[[1.0], [2.0], [4.0]]])
            >>> selection.apply(rows)[selection.keep]
            tensor([[1.],
                    [3.]])
        """
        if self.assign is None:
            return rows
        flat = rows.reshape(-1, rows.shape[-1])
        if index is None:
            index = torch.arange(self.keep.numel(), device=rows.device).view(self.keep.shape)
        mask = torch.ones_like(self.keep) if mask is None else mask
        return merge_assigned(flat, self.assign, mask, index, self.weight).view_as(rows)


@dataclass(frozen=True)
class Method(CallRepr):
    """Base class of all methods: a frozen dataclass whose fields are the options of the method.

    Derive from the base class of a site: `Pruner` (PRE_LLM, IN_LLM), `EncoderMethod` (IN_ENCODER), `DecodeMethod`
    (DECODE), `ResizeMethod` or `ImageChooser` (PRE_ENCODER), or `AttentionPattern` (ATTENTION). The repr is a call with
    the options that differ from their defaults, such as `dart(pivot_image=8)`.

    Attributes:
        name: Registered name. Set by `register`, like `site`, `paper` and `merges`.
        default_keep: `keep` if the user passes none.
        query_free: Options that make the selection independent of the question. Empty if there are none.
        fallback_options: Options with which the method reads fewer observables. Empty if there are none.
        syncs_device: True if a stage reads tensor values on the host, which waits for the device.
        removes: False if the decoder gets the same number of visual tokens as without the method.
        min_tokens: Minimum number of kept tokens per image. 0 if the method may drop a whole image.
        reconstruction: True if the full paper or code was not available. The docstring then names the assumptions.
        fit: Static method `fit(model, samples, out, *, progress, **options)` that `tokenprune fit NAME` calls. None if
            the method needs no fitting.
        fit_limit: Default number of images for `tokenprune fit`. None: all images of a folder.
        fit_question: Default question about each image. None: the question of the synthetic scene.
        default_equals: Method that makes the same choice as this method without a fitted file. The tuner and the
            benchmark run such a method only if the user names it.

    Examples:
        >>> method = tokenprune.method("dart", pivot_image=8)
        >>> isinstance(method, tokenprune.Method), method
        (True, dart(pivot_image=8))
    """

    name: ClassVar[str] = ""
    site: ClassVar[Site] = Site.PRE_LLM
    paper: ClassVar[str] = ""
    merges: ClassVar[bool] = False
    default_keep: ClassVar[float] = 0.25
    query_free: ClassVar[Mapping[str, Any]] = {}
    fallback_options: ClassVar[Mapping[str, Any]] = {}
    reconstruction: ClassVar[bool] = False
    syncs_device: ClassVar[bool] = False
    removes: ClassVar[bool] = True
    min_tokens: ClassVar[int] = 1
    fit: ClassVar[Callable[..., Any] | None] = None
    fit_limit: ClassVar[int | None] = 48
    fit_question: ClassVar[str | None] = "Describe this image."
    default_equals: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Check the types of the options. A subclass with additional checks calls this method first.

        Raises:
            OptionError: If an option does not match the type of its field.
        """
        check_options(self)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the observables that the method reads.

        Set by `register`. A class whose needs depend on its options overrides this property.
        """
        return frozenset()

    @property
    def chooses_count(self) -> bool:
        """True if the number of kept tokens depends on their content.

        Such a method also runs if its budget keeps all tokens, unless the user passes `keep=1.0`. A stage that only
        observes and remembers sets it too.
        """
        return False

    @property
    def query_aware(self) -> bool:
        """True if the selection may change with the question."""
        return False

    @property
    def prefix_cache_safe(self) -> bool:
        """True if the selection depends only on tokens before the end of the image."""
        return not self.query_aware

    def fallback_hint(self, unknown: Collection[str], spell: Callable[[Any], str] = repr) -> str:
        """Return the fallback options, such as `features="tower"`, if they avoid the observables `unknown`.

        Args:
            unknown: Names of the observables that are not available.
            spell: Function that formats an option value.

        Returns:
            The options, or an empty string if they do not help.
        """
        if not self.fallback_options or dataclasses.replace(self, **self.fallback_options).needs & set(unknown):
            return ""
        return ", ".join(f"{name}={spell(value)}" for name, value in self.fallback_options.items())

    @property
    def cut_layer(self) -> int:
        """Index of the decoder layer at whose input the method first cuts. 0 is the input of the decoder."""
        return 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        """Return the stages of the method with their budgets. Most methods have one stage.

        Args:
            budget: Budget of the whole method.
            layers: Number of decoder layers.
        """
        return [(self, budget)]

    @property
    def preferred(self) -> Method:
        """Variant that `patch` tries first. It uses `self` if the model or the other methods do not support it."""
        return self

    def check_model(self, decoder: nn.Module) -> None:
        """Raise OptionError if the method was fitted to a different decoder."""

    def resolve_count(self, count: int, keep: int) -> int:
        """Return the number of tokens to keep of `count` tokens, given the requested number `keep`."""
        return keep

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise OptionError(f"{self.name}: {message}")


SIZES = "sizes"  # see `Pruner.weighs_attention`


@dataclass(frozen=True)
class Pruner(Method):
    """Base class of methods that select visual tokens before (PRE_LLM) or inside (IN_LLM) the decoder.

    A subclass implements `score`. It overrides `select` instead if its selection is not a top-k of scores. It receives
    read-only `VisualTokens`, and never a model, a cache, a mask or position ids. An IN_LLM method has a field `layer`,
    the index of the decoder layer at whose input it cuts.

    Attributes:
        never_nan: True if the scores of an image are never all NaN. This skips a check that waits for the device.

    Examples:
        >>> from tokenprune.testing import visual_tokens
        >>> class LargestNorm(tokenprune.Pruner):
        ...     def score(self, tokens):
        ...         return tokens.hidden.float().norm(dim=-1)
        >>> tokens = visual_tokens(torch.tensor([[[1.0], [5.0], [2.0], [4.0]]]), keep=2)
        >>> LargestNorm().select(tokens).keep
        tensor([[False,  True, False,  True]])
    """

    never_nan: ClassVar[bool] = False
    ranks_by_score: ClassVar[bool] = True  # `select` is the top-k of `score`; a class that defines `select` sets False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "select" in cls.__dict__:
            cls.ranks_by_score = False

    @property
    def weighs_attention(self) -> bool:
        """True if attention to a merged token is scaled by its number of members.

        The method remembers the numbers as `SIZES`, float32, shape (S, N). See attention/weighing.py.
        """
        return False

    @property
    def cut_layer(self) -> int:
        return int(getattr(self, "layer", 0)) if self.site in (Site.IN_LLM, Site.DECODE) else 0

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        """Blocks of the vision tower whose observables the method reads, such as "encoder_attention".

        A negative int counts from the last block that the model reads (-1 is that block). A float between 0 and 1 is a
        share of the depth.
        """
        return (-1,)

    @property
    def fitted_width(self) -> int | None:
        """Hidden size of the model that the method was fitted to. None if it runs with any size."""
        return None

    def score(self, tokens: VisualTokens) -> Tensor:
        """Return the score of each visual token, shape (S, N), float. Higher scores are kept."""
        raise NotImplementedError(f"{type(self).__name__} implements neither score() nor select()")

    def select(self, tokens: VisualTokens) -> Selection:
        """Return the tokens to keep. The default keeps the highest scores."""
        return Selection.top(self._check_score(self.score(tokens), tokens.mask), tokens)

    def _check_score(self, score: Any, mask: Tensor) -> Tensor:
        """Return `score`. Raise TokenPruneError if its type, shape, dtype, device or values are invalid."""
        expected = f"{self.name}.score() must return a float tensor [S, N] = {list(mask.shape)}"
        if not isinstance(score, torch.Tensor):
            raise TokenPruneError(f"{expected}, not {type(score).__name__}")
        is_orderable = score.dtype != mask.dtype and not score.is_complex()  # integers are accepted
        if score.shape != mask.shape or not is_orderable or score.device != mask.device:
            actual = f"{str(score.dtype).removeprefix('torch.')} {list(score.shape)} on {score.device}"
            raise TokenPruneError(f"{expected} on {mask.device}, not {actual}")
        # NaN ranks lowest. An image with only NaN scores would silently keep its first tokens.
        if not self.never_nan and bool((score.isnan() | ~mask).all(dim=1).any()):
            raise TokenPruneError(f"{expected}, but all scores of an image are NaN.")
        return score
