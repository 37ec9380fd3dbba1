# SPDX-License-Identifier: Apache-2.0
"""`Setting`: methods, their options and their budgets as one value.

Config files, `patch(config=...)`, command lines, benchmarks, lmms-eval and the vLLM plugin read their settings into it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from tokenprune.budgets import Budget
from tokenprune.budgets.by_age import count_kept
from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.methods.registry import build, method_class
from tokenprune.selection.files import File, describe_error
from tokenprune.selection.method import Method, Site
from tokenprune.selection.options import get_file_options, get_option_types
from tokenprune.selection.sites import check_sites
from tokenprune.settings.from_json import describe_ambiguity, describe_missing_method, read_setting
from tokenprune.settings.keys import IN_LLM, SCOPE
from tokenprune.settings.one_line import format_method, read_line

if TYPE_CHECKING:
    from tokenprune.selection.sites.pixels import ResizeMethod

Options = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Setting:
    """Methods with their options, their budgets and their scope. Fields that were not given are None or empty.

    Settings with equal fields are equal. Methods are built, and their files read, when `methods` is first accessed.

    Args:
        names: Names of the methods.
        options: The options of each method. Without a method, at most one dict: options of the method of another
            setting that this one is merged onto (`resolve`).
        keep: A number or an object as in JSON for all methods, or a list with one for each. None: each method's
            default.
        per: See `Budget`.
        off: True switches the reduction off.
        in_llm: True if vLLM runs the method inside the language model.
        where: Name of the setting in messages, such as the name of its file.
        guard: Guard of `patch` that the setting was chosen with: "warn", "auto" or "off". Only files hold it.
        tuned: What `tokenprune tune` measured, and on which model. Only files hold it.
        bounds: Upper bounds of the budget for an older image, as shares or numbers of tokens. Only vLLM sets it, for
            the images of a budget by age. JSON does not hold it.
    """

    names: tuple[str, ...] = ()
    options: tuple[Options, ...] = ()
    keep: Any = None
    per: str | None = None
    off: bool | None = None
    in_llm: bool | None = None
    where: str = "setting"
    guard: str | None = None
    tuned: dict[str, Any] = field(default_factory=dict)
    bounds: tuple[float | int, ...] = ()

    @classmethod
    def from_json(cls, value: Any, where: str = "setting") -> Setting:
        """Read a setting that a user wrote as JSON. No file is opened, and no method is built.

        Raises:
            OptionError, UnknownMethodError, BudgetError: If the setting is invalid. `where` names it in messages.
        """
        return value if isinstance(value, Setting) else cls(**read_setting(value, where), where=where)

    @classmethod
    def from_text(cls, text: str, keep: Any = None) -> Setting:
        """Read methods with their options on one line, such as "divprune+fastv:layer=3"; raises like `from_json`."""
        methods = read_line(text)
        return cls(tuple(name for name, _ in methods), tuple(options for _, options in methods), keep)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads as this setting; `guard` and `tuned` are not part of it."""
        methods = [{"method": name, **_without_content(options)} for name, options in self._methods_with_options()]
        scope = {"keep": self.keep, "per": self.per, "off": self.off, IN_LLM: self.in_llm}
        if len(methods) > 1:
            value: dict[str, Any] = {"method": methods}
        else:
            value = methods[0] if methods else dict(*self.options)
        return value | {name: one for name, one in scope.items() if one is not None}

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file that was read, by the name of its option."""
        return {
            option: value.digest for own in self.options for option, value in own.items() if isinstance(value, File)
        }

    def to_text(self) -> str:
        """Return its methods and options on one line, without the budgets; `from_text` reads it."""
        return "+".join(format_method(name, options) for name, options in self._methods_with_options())

    @property
    def name(self) -> str:
        """Its methods without their options, "divprune+fastv"."""
        return "+".join(self.names)

    @property
    def keep_text(self) -> str:
        """Its keeps, "0.5, 0.25"; "" if none is given."""
        keeps = self.keep if isinstance(self.keep, list) else [] if self.keep is None else [self.keep]
        return ", ".join(f"{keep}" if isinstance(keep, dict) else f"{keep:g}" for keep in keeps)

    def __str__(self) -> str:
        return f"{self.name} {self.keep_text}".strip()

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Setting) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> str:
        parts = [self.to_json(), self.guard, self.tuned, self.bounds, self.digests]
        return json.dumps(parts, sort_keys=True, default=repr)

    def _methods_with_options(self) -> list[tuple[str, Options]]:
        return list(zip(self.names, self.options, strict=True)) if self.names else []

    # -- methods and budgets

    def steps(self) -> tuple[list[Method], list[Budget]]:
        """Return the methods and their budgets; raises UnknownMethodError, OptionError or BudgetError."""
        setting = self.resolve(None)
        if setting.off:
            raise OptionError(f'{self.where} says {{"off": true}}: there is nothing to patch')
        budgets = setting.budgets
        return setting.methods, budgets

    def validate(self) -> Setting:
        """Return this setting; raises OptionError if two methods act at one place, or a file cannot be read."""
        check_sites(self.methods)
        return self

    @cached_property
    def methods(self) -> list[Method]:
        """The methods; raises OptionError, also if there is none."""
        if not self.names:
            raise OptionError(describe_missing_method(self.where, self.off))
        return [self._build(*method) for method in self.with_files()._methods_with_options()]

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
        return [Budget.from_json(keep, "image" if self.per is None else self.per) for keep in keeps]

    def _build(self, name: str, options: Options) -> Method:
        try:
            return build(name, options, SCOPE)
        except TokenPruneError:
            raise
        except Exception as error:  # for a value that the method does not check
            raise OptionError(f"{self.where}: {name} cannot take these options: {error}") from error

    # -- options

    @property
    def draws_at_random(self) -> bool:
        """True if a method draws at random, with a seed that is not given."""
        return any(_lacks_seed(name, options) for name, options in self._methods_with_options())

    @property
    def files(self) -> list[str]:
        """Options that name a file, as in "thresholds of dymu"; nothing is opened."""
        return [
            f"{option} of {name}"
            for name, options in self._methods_with_options()
            for option in options
            if option in get_file_options(method_class(name))
        ]

    def without_files(self) -> Setting:
        """Return this setting; raises OptionError if an option names a file."""
        for file in self.files:
            raise OptionError(
                f"{self.where}: {file} names a file of the server: it belongs to the server's setting, not to a request"
            )
        return self

    def with_files(self, read: Callable[[str], File] = File.read) -> Setting:
        """Return this setting with the files that its options name read; raises OptionError if one cannot be."""
        return replace(self, options=tuple(self._read_files(*one, read) for one in self._methods_with_options()))

    def _read_files(self, name: str, options: Options, read: Callable[[str], File]) -> Options:
        options = dict(options)
        for option in get_file_options(method_class(name)):
            value = options.get(option)
            if isinstance(value, str) and not isinstance(value, File):  # not read yet
                try:
                    options[option] = read(value)
                except OSError as error:
                    raise OptionError(
                        f"{self.where}: cannot read {option}={value!r}: {describe_error(error)}"
                    ) from error
        return options

    # -- settings for vLLM: at most one method that resizes images, and one other method

    @cached_property
    def pixel_method(self) -> ResizeMethod | None:
        """The method that resizes images before the encoder, or None."""
        methods = (method for method in self._methods_or_none if method.site is Site.PRE_ENCODER)
        return cast("ResizeMethod | None", next(methods, None))

    @cached_property
    def pixel_budget(self) -> Budget:
        """The budget of `pixel_method`. It keeps everything if there is no such method."""
        return self._budget_of(self.pixel_method)

    @cached_property
    def method(self) -> Method | None:
        """The first method that does not resize images, or None."""
        return next((method for method in self._methods_or_none if method.site is not Site.PRE_ENCODER), None)

    @cached_property
    def budget(self) -> Budget:
        """The budget of `method`. It keeps everything if there is no such method."""
        return self._budget_of(self.method)

    @cached_property
    def keeps_all_tokens(self) -> bool:
        """True if vLLM's prompt keeps all visual tokens of the encoder's output."""
        return self.method is None or bool(self.in_llm) or (self.budget.is_identity() and not self.bounds)

    @cached_property
    def joint_share(self) -> float:
        """The product of all shares, for a setting without numbers of tokens."""
        shares = (self.pixel_budget.keep, self.budget.keep, *self.bounds)
        return math.prod(share for share in shares if share is not None)

    @cached_property
    def joint_keep(self) -> float | int:
        """The share or the number of tokens that `pixel_method` and `method` together keep of a new image."""
        if isinstance(self.budget.keep, int):
            return count_kept(self.budget.keep, self.bounds)
        counts = [bound for bound in self.bounds if isinstance(bound, int)]
        return min(counts) if counts else round(self.joint_share, 4)

    @property
    def _methods_or_none(self) -> list[Method]:
        return self.methods if self.names else []

    def _budget_of(self, method: Method | None) -> Budget:
        return Budget(keep=1.0) if method is None else self.budgets[self.methods.index(method)]

    # -- other settings

    def with_keep(self, keep: Any) -> Setting:
        """Return this setting with another keep."""
        return replace(self, keep=keep)

    def with_defaults(self, defaults: Mapping[str, Mapping[str, Any]], seed: int | None = None) -> Setting:
        """Return this setting with defaults for options that are not given.

        Args:
            defaults: Options by the name of a method.
            seed: Seed of methods that draw at random.
        """
        options = tuple(
            {**({"seed": seed} if seed is not None and _lacks_seed(name, own) else {}), **defaults.get(name, {}), **own}
            for name, own in self._methods_with_options()
        )
        return replace(self, options=options)

    def resolve(self, below: Setting | None) -> Setting:
        """Return this setting with the method of the setting below for options that name no method.

        Raises OptionError if there is no such method, or several.
        """
        if self.names or not self.options:
            return self
        if below is None or not below.names:
            raise OptionError(describe_missing_method(self.where))
        if len(below.names) > 1:
            raise OptionError(describe_ambiguity(self.where, *self.options))
        return replace(self, names=below.names)

    def merge_onto(self, below: Setting | None) -> Setting:
        """Return both settings as one, in which the keys of this one have precedence. If it names other methods, the
        options, the list of keeps and the place of the methods below are dropped."""
        if below is None:
            return self
        same = not self.names or self.names == below.names
        options = self.options if self.names else below.options
        if self.names and below.names and same:
            options = tuple(old | new for old, new in zip(below.options, self.options, strict=True))
        keep = None if not same and isinstance(below.keep, list) else below.keep
        return Setting(
            self.names or below.names,
            options,
            keep if self.keep is None else self.keep,
            below.per if self.per is None else self.per,
            self.off,
            below.in_llm if self.in_llm is None and same else self.in_llm,
            self.where,
        )


def _lacks_seed(name: str, options: Options) -> bool:
    return "seed" in get_option_types(method_class(name)) and "seed" not in options


def _without_content(options: Options) -> Options:
    """Return the options with the path in place of each file that was read, so that JSON and pickles stay small."""
    return {name: str(value) if isinstance(value, File) else value for name, value in options.items()}
