# SPDX-License-Identifier: Apache-2.0
"""patch, unpatch, patched, stats: the library's front door. All checks come before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge

from tokenprune.addons import add_on
from tokenprune.budgets import Budget, joint_share
from tokenprune.errors import (
    AlreadyPatchedError,
    BudgetError,
    NotPatchedError,
    OptionError,
    TokenPruneError,
    UnsupportedSetupError,
    short,
)
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.methods.registry import build, did_you_mean
from tokenprune.models.torch_import import DEFAULT_METHOD
from tokenprune.selection.method import Method
from tokenprune.selection.options import fits, in_words
from tokenprune.settings.budget_checks import check_scope
from tokenprune.settings.max_visual_tokens import limited
from tokenprune.settings.saved import read_config
from tokenprune.statistics import Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.feature_cache.cache import FeatureCache
    from tokenprune.integrations.hf.graphs.settings import Graphs
    from tokenprune.integrations.hf.guard.settings import Guard

_ATTRIBUTE = "_tokenprune_patch"
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
    do not encode it again (docs/guide/feature-cache.md). None: nothing is kept.
    max_visual_tokens: the most tokens of an image, ahead of the tower and of the methods: `downsample` with a number.
    graphs:    True, or a `tokenprune.integrations.hf.graphs.Graphs`: replay the decoder's prefill as CUDA graphs where a call fits them
    (docs/guide/gpu.md); with keep=1.0 the unpruned model's.
    options:   the method's own options (`method_info(name).options`); for a list of methods pass configured `Method`s
    instead.

    Raises UnknownMethodError, OptionError, BudgetError, ConfigError, UnsupportedModelError, UnsupportedSetupError or
    AlreadyPatchedError; the model is then as it was before.
    """
    _check_order(model, method)
    if not fits(feature_cache, _BYTES):
        raise OptionError(f"feature_cache={feature_cache!r} must be a number of bytes, {in_words(_BYTES)}")
    if config is not None:
        if options or any(one is not None for one in (method, keep, max_visual_tokens)):
            raise OptionError("config= names method, keep and options: leave these out, or leave out config=")
        read = read_config(config)
        read.check_model(model)
        method, keep = read.steps()
        if guard is None and read.guard == "auto" and processor is None:
            raise OptionError(
                f'{read.name} is meant with guard="auto", which reads prompts: pass processor=, or guard="off"'
            )
        guard = read.guard if guard is None else guard
    guard = _guard(guard, processor)
    alone = max_visual_tokens is not None and method is None and keep is None and not options
    methods = [] if alone else _methods(DEFAULT_METHOD if method is None else method, options)
    methods, budgets = limited(methods, _budgets(keep, methods), max_visual_tokens)
    present = _found(model)
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
        name = model.name if isinstance(model, Method) else short(model)
        raise OptionError(f"The model comes first: tokenprune.patch(model, {name}).")


def _guard(given: Any, processor: Any) -> Guard | None:
    """Return the guard that is meant, None where it is off; raises OptionError."""
    if given == "off" or (given is None and processor is None):
        return None
    made: Guard = add_on("guard.settings").Guard.of("warn" if given is None else given)
    return None if made.mode == "off" else made


def _methods(method: str | Method | Sequence[str | Method], options: dict[str, Any]) -> list[Method]:
    given: list[Any] = list(method) if isinstance(method, (list, tuple)) else [method]
    if not given:
        raise OptionError("method is an empty list: name at least one method")
    if len(given) > 1 and options:
        for option in options:
            if hint := did_you_mean(option, _PATCH_ARGUMENTS):
                raise OptionError(f"patch() has no argument {option!r}: {hint.strip()}")
        raise OptionError(
            f"options {', '.join(options)} are ambiguous for several methods: pass configured methods, "
            'for example method=[tokenprune.method("fastv", layer=3), "divprune"]'
        )
    if options and isinstance(given[0], Method):
        raise OptionError(f"options {', '.join(options)} are ignored by a configured method: set them when you make it")
    return [one if isinstance(one, Method) else build(one, options, _PATCH_ARGUMENTS) for one in given]


def _budgets(keep: Any, methods: Sequence[Method]) -> list[Budget]:
    if keep is None:
        return [Budget.of(method.default_keep) for method in methods]
    if isinstance(keep, (list, tuple)):
        if len(keep) != len(methods):
            raise BudgetError(
                f"keep has {len(keep)} entries for {len(methods)} methods: give one number, or one for each method"
            )
        budgets = [Budget.of(one) for one in keep]
    else:
        budgets = [Budget.of(keep)] * len(methods)
    for method, budget in zip(methods, budgets, strict=True):
        check_scope(method, budget)
    return budgets


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
    from tokenprune.integrations.timm import is_timm, timm_patch

    if is_timm(model):
        if processor is not None:
            raise OptionError("a model of timm has no processor to act on: leave out processor=")
        if guard is not None and guard.mode == "auto":
            raise UnsupportedSetupError('a model of timm gets no prompts: guard="auto" has nothing to go by')
        if feature_cache is not None:
            raise UnsupportedSetupError("a model of timm is asked no questions about images: leave out feature_cache=")
        if graphs:
            raise UnsupportedSetupError("a model of timm has no decoder to be graphed: leave out graphs=")
        return [timm_patch(model, methods, budgets)]
    from tokenprune.integrations.hf.patch import hf_parts

    return hf_parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)


class Attachment(Attachable):
    """The parts that `patch` attached to a model; the last one, the engine, has the statistics.

    While it is attached, it stands in the module that the engine acts on: wrappers come and go around that, and all of
    them find it there.
    """

    def __init__(
        self, methods: list[Method], budgets: list[Budget], parts: list[Any], feature_cache: int | None
    ) -> None:
        super().__init__()
        self.feature_cache = feature_cache
        self.methods, self.budgets, self.parts, self.engine = methods, budgets, parts, parts[-1]

    def _attach(self) -> None:
        for part in self.parts:
            self.attach_part(part)
        self.wrap(self.engine.model, "extra_repr", self._with_lines)
        setattr(self.engine.owner, _ATTRIBUTE, self)
        self.on_detach(partial(delattr, self.engine.owner, _ATTRIBUTE))

    def add(self, part: Attachable) -> None:
        """Attach one more part, which goes with the patch and comes back with it."""
        self.attach_part(part)
        self.parts.append(part)

    def _with_lines(self, extra_repr: Callable[[], str]) -> Callable[[], str]:
        return partial(_joined, extra_repr, self.lines())

    def lines(self) -> list[str]:
        """Return what `print(model)` shows of the patch: a line for each method, one for encoded images, one for the
        guard."""
        lines = [
            f"tokenprune: {method!r}, keep={budget.short()}, site={method.site}"
            for method, budget in zip(self.methods, self.budgets, strict=True)
        ]
        together = joint_share(self.budgets) if len(self.budgets) > 1 else None
        if together is not None:
            lines.append(f"tokenprune: {len(self.budgets)} methods, together keep={together:.4g}")
        if self.feature_cache is not None:
            lines.append(f"tokenprune: feature_cache={self.feature_cache}")
        return lines + [f"tokenprune: {part.line}" for part in getattr(self.engine, "parts", ()) if part.line]

    def describe(self) -> str:
        return " + ".join(
            f"{method.name} ({budget})" for method, budget in zip(self.methods, self.budgets, strict=True)
        )


def _joined(extra_repr: Callable[[], str], lines: list[str]) -> str:
    """Return what a module says of itself, with `lines` below it."""
    return "\n".join([*filter(None, [extra_repr()]), *lines])


def _found(model: Any) -> Attachment | None:
    """Return what `patch` left on a model, or on one that it wraps; None if there is no patch."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((vars(one)[_ATTRIBUTE] for one in modules if _ATTRIBUTE in vars(one)), None)


def attachment_of(model: Any) -> Attachment:
    """Return what `patch` left on the model; raises NotPatchedError."""
    attachment = _found(model)
    if attachment is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: call tokenprune.patch(model, ...) first")
    return attachment


def unpatch(model: ModelT) -> ModelT:
    """Give the model back as it was: hooks, attention functions and processor; raises NotPatchedError if there is no
    patch."""
    attachment_of(model).detach()
    return model


@contextmanager
def patched(model: ModelT, method: Any = None, *, keep: Any = None, **options: Any) -> Iterator[ModelT]:
    """Patch for the length of a `with` block; takes what `patch` takes.

    A patch that the model had before (with `replace=True`) is put back at the end.
    """
    before = _found(model)
    patch(model, method, keep=keep, **options)
    try:
        yield model
    finally:
        if is_patched(model):
            unpatch(model)
        if before is not None:
            before.attach()


def is_patched(model: Any) -> bool:
    """Return whether the model carries a patch, as a whole or in what it wraps."""
    return _found(model) is not None


def stats(model: Any) -> Stats:
    """Return the `Stats` of the last forward or `generate` with images in this thread.

    A call without images leaves them as they are, such as the unconditional stream of `guidance_scale`. A thread that
    ran no call with images gets the `Stats` of the last such call in any thread.

    Raises:
        NotPatchedError: If the model is not patched.
    """
    found: Stats = attachment_of(model).engine.stats
    return found


def feature_cache(model: Any) -> FeatureCache:
    """Return the encoded images that a model keeps that was patched with `feature_cache=`; raises NotPatchedError."""
    attachment = attachment_of(model)
    if attachment.feature_cache is None:
        raise NotPatchedError(
            f"this {type(model).__name__} is patched without a feature cache: pass feature_cache=, a number of bytes"
        )
    found: FeatureCache = attachment.engine.part(add_on("reuse.part").FeatureReuse).cache
    return found


def method(name: str, **options: Any) -> Method:
    """Return a configured method, to be composed with others; raises UnknownMethodError or OptionError."""
    return build(name, options)


__all__ = ["TokenPruneError", "feature_cache", "is_patched", "method", "patch", "patched", "stats", "unpatch"]
