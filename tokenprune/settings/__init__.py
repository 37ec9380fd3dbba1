# SPDX-License-Identifier: Apache-2.0
"""A setting `{"method": ..., "keep": ..., option: ...}` in its one form, whichever way it was written.

`tokenprune.json`, `patch(config=...)`, command lines, benchmarks, lmms-eval's arguments and the vLLM plugin read it
here, once; from there on the object travels. What a setting may hold is checked before anything is built of it or
opened: only what JSON can hold, of bounded size and depth, and finite numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from tokenprune.budgets import Budget
from tokenprune.budgets.checks import TARGETS
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, short
from tokenprune.methods.registry import build, did_you_mean, method_class
from tokenprune.selection.files import File, reason
from tokenprune.selection.method import Method
from tokenprune.selection.sites import check_places
from tokenprune.settings.json_values import plain
from tokenprune.settings.one_line import Entry, read_entries

IN_LLM = "experimental_in_llm"  # how vLLM shall serve a method; it changes nothing elsewhere
LIMIT = "max_visual_tokens"  # an argument of patch()
SCOPE = ("method", "keep", "per", "off", IN_LLM)  # keys of a setting that are no option of its method
_EXAMPLE = '{"method": "divprune", "keep": 0.25}'
_BY_AGE = '{"keep": 1.0, "age": [[0, 1.0], [2, 0.5]], "step": 4}'
_LIST = '{"method": [{"method": "dynres", "min_scale": 0.5}, "divprune"]}'


@dataclass(frozen=True, eq=False)
class Setting:
    """Methods with their options, their budgets and their scope; whatever was not said is None.

    entries: its methods. options: those of the method of the setting below, if it names none itself (`resolve`).
    keep:    one number or object for all methods, a list with one for each; None: each method's own default.
    off:     None if it says neither true nor false.
    where:   what messages call it.

    Two settings are equal if they say the same; methods are built, and their files read, when they are asked for.
    """

    entries: tuple[Entry, ...] | None = None
    keep: Any = None
    per: str | None = None
    off: bool | None = None
    in_llm: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    where: str = "setting"

    @classmethod
    def of(cls, given: Any, where: str = "setting") -> Setting:
        """Read a setting that a user wrote, which `where` names in messages. Nothing is opened, and no method built.

        Raises OptionError, UnknownMethodError or BudgetError.
        """
        return given if isinstance(given, Setting) else _read(given, where)

    @classmethod
    def from_spec(cls, text: str, keep: Any = None) -> Setting:
        """Read methods with their options on one line (see `one_line`); raises like `of`. keep: see `Setting`."""
        return cls(read_entries(text), keep)

    def checked(self) -> Setting:
        """Return this setting; raises OptionError if two methods act at one place, or a file cannot be read."""
        check_places(self.methods)
        return self

    # -- what it says

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries or ()]

    @property
    def name(self) -> str:
        """Its methods without their options, "divprune+fastv"."""
        return "+".join(self.names)

    @property
    def keep_text(self) -> str:
        """Its keeps, "0.5, 0.25"; "" where none is given."""
        keeps = self.keep if isinstance(self.keep, list) else [] if self.keep is None else [self.keep]
        return ", ".join(f"{keep}" if isinstance(keep, dict) else f"{keep:g}" for keep in keeps)

    def __str__(self) -> str:
        return f"{self.name} {self.keep_text}".strip()

    @property
    def spec(self) -> str:
        """Its methods and options on one line: the one spelling that names it in tables and files."""
        return "+".join(entry.spec for entry in self.entries or ())

    @property
    def files(self) -> list[str]:
        """Options that name a file, as in "thresholds of dymu"; nothing is opened."""
        return [f"{name} of {entry.name}" for entry in self.entries or () for name in entry.files]

    @property
    def draws_at_random(self) -> bool:
        """True if a method draws at random, with a seed that is not given."""
        return any(entry.draws_at_random for entry in self.entries or ())

    def as_dict(self) -> dict[str, Any]:
        """Return the setting as JSON holds it; `of` reads it."""
        methods = [{"method": entry.name, **entry.options} for entry in self.entries or ()]
        said = {"keep": self.keep, "per": self.per, "off": self.off, IN_LLM: self.in_llm}
        named = methods[0] if len(methods) == 1 else {"method": methods} if methods else self.options
        return named | {name: value for name, value in said.items() if value is not None}

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Setting) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> str:
        return json.dumps(self.as_dict(), sort_keys=True, default=repr)

    # -- what it does

    def steps(self) -> tuple[list[Method], list[Budget]]:
        """Return the methods and their budgets; raises UnknownMethodError, OptionError or BudgetError."""
        whole = self.resolve(None)
        if whole.off:
            raise OptionError(f'{self.where} says {{"off": true}}: there is nothing to patch')
        budgets = whole.budgets
        return whole.methods, budgets

    @cached_property
    def methods(self) -> list[Method]:
        """The methods; raises OptionError, also where there is none."""
        if not self.entries:
            raise OptionError(_no_method(self.where, self.off))
        return [self._build(entry) for entry in self.with_files().entries or ()]

    @cached_property
    def budgets(self) -> list[Budget]:
        """The budget of each method; raises BudgetError."""
        defaults = [method_class(name).default_keep for name in self.names]
        keeps = defaults if self.keep is None else self.keep if isinstance(self.keep, list) else None
        keeps = [self.keep] * len(defaults) if keeps is None else keeps
        if len(keeps) != len(defaults):
            raise BudgetError(
                f"{self.where}: keep has {len(keeps)} entries for {len(defaults)} methods: give one for each, or one"
            )
        return [Budget.from_json(keep, self.per or "image") for keep in keeps]

    def _build(self, entry: Entry) -> Method:
        try:
            return build(entry.name, entry.options, SCOPE)
        except TokenPruneError:
            raise
        except Exception as error:  # a value that the method itself did not check
            raise OptionError(f"{self.where}: {entry.name} cannot take these options: {error}") from error

    # -- others made of it

    def with_keep(self, keep: Any) -> Setting:
        return replace(self, keep=keep)

    def filled(self, defaults: Mapping[str, Mapping[str, Any]], seed: int | None = None) -> Setting:
        """Return this setting with options that it does not give. defaults: by method. seed: of the methods that draw
        at random."""
        entries = tuple(entry.filled(defaults.get(entry.name, {}), seed) for entry in self.entries or ())
        return replace(self, entries=entries or None)

    def resolve(self, below: Setting | None) -> Setting:
        """Return this setting with its options at the method that they belong to, one of the setting below if need be;
        raises OptionError where there is no such method."""
        if not self.options:
            return self
        if below is None or not below.entries:
            raise OptionError(_no_method(self.where))
        if len(below.entries) > 1:
            raise OptionError(_ambiguous(self.where, self.options))
        return replace(self, entries=(Entry(below.entries[0].name, self.options),), options={})

    def merge_onto(self, below: Setting | None) -> Setting:
        """Return both settings as one, in which this one goes before the one below, key by key. One that names other
        methods drops what was said of the methods below."""
        if below is None:
            return self
        same = self.entries is None or self.names == below.names
        entries = self.entries or below.entries
        if self.entries and below.entries and same:
            pairs = zip(below.entries, self.entries, strict=True)
            entries = tuple(Entry(old.name, old.options | new.options) for old, new in pairs)
        kept = None if not same and isinstance(below.keep, list) else below.keep
        return Setting(
            entries,
            kept if self.keep is None else self.keep,
            below.per if self.per is None else self.per,
            self.off,
            below.in_llm if self.in_llm is None and same else self.in_llm,
            where=self.where,
        )

    def without_files(self) -> Setting:
        """Return this setting, whose options stand at their methods; raises OptionError if one of them names a file."""
        for file in self.files:
            raise OptionError(
                f"{self.where}: {file} names a file of the server: it belongs to the server's setting, not to a request"
            )
        return self

    def with_files(self, read: Callable[[str], File] = File.read) -> Setting:
        """Return this setting with every file that it names read; raises OptionError for one that cannot be."""
        return replace(self, entries=tuple(self._with_files(entry, read) for entry in self.entries or ()))

    def _with_files(self, entry: Entry, read: Callable[[str], File]) -> Entry:
        options = dict(entry.options)
        for name in entry.files:
            try:
                if isinstance(options[name], str) and not isinstance(options[name], File):  # not read yet
                    options[name] = read(options[name])
            except OSError as error:
                raise OptionError(f"{self.where}: cannot read {name}={options[name]!r}: {reason(error)}") from error
        return Entry(entry.name, options)


def _read(given: Any, where: str) -> Setting:
    if not isinstance(given, Mapping):
        raise OptionError(f'{where} must be an object like {_EXAMPLE} or {{"off": true}}, not {short(given)}')
    given = plain(given, where)
    off, in_llm, per = given.get("off"), given.get(IN_LLM), given.get("per")
    if "off" in given and not isinstance(off, bool):
        raise OptionError(f"{where}: off must be true or false, not {short(off)}")
    if off and len(given) > 1:
        raise OptionError(f"{where}: off stands alone; leave out {', '.join(sorted(set(given) - {'off'}))}")
    if IN_LLM in given and not isinstance(in_llm, bool):
        raise OptionError(f"{where}: {IN_LLM} must be true or false, not {short(in_llm)}")
    if "per" in given and not isinstance(per, str):
        raise OptionError(f'{where}: per must be "image" or "frame", not {short(per)}')
    if "keep" in given and given["keep"] is None:
        Budget.from_keep(None)  # raises: whoever writes null has not left keep out
    if "feature_cache" in given:
        raise OptionError(
            f"{where}: feature_cache does not belong to a setting: pass it to tokenprune.patch() beside config=; vLLM "
            "keeps encoded images itself, in its encoder cache"
        )
    if LIMIT in given:
        raise OptionError(
            f'{where}: {LIMIT} is a keep of downsample: write "method": ["downsample", ...], "keep": [...]'
        )
    options = {name: value for name, value in given.items() if name not in SCOPE}
    for name in TARGETS[1:]:
        if name in options:
            raise BudgetError(f'{where}: {name} is a kind of keep: write "keep": {{"{name}": {short(options[name])}}}')
    if "age" in options:  # `step` alone is an option of a method
        raise BudgetError(f'{where}: age and step belong to keep: write "keep": {_BY_AGE}, for example')
    entries = None
    if "method" in given:
        named = given["method"]
        if named == []:
            raise OptionError(f"{where}: method is an empty list, it names no method: name at least one")
        entries = tuple(_entry(one, where) for one in (named if isinstance(named, list) else [named]))
        if options and len(entries) > 1:
            raise OptionError(_ambiguous(where, options))
        if twice := sorted(set(options) & set(entries[0].options)):
            raise OptionError(f"{where}: {', '.join(twice)} stands in two places: give it with its method alone")
        entries = (Entry(entries[0].name, entries[0].options | options), *entries[1:])
        options = {}
    return Setting(entries, given.get("keep"), per, off, in_llm, options, where)


def _entry(given: Any, where: str) -> Entry:
    """Return what stands under "method", or one of its list."""
    if not isinstance(given, dict) or "method" not in given:
        return Entry(method_class(cast(Any, given)).name)  # says what it takes
    options = {name: value for name, value in given.items() if name != "method"}
    if "keep" in options:
        raise OptionError(f'{where}: keep stands beside the methods, {{"method": [...], "keep": [0.5, 0.25]}}')
    return Entry(method_class(given["method"]).name, options)


def _no_method(where: str, off: bool | None = None) -> str:
    if off is False:
        return f'{where}: "off": false switches nothing on, since no method is named: write {_EXAMPLE}, for example'
    return f"{where} names no method: {_EXAMPLE}, for example"


def _ambiguous(where: str, options: Mapping[str, Any]) -> str:
    for option in options:
        if hint := did_you_mean(option, SCOPE):
            return f"{where} has no key {option!r}: {hint.strip()}"
    return (
        f"{where}: options {', '.join(options)} are ambiguous for several methods: give them with their method, "
        f"{_LIST}, for example"
    )


__all__ = ["IN_LLM", "SCOPE", "Setting"]
