# SPDX-License-Identifier: Apache-2.0
"""Registry of methods: registration, lookup, and methods from installed packages."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import keyword
import logging
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from tokenprune.errors import OptionError, RegistrationError, UnknownMethodError, shorten
from tokenprune.selection.inputs import list_inputs
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable_registry import available_observables, resolve_need
from tokenprune.selection.sites.attention import AttentionPattern
from tokenprune.selection.sites.decode import DecodeMethod
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "tokenprune.methods"
# Base classes of the methods of each site.
BASES: dict[Site, tuple[type[Method], ...]] = {
    Site.PRE_ENCODER: (ResizeMethod, ImageChooser),
    Site.IN_ENCODER: (EncoderMethod, UnitDropper, FrameMerger),
    Site.PRE_LLM: (Pruner,),
    Site.ATTENTION: (AttentionPattern,),
    Site.IN_LLM: (Pruner,),
    Site.DECODE: (DecodeMethod,),
}

_METHODS: dict[str, type[Method]] = {}
_loaded = False

M = TypeVar("M", bound=type[Method])
C = TypeVar("C")


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method, known without running it.

    `needs`, `observables`, `query_aware` and `prefix_cache_safe` describe the default options.

    Attributes:
        name: Registered name.
        site: Where the method acts.
        summary: First paragraph of the docstring.
        paper: Paper as passed to `register`.
        needs: Inputs that an engine must provide: "features", "frames" of a video, "question", "tower_attention",
            "tower_features", "pixels", "tower" (the method changes it) and "decoder". `reduce` runs methods of the site
            PRE_LLM without "decoder".
        observables: Names of the observables that the method reads.
        query_aware: Whether the choice may depend on the question.
        prefix_cache_safe: Whether the choice depends only on tokens before the end of the image.
        merges: Whether kept tokens absorb other tokens.
        options: Default value of each option.
        cls: The class.
        reconstruction: Whether the method is reconstructed without the authors' full text or code.
        default_keep: Share of tokens that is kept if the user passes no budget.

    Examples:
        >>> info = tokenprune.method_info("divprune")
        >>> info.site, info.options
        (<Site.PRE_LLM: 'PRE_LLM'>, {'center': False})
        >>> sorted(map(str, tokenprune.method_info("scope").needs))
        ['features', 'tower_attention']
    """

    name: str
    site: Site
    summary: str
    paper: str
    needs: frozenset[str]
    observables: frozenset[str]
    query_aware: bool
    prefix_cache_safe: bool
    merges: bool
    options: dict[str, Any]
    cls: type[Method]
    reconstruction: bool = False
    default_keep: float = 0.25

    @property
    def source(self) -> str:
        """Paper, with a remark if the method is a reconstruction."""
        return f"{self.paper}; reconstruction" if self.reconstruction else self.paper

    @property
    def for_videos(self) -> bool:
        """True if the method acts only on videos: it compares frames, or changes the attention between frames."""
        return self.site is Site.ATTENTION or "frames" in self.observables

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can capture the choice with default options.

        This requires a site before or inside the language model, a count that follows from the budget only, and no
        synchronization with the device.
        """
        method = self.cls()
        checked = isinstance(method, Pruner) and method.ranks_by_score and not method.never_nan
        asks = method.syncs_device or method.chooses_count or checked
        return self.site in (Site.PRE_LLM, Site.IN_LLM) and not asks


def register(
    name: str,
    *,
    site: Site | str = Site.PRE_LLM,
    paper: str = "none",
    needs: Iterable[str] | None = None,
    merges: bool = False,
    reconstruction: bool = False,
) -> Callable[[M], M]:
    """Register a frozen dataclass, derived from the base class of its site, as a method.

    Args:
        name: Name of the method: a lower-case identifier, as its module.
        site: Where the method acts.
        paper: Source of the method, such as "arXiv 2403.06764, ECCV 2024", or "none" for a baseline.
        needs: Names of the observables that the method reads, such as "keys" (see `available_observables()`). None uses
            the property `needs` of the class, for methods whose options change their needs.
        merges: Whether kept tokens absorb other tokens.
        reconstruction: Whether parts are guesses because the authors' full text and code were not available.

    Returns:
        A class decorator that returns the class.

    Raises:
        RegistrationError: If the name is taken or invalid, the class is not a frozen dataclass with a docstring, it
            lacks the base class of its site, or its needs are unknown or declared twice.

    Examples:
        >>> from dataclasses import dataclass
        >>> @tokenprune.register("largest_norm", site="PRE_LLM")
        ... @dataclass(frozen=True)
        ... class LargestNorm(tokenprune.Pruner):
        ...     "Keep the visual tokens of largest norm."
        ...     def score(self, tokens):
        ...         return tokens.hidden.norm(dim=-1)
        >>> tokenprune.method("largest_norm")
        largest_norm()
    """
    needs = None if needs is None else frozenset(map(resolve_need, needs))

    def decorate(cls: M) -> M:
        problem = _find_problem(name, cls, Site(site), needs)
        if problem:
            raise RegistrationError(f"cannot register {name!r}: {problem}")
        cls.name, cls.site, cls.paper, cls.merges = name, Site(site), paper, merges
        cls.reconstruction = reconstruction
        if needs is not None:
            cls.needs = needs  # type: ignore[method-assign, assignment]  # replaces the property
        _METHODS[name] = cls
        return cls

    return decorate


def _find_problem(name: str, cls: type, site: Site, needs: frozenset[str] | None) -> str | None:
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        return "the name must be a lower-case identifier and not a Python keyword"
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        return "the class must derive from tokenprune.Method"
    params = cls.__dict__.get("__dataclass_params__")  # an inherited decorator ignores the class's fields
    if params is None or not params.frozen:
        return "decorate the class with @dataclass(frozen=True) below @register(...)"
    if not (cls.__dict__.get("__doc__") or "").strip() or (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        return "the class needs a docstring. `tokenprune methods` prints its first sentence"
    class_needs: Any = cls.needs
    if needs is not None and isinstance(class_needs, property) and class_needs is not Method.needs:
        return "the class has a property `needs`, so leave out needs= of @register(...)"
    if unknown := (needs or frozenset()) - set(available_observables()):
        hint = suggest_nearest(min(unknown), available_observables())
        return f"unknown needs {sorted(unknown)}: {hint}tokenprune.selection.available_observables() lists them all"
    registered = _METHODS.get(name)
    if registered is not None:
        path = f"{registered.__module__}.{registered.__qualname__}"
        if path != f"{cls.__module__}.{cls.__qualname__}":  # a reloaded module registers its class again
            return f"the name is taken by {path}"
    return find_missing_base(cls, site)


def find_missing_base(cls: type[Method], site: Site) -> str | None:
    """Return a message that names the base class which `cls` lacks for `site`, or None."""
    if issubclass(cls, BASES[site]):
        return None
    bases = " or ".join(f"tokenprune.{'selection.' * (base is not Pruner)}{base.__name__}" for base in BASES[site])
    return f"a method of the site {site} must derive from {bases}"


def _load() -> None:
    """Import all built-in methods and the methods of installed packages, once."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    import_all("tokenprune.methods", ENTRY_POINT_GROUP)


def import_all(package: str, group: str) -> None:
    """Import all modules of `package`, and the entry points that installed packages declare in `group`."""
    ours = importlib.import_module(package)
    for module in pkgutil.walk_packages(ours.__path__, f"{ours.__name__}."):
        importlib.import_module(module.name)
    for entry in entry_points(group=group):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            # A broken third-party package must not break the library. Its entries stay unknown.
            kind, reason = group.partition(".")[2], " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning(
                "tokenprune: ignored %s of the entry point %r (%s): %s", kind, entry.name, entry.value, reason
            )


def available_methods() -> list[str]:
    """Return the sorted names of all registered methods.

    Examples:
        >>> "divprune" in tokenprune.available_methods()
        True
    """
    _load()
    return sorted(_METHODS)


def method_class(name: str) -> type[Method]:
    """Return the class registered under `name`.

    Raises:
        UnknownMethodError: If no method has this name. The message suggests close names.

    Examples:
        >>> method_class("divprune").__name__
        'DivPrune'
    """
    _load()
    if not isinstance(name, str) or name not in _METHODS:
        if hint := _from_command_line(name):
            raise UnknownMethodError(f"{name!r} is written for the command line. {hint}")
        written = " ".join(shorten(name).split())
        raise UnknownMethodError(
            f"unknown method {written}: {suggest_nearest(name, _METHODS)}`tokenprune methods` lists them all"
        )
    return _METHODS[name]


def _from_command_line(name: object) -> str:
    """Explain how to pass methods that are written as on a command line. Empty for other names."""
    stack = name.split("+") if isinstance(name, str) else []
    names = [entry.partition(":")[0].strip() for entry in stack]
    if not names or not all(entry in _METHODS for entry in names):
        return ""
    if len(names) > 1:
        return f"Pass a list of methods: {names!r}."
    return f'Pass options as arguments, as in tokenprune.method("{names[0]}", option=value).'


def suggest_nearest(name: object, known: Iterable[str]) -> str:
    """Return the start of a sentence that names the three known names closest to `name`."""
    if not isinstance(name, str) or not name:
        return ""
    close_names = difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.0)
    return (
        f"did you mean {_join_names(close_names)}? "
        if did_you_mean(name.lower(), close_names)
        else f"the nearest are {_join_names(close_names)}; "
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the start of a sentence that suggests names spelled almost like `name`, or an empty string."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    return f"did you mean {_join_names(close)}? " if close else ""


def _join_names(names: Sequence[str]) -> str:
    """Format names as in "'dart', 'fastv' or 'pool'"."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


def method_info(name: str) -> MethodInfo:
    """Return the `MethodInfo` of a registered method.

    Raises:
        UnknownMethodError: If no method has this name.

    Examples:
        >>> tokenprune.method_info("cdpruner").query_aware
        True
    """
    cls = method_class(name)
    default = cls()
    return MethodInfo(
        name=name,
        site=cls.site,
        summary=inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        paper=cls.paper,
        needs=list_inputs(default),
        observables=default.needs,
        query_aware=default.query_aware,
        prefix_cache_safe=default.prefix_cache_safe,
        merges=cls.merges,
        options={f.name: getattr(default, f.name) for f in dataclasses.fields(cls)},
        cls=cls,
        reconstruction=cls.reconstruction,
        default_keep=cls.default_keep,
    )


def build(name: str, options: dict[str, Any], other_names: Iterable[str] = ()) -> Method:
    """Return the method `name` with `options`.

    Args:
        name: Registered name.
        options: Options of the method.
        other_names: Other argument names of the caller, such as "keep", to suggest for a typo.

    Raises:
        UnknownMethodError: If no method has this name.
        OptionError: If the method lacks one of the options.

    Examples:
        >>> build("divprune", {"center": True})
        divprune(center=True)
    """
    return build_from_options(name, method_class(name), options, other_names)


def build_from_options(name: str, cls: Callable[..., C], options: dict[str, Any], other_names: Iterable[str] = ()) -> C:
    """Return an instance of the dataclass `cls`, named `name` in errors, with `options`. See `build`."""
    known = {f.name: f.default for f in dataclasses.fields(cast(Any, cls))}
    for option in options:
        if option not in known:
            hint = did_you_mean(option, [*known, *other_names])
            raise OptionError(f"{name} has no option {option!r}: {hint}its options are {', '.join(known) or '(none)'}")
    return cls(**options)
