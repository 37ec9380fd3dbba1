# SPDX-License-Identifier: Apache-2.0
"""patch_processor, unpatch_processor: methods that act on pixels, where the model runs elsewhere."""

from __future__ import annotations

from typing import Any, TypeVar

from tokenprune.budgets import Budget
from tokenprune.errors import NotPatchedError, OptionError
from tokenprune.methods.registry import available_methods, build, method_info
from tokenprune.selection.method import Method, Site
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.settings.arguments import read_budgets
from tokenprune.settings.max_visual_tokens import LIMITER, check_limit

ProcessorT = TypeVar("ProcessorT")


def patch_processor(
    processor: ProcessorT,
    method: str | Method = "downsample",
    *,
    keep: float | int | Budget | None = None,
    replace: bool = False,
    max_visual_tokens: int | None = None,
    **options: Any,
) -> ProcessorT:
    """Make a processor hand out fewer visual tokens, in place, and return it: for a model that is served elsewhere.

    method:  a registered name or configured `Method` that acts on pixels (its site is PRE_ENCODER).
    keep:    float in (0, 1]: share of the visual tokens, or a `Budget` of one; for a method that chooses between the
             images of a prompt, an upper bound on them. None: the method's own default (0.25, or no bound).
    replace: replace a patch that is there already, instead of raising.
    max_visual_tokens: the most tokens that an image may make, in place of `downsample` with this number for `keep`.
    options: the method's own options.

    The same as `patch(model, method, keep=keep, processor=processor)`, for processors whose images any model of their
    family take in any size (Qwen-VL, LLaVA-NeXT and OneVision, LFM2-VL, Mistral 3, Pixtral). Raises
    UnsupportedSetupError for the others, and OptionError, BudgetError or AlreadyPatchedError; the processor is then as
    it was before.
    """
    from tokenprune.integrations.hf.pixels.image_selection import ViewPatch
    from tokenprune.integrations.hf.pixels.marker import patch_on
    from tokenprune.integrations.hf.pixels.resizing import PixelPatch

    if isinstance(method, (list, tuple)):
        raise OptionError("patch_processor takes one method: those that act on the model go to tokenprune.patch")
    if isinstance(method, Method):
        if options:
            raise OptionError(f"options {', '.join(options)} are ignored by a configured method: set them on it")
    else:
        method = build(method, options)
    if not isinstance(method, (ResizeMethod, ImageChooser)):
        fitting = [name for name in available_methods() if method_info(name).site is Site.PRE_ENCODER]
        raise OptionError(
            f"{method.name} acts on the model, not on pixels; a processor can be patched with {', '.join(fitting)}"
        )
    if max_visual_tokens is not None:
        if method.name != LIMITER or keep is not None:
            raise OptionError(
                f"max_visual_tokens={max_visual_tokens} is {LIMITER} with this number for keep=: leave out keep= and "
                "other methods"
            )
        check_limit(max_visual_tokens, [])
        keep = Budget(tokens=max_visual_tokens)
    (budget,) = read_budgets(keep, [method])
    kind: Any = ViewPatch if isinstance(method, ImageChooser) else PixelPatch
    made = kind(method, budget, processor)
    present = patch_on(processor)
    if present is not None and replace:
        unpatch_processor(processor)
    made.attach()
    return processor


def unpatch_processor(processor: ProcessorT) -> ProcessorT:
    """Give the processor back as it was; raises NotPatchedError if there is no patch, or one that came with a model."""
    from tokenprune.integrations.hf.pixels.marker import patch_on

    present = patch_on(processor)
    if present is None:
        raise NotPatchedError(f"this {type(processor).__name__} is not patched: call tokenprune.patch_processor first")
    if present.adapter is not None:
        raise NotPatchedError("this processor was patched together with a model: call tokenprune.unpatch(model)")
    present.detach()
    return processor
