# SPDX-License-Identifier: Apache-2.0
"""The definition of a method: its site, its needs, and the base class of those that choose among visual tokens. The
bases of other sites are in `tokenprune.selection.sites`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.kernels.take import top_mask
from tokenprune.selection.options import CallRepr, check_options

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenprune.budgets import Budget
    from tokenprune.selection.tokens import VisualTokens


class Site(enum.StrEnum):
    """The place at which a method acts, in the order in which data flows; a member equals its name as a string.

    ATTENTION removes nothing: it changes which tokens the decoder's layers attend to in prefill.
    """

    PRE_ENCODER = "PRE_ENCODER"
    IN_ENCODER = "IN_ENCODER"
    PRE_LLM = "PRE_LLM"
    ATTENTION = "ATTENTION"
    IN_LLM = "IN_LLM"
    DECODE = "DECODE"

    @property
    def order(self) -> int:
        """Index of this site in the order in which data meets them."""
        return list(Site).index(self)

    @property
    def description(self) -> str:
        """The place in plain words: "before the language model"."""
        return _WORDS[self]


_WORDS = {
    Site.PRE_ENCODER: "on pixels",
    Site.IN_ENCODER: "in the vision tower",
    Site.PRE_LLM: "before the language model",
    Site.ATTENTION: "on attention",
    Site.IN_LLM: "in the language model",
    Site.DECODE: "while decoding",
}


@dataclass(frozen=True)
class Selection:
    """The visual tokens to keep, and the kept token that each of the others is merged into.

    keep:    bool `[S, N]`, True = stays (padding of short segments is False).
    assign:  long `[S, N]` or None (plain dropping): for each token the index in its segment of the kept token that
             absorbs it. A kept token is assigned to itself; -1 = dropped without a trace.
    weight:  float `[S, N]` or None (equal): weight of each token in the mean that its kept token becomes.
    counts:  how many tokens of each segment stay, S ints, if the method knows that without asking the device; None:
             they are counted, which lets the host wait for it.
    """

    keep: Tensor
    assign: Tensor | None = None
    weight: Tensor | None = None
    counts: list[int] | None = None

    @staticmethod
    def top(score: Tensor, tokens: VisualTokens) -> Selection:
        """Keep the highest scores of each segment; ties go to the lower index, NaN counts as lowest.

        score: float `[S, N]`, higher is kept; padding is ignored.
        """
        keep = top_mask(score, tokens.mask, tokens.budget, max(tokens.keep))
        return Selection(keep, counts=tokens.keep)


@dataclass(frozen=True)
class Method(CallRepr):
    """Base of all methods: a frozen dataclass whose fields are the method's options.

    It says who a method is. What a method does is said by the base class of its site, which a method of yours derives
    from: `Pruner` (PRE_LLM, IN_LLM), `EncoderMethod` (IN_ENCODER), `DecodeMethod` (DECODE), `ResizeMethod` or
    `ImageChooser` (PRE_ENCODER), `AttentionPattern` (ATTENTION).

    The repr of a method is its call, `dart(pivot_image=8)`: its name, and the options that differ from their defaults.

    name, site, paper, merges: set by `register`.
    default_keep: the `keep` of a user who gives none.
    query_free:   options, by name, under which the choice no longer depends on the question; empty if there are none.
    fallback_options: options, by name, under which it reads less of a model than it may; empty if there are none.
    syncs_device:  choosing reads values on the host, which waits for the device, in one of its stages at least.
    removes:      False if the decoder gets as many visual tokens as without it.
    least:        the fewest tokens of an image that it may keep; 0 for a method that may withdraw an image.
    reconstruction: True if it is written from other sources than its authors' full text or code, so that parts of it
                  are guesses, which its docstring names.
    fit:          for a method that is fitted to a model first, a static method
                  `fit(model, samples, out, *, progress, **options) -> result`, which `tokenprune fit NAME` calls; see
                  docs/extend/add-a-method.md. None: nothing is fitted.
    fit_limit:    how many images `tokenprune fit` takes where the user names no number; None: all of a folder.
    fit_question: asked about each image where the user asks none; None: a drawn scene's own.
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

    def __post_init__(self) -> None:
        """Raise OptionError for an option that its field's type does not allow. A class with checks of its own calls
        this one first."""
        check_options(self)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the observables that it reads (see `selection.observables`): set by `register`, or a property of a
        class whose options decide."""
        return frozenset()

    @property
    def chooses_count(self) -> bool:
        """True if the method chooses the count at run time: it runs even where its budget is all tokens, as a stage
        that only observes and remembers does. With `keep=1.0` no stage runs."""
        return False

    @property
    def query_aware(self) -> bool:
        """True if the kept set of an image may change with the question."""
        return False

    @property
    def prefix_cache_safe(self) -> bool:
        """True if the kept set depends only on tokens before the end of the image."""
        return not self.query_aware

    def fallback_hint(self, unknown: Collection[str], spell: Callable[[Any], str] = repr) -> str:
        """Return the options under which the method does not need the observables `unknown`, as in `features="tower"`;
        empty if there are none. spell: writes a value."""
        if not self.fallback_options or dataclasses.replace(self, **self.fallback_options).needs & set(unknown):
            return ""
        return ", ".join(f"{name}={spell(value)}" for name, value in self.fallback_options.items())

    @property
    def cut_layer(self) -> int:
        """Index of the decoder layer at whose input the method first cuts; 0 where no layer comes before it."""
        return 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        """Return the methods, each acting at one place, that this one consists of in a decoder of `layers`, with their
        budgets; most methods are one stage, themselves."""
        return [(self, budget)]

    @property
    def preferred(self) -> Method:
        """Variant that `patch` uses if the model, the budget and the other methods allow it; else it uses `self`."""
        return self

    def check_model(self, decoder: nn.Module) -> None:
        """Raise OptionError if the method was fitted to another decoder than this one."""

    def resolve_count(self, count: int, keep: int) -> int:
        """Return how many of `count` tokens to keep when the user asked for `keep`; most methods keep exactly that."""
        return keep

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            raise OptionError(f"{self.name}: {message}")


SIZES = "sizes"  # see `Pruner.weighs_attention`


@dataclass(frozen=True)
class Pruner(Method):
    """Base of the methods that choose among visual tokens, at the decoder's entry (PRE_LLM) or inside it (IN_LLM).

    A subclass implements `score` (higher is kept), or overrides `select` when its choice is not a plain top-k. It sees
    a read-only `VisualTokens` and never a model, a cache, a mask or position ids. A method inside the decoder has a
    field `layer`, the index of the decoder layer at whose input it cuts.

    never_nan: the scores of an image are never all NaN; that is then not checked, for which the host waits for the
               device.
    """

    never_nan: ClassVar[bool] = False

    @property
    def weighs_attention(self) -> bool:
        """True if the language model's attention is weighed by how many tokens each stands for, float32 `[S, N]`, which
        the method remembers as `SIZES`; see attention/weighing.py."""
        return False

    @property
    def cut_layer(self) -> int:
        return int(getattr(self, "layer", 0)) if self.site in (Site.IN_LLM, Site.DECODE) else 0

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        """Blocks of the vision tower that a method with "encoder_attention" or another observable of a block reads: an
        int is the index of a block, counted back from the last block that the model reads if negative (-1 is that block
        itself); a float between 0 and 1 is a share of the depth."""
        return (-1,)

    def score(self, tokens: VisualTokens) -> Tensor:
        """Return how good each visual token is, float `[S, N]`; higher is kept."""
        raise NotImplementedError(f"{type(self).__name__} implements neither score() nor select()")

    def select(self, tokens: VisualTokens) -> Selection:
        """Return which visual tokens stay; the default keeps the highest scores."""
        return Selection.top(self._checked(self.score(tokens), tokens.mask), tokens)

    def _checked(self, score: Any, mask: Tensor) -> Tensor:
        """Return `score`, if it ranks the tokens of `mask`, bool `[S, N]`; raise TokenPruneError if it does not."""
        wanted = f"{self.name}.score() must return a float tensor [S, N] = {list(mask.shape)}"
        if not isinstance(score, torch.Tensor):
            raise TokenPruneError(f"{wanted}, not {type(score).__name__}")
        ranks = score.dtype != mask.dtype and not score.is_complex()  # whole numbers do
        if score.shape != mask.shape or not ranks or score.device != mask.device:
            found = f"{str(score.dtype).removeprefix('torch.')} {list(score.shape)} on {score.device}"
            raise TokenPruneError(f"{wanted} on {mask.device}, not {found}")
        # NaN counts as lowest, so that an image of nothing else would keep its first tokens in silence.
        if not self.never_nan and bool((score.isnan() | ~mask).all(dim=1).any()):
            raise TokenPruneError(f"{wanted}, and all scores of an image are NaN: that ranks nothing")
        return score
