# SPDX-License-Identifier: Apache-2.0
"""patch, unpatch, patched, stats: the library's front door. All checks come before anything is changed."""

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
    UnsupportedSetupError,
    shorten,
)
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
    graphs: bool | Graphs | None = None,
    **options: Any,
) -> ModelT:
    """Make `model` see fewer visual tokens, in place, and return it.

    method:    a registered name (`available_methods()`), a configured `Method`, or a list of them that act at different
               places. None: "divprune".
    keep:      float in (0, 1]: share of the visual tokens of each image or video; int >= 2: tokens per image (more than
               an image has keeps all of it; `Budget(tokens=1)` keeps one); a `Budget`; for a list of methods also a
               list with one of these each. With a list of methods and a single `keep`, every method keeps that share of
               what reaches it. None: the default of each method (`default_keep`), 0.25, or 1.0 for those that remove
               nothing or choose between images.
    record:    keep the positions that survive each cut in `stats(model).cuts`.
    replace:   replace a patch that is there already, instead of raising.
    processor: the model's processor; needed by methods that act on pixels (`downsample`), which change what it makes,
    and by the guard, to read prompts; ignored where neither needs it.
    guard:     "warn": log a warning where a prompt asks, or an image holds, what this method was measured to lose at
               this budget (text, places, numbers); "auto": keep more tokens there; "off"; or a `Guard`. None: what
               `config` says, else "warn" with a processor, "off" without. `print(model)` says in one line what it does.
    config:    a file that `tokenprune tune` wrote, or its content, or a setting alone, as a file or a dict such as
    {"method": "fastv", "keep": {"average_tokens": 192}}, in place of method, keep and options. On another model than it
    was tuned on, a warning is logged.
    feature_cache: bytes, on the tower's device, that encoded images may take, so that further questions about an image
    do not encode it again (docs/guides/chats.md). None: nothing is kept.
    max_visual_tokens: the most tokens of an image, ahead of the tower and of the methods: `downsample` with a number.
    graphs:    True, or a `tokenprune.graphs.Graphs`: replay the decoder's prefill as CUDA graphs where a call fits them
    (docs/guides/gpu.md); with keep=1.0 the unpruned model's.
    options:   the method's own options (`method_info(name).options`); for a list of methods pass configured `Method`s
    instead.

    Raises UnknownMethodError, OptionError, BudgetError, ConfigError, UnsupportedModelError, UnsupportedSetupError or
    AlreadyPatchedError; the model is then as it was before.
    """
    _check_order(model, method)
    if not matches_type(feature_cache, _BYTES):
        raise OptionError(f"feature_cache={feature_cache!r} must be a number of bytes, {describe_type(_BYTES)}")
    if config is not None:
        if options or any(one is not None for one in (method, keep, max_visual_tokens)):
            raise OptionError("config= names method, keep and options: leave these out, or leave out config=")
        setting = read_config(config)
        check_tuned_model(setting, model)
        method, keep = setting.steps()
        if guard is None and setting.guard == "auto" and processor is None:
            raise OptionError(
                f'{setting.where} is meant with guard="auto", which reads prompts: pass processor=, or guard="off"'
            )
        guard = setting.guard if guard is None else guard
    guard = _guard(guard, processor)
    alone = max_visual_tokens is not None and method is None and keep is None and not options
    methods = [] if alone else read_methods(DEFAULT_METHOD if method is None else method, options, _PATCH_ARGUMENTS)
    methods, budgets = apply_limit(methods, read_budgets(keep, methods), max_visual_tokens)
    present = find_attachment(model)
    if present is not None and not replace:
        raise AlreadyPatchedError(
            f"the model is patched already with {present.describe()}: call tokenprune.unpatch(model) first, "
            "or pass replace=True"
        )
    parts = _parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)
    made = Attachment(methods, budgets, parts, feature_cache)
    if present is not None:
        present.detach()
    try:
        made.attach()
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


def _guard(given: Any, processor: Any) -> Guard | None:
    """Return the guard that is meant, None where it is off; raises OptionError."""
    if given == "off" or (given is None and processor is None):
        return None
    from tokenprune.integrations.hf.guard.settings import Guard

    made: Guard = Guard.from_argument("warn" if given is None else given)
    return None if made.mode == "off" else made


def _parts(
    model: Any,
    methods: list[Method],
    budgets: list[Budget],
    record: bool,
    processor: Any,
    guard: Guard | None,
    feature_cache: int | None,
    graphs: bool | Graphs | None,
) -> list[Any]:
    """Return what has to be attached to `model`, in order; the last part has the statistics."""
    from tokenprune.integrations.timm import build_timm_patch, is_timm

    if is_timm(model):
        if processor is not None:
            raise OptionError("a model of timm has no processor to act on: leave out processor=")
        if guard is not None and guard.mode == "auto":
            raise UnsupportedSetupError('a model of timm gets no prompts: guard="auto" has nothing to go by')
        if feature_cache is not None:
            raise UnsupportedSetupError("a model of timm is asked no questions about images: leave out feature_cache=")
        if graphs:
            raise UnsupportedSetupError("a model of timm has no decoder to be graphed: leave out graphs=")
        return [build_timm_patch(model, methods, budgets)]
    from tokenprune.integrations.hf.patch import hf_parts

    return hf_parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)


def unpatch(model: ModelT) -> ModelT:
    """Give the model back as it was: hooks, attention functions and processor; raises NotPatchedError if there is no
    patch."""
    get_attachment(model).detach()
    return model


@contextmanager
def patched(model: ModelT, method: Any = None, *, keep: Any = None, **options: Any) -> Iterator[ModelT]:
    """Patch for the length of a `with` block; takes what `patch` takes.

    A patch that the model had before (with `replace=True`) is put back at the end.
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
    """Return the `Stats` of the last forward or `generate` with images in this thread.

    A call without images leaves them as they are, such as the unconditional stream of `guidance_scale`. A thread that
    ran no call with images gets the `Stats` of the last such call in any thread.

    Raises:
        NotPatchedError: If the model is not patched.
    """
    found: Stats = get_attachment(model).engine.stats
    return found


def feature_cache(model: Any) -> FeatureCache:
    """Return the encoded images that a model keeps that was patched with `feature_cache=`; raises NotPatchedError."""
    attachment = get_attachment(model)
    if attachment.feature_cache is None:
        raise NotPatchedError(
            f"this {type(model).__name__} is patched without a feature cache: pass feature_cache=, a number of bytes"
        )
    from tokenprune.integrations.hf.feature_cache.part import FeatureReuse

    found: FeatureCache = attachment.engine.part(FeatureReuse).cache
    return found


def assistant(
    model: Any,
    method: str | Method | Sequence[str | Method] | None = None,
    *,
    draft: Any = None,
    keep: Any = None,
    guard: Any = "off",
    **options: Any,
) -> Any:
    """Return a draft for `model`, to be handed to its `generate`; the answer stays the one that `model` gives alone.

        assistant = tokenprune.assistant(model, "divprune", keep=0.1)
        model.generate(**inputs, assistant_model=assistant)

    model:  the target, whose `generate` is called, one prompt at a time. It may be patched itself: then its own pruned
            answer is what comes out.
    method, keep, options: what the draft sees, as `tokenprune.patch` takes them.
    draft:  a smaller model with the target's vocabulary and image processor; it is patched in place. None: a model that
            shares every weight with the target. That is exact and takes no memory for weights, but it is hardly ever
            faster: see `tokenprune.DraftCost`.
    guard:  as in `patch`; off, since the target checks every token.

    How many tokens are drafted at a time stands in `assistant.generation_config` (`num_assistant_tokens`), as for any
    assistant of transformers. `tokenprune.stats(assistant)` tells what the draft saw, `tokenprune.unpatch(assistant)`
    ends it. Until then the target notes what its images were encoded from, and reads a prompt before any draft, which
    costs one forward of one token; its hooks, config and generation config are not touched. Make the assistant when the
    target is as it will stay: weights that are moved or quantized later are not followed.

    Raises what `patch` raises; OptionError for a method on pixels and for a draft that reads other prompts than the
    target; UnsupportedModelError for models whose `generate` takes no assistant (layers with states, queries between
    tower and decoder); UnsupportedSetupError for offloaded weights. A batch of several prompts raises transformers' own
    ValueError.

    Source: SpecVLM (arXiv 2508.16201) drafts on pruned video tokens. Differs from the paper: any registered method
    chooses, and the draft keeps the positions of the full prompt (our decision).
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
    """Return a configured method, to be composed with others; raises UnknownMethodError or OptionError."""
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
