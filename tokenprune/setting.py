# SPDX-License-Identifier: Apache-2.0
"""A setting `{"method": ..., "keep": ..., option: ...}`, read into one form, whichever way it was written.

`tokenprune.json`, `patch(config=...)`, the command line, lmms-eval's arguments and the vLLM plugin read it here. What a
setting may hold is checked before anything is built of it or opened: only what JSON can hold, of bounded size and
depth, and finite numbers.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tokenprune.base import Method
from tokenprune.budget import TARGETS, Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.files import File, reason
from tokenprune.registry import build, method_class

IN_LLM = "experimental_in_llm"  # how vLLM shall serve a method; it changes nothing elsewhere
SCOPE = ("method", "keep", "per", "off", IN_LLM)  # keys of a setting that are no option of its method
_EXAMPLE = '{"method": "divprune", "keep": 0.25}'
_LIST = '{"method": [{"method": "dynres", "min_scale": 0.5}, "divprune"]}'

_LONGEST = 2048  # characters of a text
_LONGEST_NAME = 100  # characters of a key
_MOST = 1024  # values in all
_DEEPEST = 6  # lists and objects within each other
_LARGEST = 2**63  # no number is larger


@dataclass(frozen=True)
class Entry:
    """A method of a setting, by its name, and the options that were given for it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """Its options that name a file."""
        return [name for name in self.options if name in file_options(method_class(self.name))]


@dataclass(frozen=True)
class Layer:
    """A setting in its one form; whatever was not said is None.

    where:   what messages call it.
    entries: its methods. options: those of the method of the layer below, if it names none itself.
    keep:    one number or `Budget` for all methods, a list with one for each; None: each method's own default.
    off:     None if it says neither true nor false.
    """

    where: str
    entries: tuple[Entry, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    keep: Any = None
    per: str | None = None
    off: bool | None = None
    in_llm: bool | None = None

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries or ()]

    def on(self, below: Layer | None) -> Layer:
        """Return this layer with its options at the method that they belong to, one of the layer below if need be;
        raises OptionError where there is no such method."""
        if not self.options:
            return self
        if below is None or not below.entries:
            raise OptionError(_no_method(self.where))
        if len(below.entries) > 1:
            raise OptionError(_ambiguous(self.where, self.options))
        return replace(self, entries=(Entry(below.entries[0].name, self.options),), options={})

    def without_files(self) -> Layer:
        """Return this layer, whose options stand at their methods; raises OptionError if one of them names a file."""
        for entry in self.entries or ():
            for name in entry.files:
                raise OptionError(
                    f"{self.where}: {name} of {entry.name} names a file of the server: it belongs to the server's "
                    "setting, not to a request"
                )
        return self

    def over(self, below: Layer | None) -> Layer:
        """Return both layers as one, in which this one goes before the one below, key by key. One that names other
        methods drops what was said of the methods below."""
        if below is None:
            return self
        same = self.entries is None or self.names == below.names
        entries = self.entries or below.entries
        if self.entries and below.entries and same:
            pairs = zip(below.entries, self.entries, strict=True)
            entries = tuple(Entry(old.name, old.options | new.options) for old, new in pairs)
        kept = None if not same and isinstance(below.keep, list) else below.keep
        return Layer(
            self.where,
            entries,
            keep=kept if self.keep is None else self.keep,
            per=below.per if self.per is None else self.per,
            off=self.off,
            in_llm=below.in_llm if self.in_llm is None and same else self.in_llm,
        )

    def with_files(self, read: Callable[[str], File] = File.read) -> Layer:
        """Return this layer with every file that it names read; raises OptionError for one that cannot be."""
        return replace(self, entries=tuple(self._with_files(entry, read) for entry in self.entries or ()))

    def _with_files(self, entry: Entry, read: Callable[[str], File]) -> Entry:
        options = dict(entry.options)
        for name in entry.files:
            try:
                if isinstance(options[name], str):
                    options[name] = read(options[name])
            except OSError as error:
                raise OptionError(f"{self.where}: cannot read {name}={options[name]!r}: {reason(error)}") from error
        return Entry(entry.name, options)

    def methods(self) -> list[Method]:
        """Build the methods; raises OptionError, also where there is none."""
        if not self.entries:
            raise OptionError(_no_method(self.where, self.off))
        return [self._build(entry) for entry in self.entries]

    def _build(self, entry: Entry) -> Method:
        try:
            return build(entry.name, entry.options)
        except TokenPruneError:
            raise
        except Exception as error:  # a value that the method itself did not check
            raise OptionError(f"{self.where}: {entry.name} cannot take these options: {error}") from error

    def budgets(self) -> list[Budget]:
        """Return the budget of each method; raises BudgetError."""
        defaults = [method_class(name).default_keep for name in self.names]
        keeps = defaults if self.keep is None else self.keep if isinstance(self.keep, list) else None
        keeps = [self.keep] * len(defaults) if keeps is None else keeps
        if len(keeps) != len(defaults):
            raise BudgetError(
                f"{self.where}: keep has {len(keeps)} entries for {len(defaults)} methods: give one for each, or one"
            )
        return [self._budget(keep) for keep in keeps]

    def _budget(self, keep: Any) -> Budget:
        per = "image" if self.per is None else self.per
        if not isinstance(keep, dict):
            return replace(Budget.of(keep), per=per)
        if unknown := sorted(set(keep) - set(TARGETS)):
            raise BudgetError(
                f"{self.where}: keep has no {', '.join(unknown)}: write a number alone, 4 for four tokens or 0.25 for "
                f"a share, or an object with one of {', '.join(TARGETS[1:])}"
            )
        return Budget(**keep, per=per)


def parse(given: Any, where: str) -> Layer:
    """Read a setting that a user wrote, which `where` names in messages. Nothing is opened, and no method built.

    Raises OptionError, UnknownMethodError or BudgetError.
    """
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
        Budget.of(None)  # raises: whoever writes null has not left keep out
    if "feature_cache" in given:
        raise OptionError(
            f"{where}: feature_cache does not belong to a setting: pass it to tokenprune.patch() beside config=; vLLM "
            "keeps encoded images itself, in its encoder cache"
        )
    options = {name: value for name, value in given.items() if name not in SCOPE}
    for name in TARGETS[1:]:
        if name in options:
            raise BudgetError(f'{where}: {name} is a kind of keep: write "keep": {{"{name}": {short(options[name])}}}')
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
    return Layer(where, entries, options, given.get("keep"), per, off, in_llm)


def _entry(given: Any, where: str) -> Entry:
    """Return what stands under "method", or one of its list."""
    if not isinstance(given, dict) or "method" not in given:
        return Entry(method_class(cast(Any, given)).name)  # says what it takes
    options = {name: value for name, value in given.items() if name != "method"}
    if "keep" in options:
        raise OptionError(f'{where}: keep stands beside the methods, {{"method": [...], "keep": [0.5, 0.25]}}')
    return Entry(method_class(given["method"]).name, options)


def number(text: str) -> Any:
    """Return the number that a text of a command line means, whole numbers as int, or the text where it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def file_options(cls: type[Method]) -> set[str]:
    """Return the options of a method that name a file: those with `field(metadata={"file": True})`, and those that
    are typed as a path."""
    fields = dataclasses.fields(cls)
    return {one.name for one in fields if one.metadata.get("file") or "Path" in str(one.type)}


def plain(value: Any, name: str) -> Any:
    """Return `value` as json.loads would have made it; `name` is what messages call it. Raises OptionError, or
    BudgetError of "keep", for what JSON cannot hold, or what is too long, too deep or no finite number."""
    return _plain(value, name, _DEEPEST, iter(range(_MOST)))


def _plain(value: Any, name: str, deeper: int, left: Iterator[int]) -> Any:
    if next(left, None) is None:
        raise OptionError(f"{name}: there are more than {_MOST} values in this setting")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _number(value, name)
    if isinstance(value, (str, os.PathLike)):
        text = value if isinstance(value, str) else os.fsdecode(value)
        if len(text) > _LONGEST:
            raise OptionError(f"{name} is {len(text)} characters long; at most {_LONGEST} are read")
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # an answer that quoted it could not be sent
            raise OptionError(f"{name} is no text: {short(text)}")
        return text
    if not isinstance(value, (list, tuple, Mapping)):
        raise OptionError(f"{name} must be what JSON can hold: a {type(value).__name__} is nothing of that")
    if deeper == 0:
        raise OptionError(f"{name}: lists and objects stand more than {_DEEPEST} deep in each other")
    if not isinstance(value, Mapping):
        return [_plain(one, name, deeper - 1, left) for one in value]
    made = {}
    for key, one in value.items():
        if not isinstance(key, str) or len(key) > _LONGEST_NAME or not key.isprintable():
            raise OptionError(f"{name} must be an object whose keys are names of options, not {short(key)}")
        made[key] = _plain(one, key, deeper - 1, left)
    return made


def _number(value: Any, name: str) -> float | int:
    if not -_LARGEST < value < _LARGEST:  # neither is NaN
        odd = value != value or abs(value) == math.inf
        problem = f"must be a number that is finite, not {value}" if odd else "is beyond what is read, -2**63 to 2**63"
        raise (BudgetError if name == "keep" else OptionError)(f"{name} {problem}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def short(value: Any) -> str:
    """Return what to show of a wrong value."""
    try:
        text = repr(value)
    except Exception:  # too deep, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _no_method(where: str, off: bool | None = None) -> str:
    if off is False:
        return f'{where}: "off": false switches nothing on, since no method is named: write {_EXAMPLE}, for example'
    return f"{where} names no method: {_EXAMPLE}, for example"


def _ambiguous(where: str, options: Mapping[str, Any]) -> str:
    return (
        f"{where}: options {', '.join(options)} are ambiguous for several methods: give them with their method, "
        f"{_LIST}, for example"
    )


__all__ = ["IN_LLM", "SCOPE", "Entry", "Layer", "file_options", "number", "parse", "plain", "short"]
