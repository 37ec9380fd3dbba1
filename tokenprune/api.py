# SPDX-License-Identifier: Apache-2.0
"""Main functions of the library: patch, unpatch, patched and stats. All checks run before the model is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.errors import (
    AlreadyPatchedError,
    NotPatchedError,
    OptionError,
    TokenPruneError,
    shorten,
)
from tokenprune.integrations.parts import build_parts, read_guard
from tokenprune.integrations.shared.attachment import Attachment, find_attachment, get_attachment, is_patched
from tokenprune.methods import DEFAULT_METHOD
from tokenprune.methods.registry import build
from tokenprune.selection.method import Method
from tokenprune.selection.options import describe_type, matches_type
from tokenprune.settings.arguments import read_budgets, read_methods
from tokenprune.settings.max_visual_tokens import apply_limit
from tokenprune.settings.saved import check_tuned_model, read_config
from tokenprune.statistics import Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.feature_cache.cache import FeatureCache
    from tokenprune.integrations.hf.graphs.settings import Graphs
    from tokenprune.integrations.hf.guard.settings import Guard

_BYTES = Annotated[int, Ge(1)] | None
ModelT = TypeVar("ModelT")


def patch(
    model: ModelT,
    method: str | Method | Sequence[str | Method] | None = None,
    *,
    keep: float | int | Budget | Sequence[float | int | Budget] | None = None,
    record: bool = False,
    replace: bool = False,
    processor: Any = None,
    guard: str | Guard | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    feature_cache: int | None = None,
    max_visual_tokens: int | None = None,
    graphs: bool | str | Graphs | None = None,
    **options: Any,
) -> ModelT:
    """Prune the visual tokens of `model` in place, and return it.

    The caller's code does not change. If an error is raised, the model is unchanged.

    Args:
        model: Vision-language model of transformers, or a vision transformer of timm.
        method: Registered name (see `available_methods`), configured `Method`, or a list of methods that act at
            different sites. Default: "divprune".
        keep: Float in (0, 1]: share of the visual tokens of each image or video. Int >= 2: tokens per image. Or a
            `Budget`, such as `Budget(tokens=1)`. For several methods, a list with one entry each, or one value that
            every method applies to the tokens that reach it. Default: `default_keep` of each method, usually 0.25.
        record: Record the kept positions of each cut in `stats(model).cuts`.
        replace: Replace an existing patch instead of raising an error.
        processor: Processor of the model. Required by methods that act on pixels ("downsample"), which change its
            output, and by the guard, which reads prompts. Ignored otherwise.
        guard: "warn" logs a warning if a question or an image needs more tokens than the budget keeps (text, positions
            or counting). "auto" keeps more tokens in this case. "off" disables the guard. Or a `Guard`. Default: the
            value in `config`, else "warn" if a processor is passed, else "off".
        config: Configuration file of `tokenprune tune`, its content as a dict, or a setting such as
            `{"method": "fastv", "keep": {"average_tokens": 192}}`. Replaces `method`, `keep` and `options`. A warning
            is logged if the model differs from the tuned model.
        feature_cache: Bytes of device memory for encoded images, so that further questions about an image skip the
            vision tower (docs/guides/chats.md). Default: no cache.
        max_visual_tokens: Maximum number of tokens per image. Larger images are resized before the vision tower, as
            with the method "downsample".
        graphs: True or a `tokenprune.graphs.Graphs`: run the decoder's prefill and decoding steps as CUDA graphs where
            possible (docs/guides/gpu.md). "auto" captures only shapes that repeat. Also works with keep=1.0.
        options: Options of the method (`method_info(name).options`). For several methods, pass configured methods.

    Returns:
        The model.

    Raises:
        UnknownMethodError: If a method is not registered.
        OptionError: If an option or an argument is invalid.
        BudgetError: If `keep` is invalid.
        ConfigError: If `config` is invalid.
        UnsupportedModelError: If the model is not supported.
        UnsupportedSetupError: If the model does not support this method or mode.
        AlreadyPatchedError: If the model is patched and `replace` is False.

    Examples:
        >>> model = tokenprune.patch(model, "divprune", keep=0.25)
        >>> output = model.generate(**inputs, max_new_tokens=2)
        >>> tokenprune.stats(model).keep_ratio
        0.25
    """
    _check_order(model, method)
    if not matches_type(feature_cache, _BYTES):
        raise OptionError(f"feature_cache={feature_cache!r} must be a number of bytes, {describe_type(_BYTES)}")
    if config is not None:
        if options or any(argument is not None for argument in (method, keep, max_visual_tokens)):
            raise OptionError("config= already sets the method, keep and options. Pass either config= or these.")
        setting = read_config(config)
        check_tuned_model(setting, model)
        method, keep = setting.steps()
        if guard is None and setting.guard == "auto" and processor is None:
            raise OptionError(
                f'{setting.where} uses guard="auto", which reads prompts. Pass processor=..., or set guard="off".'
            )
        guard = setting.guard if guard is None else guard
    guard = read_guard(guard, processor)
    only_limit = max_visual_tokens is not None and method is None and keep is None and not options
    method = DEFAULT_METHOD if method is None else method
    methods = [] if only_limit else read_methods(method, options, _PATCH_ARGUMENTS)
    methods, budgets = apply_limit(methods, read_budgets(keep, methods), max_visual_tokens)
    present = find_attachment(model)
    if present is not None and not replace:
        raise AlreadyPatchedError(
            f"The model is already patched with {present.describe()}. Call tokenprune.unpatch(model) first, or pass "
            "replace=True."
        )
    parts = build_parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)
    attachment = Attachment(methods, budgets, parts, feature_cache)
    if present is not None:
        present.detach()
    try:
        attachment.attach()
    except BaseException:
        if present is not None:
            present.attach()
        raise
    return model


_PATCH_ARGUMENTS = tuple(name for name in inspect.signature(patch).parameters if name not in ("model", "options"))


def _check_order(model: Any, method: Any) -> None:
    """Raise OptionError if the model and the method are passed in the wrong order."""
    if isinstance(model, (str, Method)) and hasattr(method, "named_modules"):
        name = model.name if isinstance(model, Method) else shorten(model)
        raise OptionError(f"The model comes first: tokenprune.patch(model, {name}).")


def unpatch(model: ModelT) -> ModelT:
    """Remove the patch from `model`, and return it. Hooks, attention functions and the processor are restored.

    Raises:
        NotPatchedError: If the model is not patched.

    Examples:
        >>> model = tokenprune.unpatch(tokenprune.patch(model))
        >>> tokenprune.is_patched(model)
        False
    """
    get_attachment(model).detach()
    return model


@contextmanager
def patched(model: ModelT, method: Any = None, *, keep: Any = None, **options: Any) -> Iterator[ModelT]:
    """Patch the model inside a `with` block. Takes the arguments of `patch`.

    With `replace=True`, the previous patch is restored at the end.

    Examples:
        >>> with tokenprune.patched(model, "fastv", keep=0.5):
        ...     output = model.generate(**inputs, max_new_tokens=2)
        >>> tokenprune.is_patched(model)
        False
    """
    before = find_attachment(model)
    patch(model, method, keep=keep, **options)
    try:
        yield model
    finally:
        if is_patched(model):
            unpatch(model)
        if before is not None:
            before.attach()


def stats(model: Any) -> Stats:
    """Return the `Stats` of the last forward or `generate` call with images in this thread.

    Calls without images do not change them, such as the unconditional stream of `guidance_scale`. A thread without
    calls with images gets the `Stats` of the last such call in any thread.

    Raises:
        NotPatchedError: If the model is not patched.

    Examples:
        >>> model = tokenprune.patch(model, "divprune", keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).keep_ratio
        0.5
    """
    stats: Stats = get_attachment(model).engine.stats
    return stats


def feature_cache(model: Any) -> FeatureCache:
    """Return the cache of encoded images of a model that is patched with `feature_cache=`.

    Raises:
        NotPatchedError: If the model is not patched, or has no feature cache.

    Examples:
        >>> model = tokenprune.patch(model, keep=0.5, feature_cache=2**20)
        >>> output = model.generate(**inputs, max_new_tokens=2)
        >>> tokenprune.stats(model).feature_cache.misses
        1
        >>> tokenprune.feature_cache(model).clear()
    """
    attachment = get_attachment(model)
    if attachment.feature_cache is None:
        raise NotPatchedError(
            f"This {type(model).__name__} is patched without a feature cache. Pass feature_cache=, a number of bytes."
        )
    from tokenprune.integrations.hf.feature_cache.part import FeatureReuse

    cache: FeatureCache = attachment.engine.get_part(FeatureReuse).cache
    return cache


def assistant(
    model: Any,
    method: str | Method | Sequence[str | Method] | None = None,
    *,
    draft: Any = None,
    keep: Any = None,
    guard: Any = "off",
    **options: Any,
) -> Any:
    """Create a draft model for assisted generation. The output of `model` does not change.

    `assistant.generation_config.num_assistant_tokens` sets the number of drafted tokens per round.
    `tokenprune.stats(assistant)` describes the draft. Until `tokenprune.unpatch(assistant)` is called, the target
    records the inputs of its images, and runs one forward of one token before a draft reads a prompt. Create the
    assistant last: weights that are moved or quantized later are not updated in it.

    Args:
        model: Target model, whose `generate` is called with one prompt at a time. If it is patched, the assistant
            reproduces its pruned output.
        method: Method of the draft. See `patch`.
        draft: Smaller model with the vocabulary and the image processor of the target. It is patched in place.
            Default: a model that shares all weights with the target. This takes no memory for weights, but is rarely
            faster. See `tokenprune.DraftCost`.
        keep: Budget of the draft. See `patch`.
        guard: Guard of the draft. Default: "off", because the target verifies every token.
        options: Options of the method. See `patch`.

    Returns:
        The draft, for `generate(assistant_model=...)`.

    Raises:
        OptionError: If the method acts on pixels, or the draft reads prompts differently from the target. Also all
            errors of `patch`.
        UnsupportedModelError: If `generate` of the model supports no assistant (layers with states, or queries between
            tower and decoder).
        UnsupportedSetupError: If weights are offloaded.

    Source:
        "SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning" (arXiv 2508.16201).

    Differences from the paper:
        - Any registered method selects the tokens.
        - The draft keeps the positions of the full prompt.

    Examples:
        >>> assistant = tokenprune.assistant(model, "divprune", keep=0.5)
        >>> output = model.generate(**inputs, assistant_model=assistant, max_new_tokens=2)
        >>> assistant = tokenprune.unpatch(assistant)
    """
    from tokenprune.integrations.hf.drafting.assistant import connect_draft, prepare_draft

    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model
    prepared = prepare_draft(model, draft, method, options)
    patch(prepared, method, keep=keep, guard=guard, **options)
    try:
        connect_draft(model, prepared, shares_weights=draft is None)
    except BaseException:
        unpatch(prepared)
        raise
    return prepared


def method(name: str, **options: Any) -> Method:
    """Return a configured method, for example to combine it with others.

    Raises:
        UnknownMethodError: If no method is registered as `name`.
        OptionError: If an option is invalid.

    Examples:
        >>> model = tokenprune.patch(model, ["divprune", tokenprune.method("fastv", layer=1)], keep=[0.5, 0.5])
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out / tokenprune.stats(model).visual_tokens_in
        0.25
    """
    return build(name, options)


__all__ = [
    "TokenPruneError",
    "assistant",
    "feature_cache",
    "is_patched",
    "method",
    "patch",
    "patched",
    "stats",
    "unpatch",
]
