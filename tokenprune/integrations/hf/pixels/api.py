# SPDX-License-Identifier: Apache-2.0
"""patch_processor and unpatch_processor: methods on pixels for a model that runs elsewhere."""

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
    """Patch a processor in place to produce fewer visual tokens, for a model that runs elsewhere.

    This equals `patch(model, method, keep=keep, processor=processor)`. It supports families that take images of any
    size (Qwen-VL, LLaVA-NeXT and OneVision, LFM2-VL, Mistral 3, Pixtral).

    Args:
        processor: The processor.
        method: Name of a method on pixels (site PRE_ENCODER), or a configured `Method`.
        keep: Share of the visual tokens in (0, 1], or a `Budget`. For a method that selects images of a prompt: the
            maximum share or number of images. None: the default of the method (0.25, or no limit).
        replace: Replace an existing patch instead of raising an error.
        max_visual_tokens: Maximum number of tokens per image. Short for `downsample` with this number as `keep`.
        **options: Options of the method.

    Returns:
        The same processor.

    Raises:
        UnsupportedSetupError: If the family resizes all images to one size.
        OptionError: If the method or an option is not valid.
        BudgetError: If `keep` is not valid.
        AlreadyPatchedError: If the processor is patched and `replace` is False.

    Examples:
        >>> import transformers
        >>> qwen = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28)
        >>> before = qwen(image, return_tensors="pt")["image_grid_thw"].prod()
        >>> qwen = tokenprune.patch_processor(qwen, "downsample", keep=0.25)
        >>> bool(qwen(image, return_tensors="pt")["image_grid_thw"].prod() < before)
        True
    """
    from tokenprune.integrations.hf.pixels.image_selection import ViewPatch
    from tokenprune.integrations.hf.pixels.marker import find_patch
    from tokenprune.integrations.hf.pixels.resizing import PixelPatch

    if isinstance(method, (list, tuple)):
        raise OptionError("patch_processor takes one method. Pass methods that act on the model to tokenprune.patch.")
    if isinstance(method, Method):
        if options:
            raise OptionError(
                f"A configured method does not take the options {', '.join(options)}. Set them on the method."
            )
    else:
        method = build(method, options)
    if not isinstance(method, (ResizeMethod, ImageChooser)):
        names = [name for name in available_methods() if method_info(name).site is Site.PRE_ENCODER]
        raise OptionError(f"{method.name} does not act on pixels. Use one of {', '.join(names)}, or tokenprune.patch.")
    if max_visual_tokens is not None:
        if method.name != LIMITER or keep is not None:
            raise OptionError(
                f"max_visual_tokens={max_visual_tokens} sets keep= of {LIMITER}: leave out keep= and other methods."
            )
        check_limit(max_visual_tokens, [])
        keep = Budget(tokens=max_visual_tokens)
    (budget,) = read_budgets(keep, [method])
    patch_class: Any = ViewPatch if isinstance(method, ImageChooser) else PixelPatch
    patch = patch_class(method, budget, processor)
    present = find_patch(processor)
    if present is not None and replace:
        unpatch_processor(processor)
    patch.attach()
    return processor


def unpatch_processor(processor: ProcessorT) -> ProcessorT:
    """Remove the patch of a processor.

    Args:
        processor: A processor patched by `patch_processor`.

    Returns:
        The same processor.

    Raises:
        NotPatchedError: If the processor is not patched, or was patched together with a model.

    Examples:
        >>> import transformers
        >>> qwen = tokenprune.patch_processor(transformers.Qwen2VLImageProcessor(), "downsample", keep=0.25)
        >>> qwen = tokenprune.unpatch_processor(qwen)
    """
    from tokenprune.integrations.hf.pixels.marker import find_patch

    present = find_patch(processor)
    if present is None:
        raise NotPatchedError(f"The {type(processor).__name__} is not patched. Call tokenprune.patch_processor first.")
    if present.adapter is not None:
        raise NotPatchedError("The processor was patched together with a model. Call tokenprune.unpatch(model).")
    present.detach()
    return processor
