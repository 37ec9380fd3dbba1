# SPDX-License-Identifier: Apache-2.0
"""The registry of methods: one decorator, lookup with close matches, entry points of third parties."""

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

from tokenprune.errors import OptionError, RegistrationError, UnknownMethodError, short
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable_registry import available_observables, need_of
from tokenprune.selection.sites.attention import AttentionPattern
from tokenprune.selection.sites.decode import DecodeMethod
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "tokenprune.methods"
# What a method of each site derives from.
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
    """Facts about a method, known without running it; `needs`, `query_aware` and `prefix_cache_safe` hold for its
    default options."""

    name: str
    site: Site
    summary: str
    paper: str
    needs: frozenset[str]
    query_aware: bool
    prefix_cache_safe: bool
    merges: bool
    options: dict[str, Any]
    cls: type[Method]
    reconstruction: bool = False
    default_keep: float = 0.25

    @property
    def source(self) -> str:
        """The paper, and whether the method is a reconstruction of what it says."""
        return f"{self.paper}; reconstruction" if self.reconstruction else self.paper

    @property
    def for_videos(self) -> bool:
        """True if the method acts on videos alone: it compares frames, or changes how they attend to each other."""
        return self.site is Site.ATTENTION or "frames" in self.needs

    @property
    def capturable(self) -> bool:
        """True if a CUDA graph can hold the choice, by default options: it is made before or inside the language model,
        the budget alone decides how many tokens stay, and no value of the device is asked for."""
        method = self.cls()
        checked = isinstance(method, Pruner) and type(method).select is Pruner.select and not method.never_nan
        asks = method.asks_device or method.by_content_count or checked
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
    """Register a frozen dataclass derived from the base class of its site (`Pruner` and others) under `name`.

    site: where it acts. paper: where it comes from ("arXiv 2403.06764, ECCV 2024", or "none" for a baseline).
    needs: names of the observables that it reads, such as "keys" (`available_observables()`). None: what its class
    says itself, by a property `needs` where they depend on the options; else nothing.
    merges: whether kept tokens absorb others.
    reconstruction: whether parts of it are guesses, since neither the authors' full text nor their code was to be had.
    Raises RegistrationError for a taken name, a class that is no frozen dataclass or has not the base of its site, an
    unknown need, needs that are said twice, or a missing docstring.
    """
    needs = None if needs is None else frozenset(map(need_of, needs))

    def decorate(cls: M) -> M:
        problem = _problem(name, cls, Site(site), needs)
        if problem:
            raise RegistrationError(f"cannot register {name!r}: {problem}")
        cls.name, cls.site, cls.paper, cls.merges = name, Site(site), paper, merges
        cls.reconstruction = reconstruction
        if needs is not None:
            cls.needs = needs  # type: ignore[method-assign, assignment]  # an attribute, or a property
        _METHODS[name] = cls
        return cls

    return decorate


def _problem(name: str, cls: type, site: Site, needs: frozenset[str] | None) -> str | None:
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        return "a name is a lower-case identifier and no word of Python's own, like its module"
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        return "the class must derive from tokenprune.Method"
    own = cls.__dict__.get("__dataclass_params__")  # not an inherited one: the class's own fields would not exist
    if own is None or not own.frozen:
        return "decorate the class with @dataclass(frozen=True) below @register(...)"
    if not (cls.__dict__.get("__doc__") or "").strip() or (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        return "the class needs a docstring; its first sentence is what `tokenprune methods` prints"
    own_needs: Any = cls.needs
    if needs is not None and isinstance(own_needs, property) and own_needs is not Method.needs:
        return "its class has a property `needs`, so leave out needs= of @register(...)"
    if unknown := (needs or frozenset()) - set(available_observables()):
        return f"unknown needs {sorted(unknown)}; known are {available_observables()}"
    present = _METHODS.get(name)
    if present is not None and (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
        return f"the name is taken by {present.__module__}.{present.__qualname__}"
    return find_missing_base(cls, site)


def find_missing_base(cls: type[Method], site: Site) -> str | None:
    """Return what a method's class must derive from at `site`, in words; None if it does."""
    if issubclass(cls, BASES[site]):
        return None
    bases = " or ".join(f"tokenprune.{'selection.' * (base is not Pruner)}{base.__name__}" for base in BASES[site])
    return f"a method of the site {site} must derive from {bases}"


def _load() -> None:
    """Import our own methods and those that installed packages offer, once."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    import_all("tokenprune.methods", ENTRY_POINT_GROUP)


def import_all(package: str, group: str) -> None:
    """Import all modules of our `package`, and what installed packages offer under the entry-point group `group`."""
    ours = importlib.import_module(package)
    for module in pkgutil.walk_packages(ours.__path__, f"{ours.__name__}."):
        importlib.import_module(module.name)
    for entry in entry_points(group=group):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            # A broken third-party package must not take the library down; what it offers then simply stays unknown.
            kind, reason = group.partition(".")[2], " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("%s of the entry point %r (%s) are left out: %s", kind, entry.name, entry.value, reason)


def available_methods() -> list[str]:
    """Return the names of all registered methods, sorted."""
    _load()
    return sorted(_METHODS)


def method_class(name: str) -> type[Method]:
    """Return the class registered under `name`; raises UnknownMethodError naming close matches."""
    _load()
    if not isinstance(name, str) or name not in _METHODS:
        if hint := _from_command_line(name):
            raise UnknownMethodError(f"{name!r} is written for the command line. {hint}")
        written = " ".join(short(name).split())
        raise UnknownMethodError(
            f"unknown method {written}: {suggest_nearest(name, _METHODS)}`tokenprune methods` lists them all"
        )
    return _METHODS[name]


def _from_command_line(name: object) -> str:
    """Return how to pass several methods, or a method with options, that are written as on a command line."""
    stack = name.split("+") if isinstance(name, str) else []
    names = [entry.partition(":")[0].strip() for entry in stack]
    if not names or not all(entry in _METHODS for entry in names):
        return ""
    if len(names) > 1:
        return f"Pass a list of methods: {names!r}."
    return f'Pass options as arguments, as in tokenprune.method("{names[0]}", option=value).'


def suggest_nearest(name: object, known: Iterable[str]) -> str:
    """Return the start of a sentence that names the three of `known` that are spelled most like `name`."""
    if not isinstance(name, str) or not name:
        return ""
    near = difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.0)
    return f"did you mean {_or(near)}? " if did_you_mean(name.lower(), near) else f"the nearest are {_or(near)}; "


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the start of a sentence that suggests the names spelled almost like `name`, empty if there are none."""
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
    return f"did you mean {_or(close)}? " if close else ""


def _or(names: Sequence[str]) -> str:
    """Return names in words: "'dart', 'fastv' or 'pool'"."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


def method_info(name: str) -> MethodInfo:
    """Return the `MethodInfo` of a registered method; raises UnknownMethodError."""
    cls = method_class(name)
    default = cls()
    return MethodInfo(
        name=name,
        site=cls.site,
        summary=inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        paper=cls.paper,
        needs=default.needs,
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
        name: A registered name.
        options: Options of the method.
        other_names: Names that the caller takes beside the options, such as "keep", to suggest for a typo.

    Raises:
        UnknownMethodError: If no method has this name.
        OptionError: If the method does not have one of the options.
    """
    return build_from_options(name, method_class(name), options, other_names)


def build_from_options(name: str, cls: Callable[..., C], options: dict[str, Any], other_names: Iterable[str] = ()) -> C:
    """Return an object of the dataclass `cls`, called `name`, with `options`; see `build`."""
    known = {f.name: f.default for f in dataclasses.fields(cast(Any, cls))}
    for option in options:
        if option not in known:
            hint = did_you_mean(option, [*known, *other_names])
            raise OptionError(f"{name} has no option {option!r}: {hint}its options are {', '.join(known) or '(none)'}")
    return cls(**options)
