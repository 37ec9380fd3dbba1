# SPDX-License-Identifier: Apache-2.0
"""`Setting`: methods, options and budgets as one value.

Used by configuration files, `patch(config=...)`, command lines, benchmarks, lmms-eval and the vLLM plugin.
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
from tokenprune.settings.keys import IN_LLM, LIMIT, SCOPE
from tokenprune.settings.max_visual_tokens import LIMITER, apply_limit
from tokenprune.settings.one_line import format_method, read_line

if TYPE_CHECKING:
    from tokenprune.selection.sites.pixels import ResizeMethod

Options = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Setting:
    """Methods with their options, budgets and scope. Fields that are not set are None or empty.

    Settings with equal fields are equal. The first access of `methods` builds the methods, and reads the files that
    their options name.

    Args:
        names: Names of the methods.
        options: Options of each method. Without names, at most one dict, with options for the method of another setting
            (see `resolve`).
        keep: Number or JSON object for all methods, or a list with one entry per method. None: default of each method.
        per: Scope of the budgets. See `Budget`.
        off: True disables pruning.
        in_llm: True if vLLM runs the method inside the language model.
        where: Name of the setting in messages, such as its file name.
        guard: Guard for `patch`: "warn", "auto" or "off". Only set by files.
        tuned: Measurements of `tokenprune tune`, and the model. Only set by files.
        max_visual_tokens: Maximum number of tokens per image before the methods select tokens. It acts as `downsample`
            in front of the methods, and does not count as one of `names`.
        bounds: Upper bounds of the budget for an older image, as shares or numbers of tokens. Only vLLM sets it, for
            the images of a budget by age. JSON does not hold it.

    Examples:
        >>> setting = tokenprune.Setting.from_text("divprune+fastv:layer=1", keep=[0.5, 0.25])
        >>> setting.methods
        [divprune(), fastv(layer=1)]
        >>> model = tokenprune.patch(model, config=setting)
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
    max_visual_tokens: int | None = None

    @classmethod
    def from_json(cls, value: Any, where: str = "setting") -> Setting:
        """Read a setting from a JSON object. Opens no file and builds no method.

        Args:
            value: JSON object, or a `Setting`, which is returned unchanged.
            where: Name of the setting in messages.

        Raises:
            OptionError: If a key or a value is invalid.
            UnknownMethodError: If a method is not registered.
            BudgetError: If `keep` is invalid.

        Examples:
            >>> tokenprune.Setting.from_json({"method": "fastv", "layer": 3, "keep": 0.5}).to_text()
            'fastv:layer=3'
        """
        return value if isinstance(value, Setting) else cls(**read_setting(value, where), where=where)

    @classmethod
    def from_text(cls, text: str, keep: Any = None) -> Setting:
        """Read methods with their options on one line. Raises like `from_json`.

        Examples:
            >>> tokenprune.Setting.from_text("divprune+fastv:layer=3").names
            ('divprune', 'fastv')
        """
        methods = read_line(text)
        return cls(tuple(name for name, _ in methods), tuple(options for _, options in methods), keep)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads as this setting, without `guard` and `tuned`."""
        methods = [
            {"method": name, **_replace_files_by_paths(options)} for name, options in self._list_methods_with_options()
        ]
        scope = {
            "keep": self.keep,
            "per": self.per,
            "off": self.off,
            IN_LLM: self.in_llm,
            LIMIT: self.max_visual_tokens,
        }
        if len(methods) > 1:
            value: dict[str, Any] = {"method": methods}
        else:
            value = methods[0] if methods else dict(*self.options)
        return value | {name: field for name, field in scope.items() if field is not None}

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file that was read, by the name of its option."""
        return {
            option: value.digest for own in self.options for option, value in own.items() if isinstance(value, File)
        }

    def to_text(self) -> str:
        """Return the methods and options on one line, without budgets. `from_text` is the inverse."""
        return "+".join(format_method(name, options) for name, options in self._list_methods_with_options())

    @property
    def name(self) -> str:
        """Names of the methods, such as "divprune+fastv"."""
        return "+".join(self.names)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of the methods, with `downsample` for `max_visual_tokens`."""
        return self.names if self.max_visual_tokens is None else (LIMITER, *self.names)

    @property
    def keep_text(self) -> str:
        """`keep` of each method, such as "0.5, 0.25". Empty if it is not set."""
        keeps = self.keep if isinstance(self.keep, list) else [] if self.keep is None else [self.keep]
        return ", ".join(f"{keep}" if isinstance(keep, dict) else f"{keep:g}" for keep in keeps)

    def __str__(self) -> str:
        limit = "" if self.max_visual_tokens is None else f"{LIMIT}={self.max_visual_tokens}"
        return " ".join(filter(None, (limit, self.name, self.keep_text)))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Setting) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> str:
        parts = [self.to_json(), self.guard, self.tuned, self.bounds, self.digests]
        return json.dumps(parts, sort_keys=True, default=repr)

    def _list_methods_with_options(self) -> list[tuple[str, Options]]:
        return list(zip(self.names, self.options, strict=True)) if self.names else []

    # -- methods and budgets

    def steps(self) -> tuple[list[Method], list[Budget]]:
        """Return the methods and their budgets. Raise OptionError if the setting is off, or names no method."""
        setting = self.resolve(None)
        if setting.off:
            raise OptionError(f'{self.where} sets {{"off": true}}, so no method can be patched.')
        budgets = setting.budgets
        return setting.methods, budgets

    def validate(self) -> Setting:
        """Return this setting. Raise OptionError if two methods act at the same layer, or a file cannot be read."""
        check_sites(self.methods)
        return self

    @cached_property
    def methods(self) -> list[Method]:
        """Configured methods. Raises OptionError if an option is invalid, or there is no method."""
        if not self.names and (self.max_visual_tokens is None or self.keep is not None):
            raise OptionError(describe_missing_method(self.where, self.off))
        methods = [self._build(*method) for method in self.with_files()._list_methods_with_options()]
        return apply_limit(methods, [], self.max_visual_tokens)[0]

    @cached_property
    def budgets(self) -> list[Budget]:
        """Budget of each method. Raises BudgetError if `keep` is invalid."""
        defaults = [method_class(name).default_keep for name in self.names]
        keeps = defaults if self.keep is None else self.keep if isinstance(self.keep, list) else None
        keeps = [self.keep] * len(defaults) if keeps is None else keeps
        if len(keeps) != len(defaults):
            raise BudgetError(
                f"{self.where}: keep has {len(keeps)} entries for {len(defaults)} methods. Pass one, or one per method."
            )
        budgets = [Budget.from_json(keep, "image" if self.per is None else self.per) for keep in keeps]
        return apply_limit([], budgets, self.max_visual_tokens)[1]

    def _build(self, name: str, options: Options) -> Method:
        try:
            return build(name, options, SCOPE)
        except TokenPruneError:
            raise
        except Exception as error:  # an invalid value that the method does not check
            raise OptionError(f"{self.where}: {name} cannot take these options: {error}") from error

    # -- options

    @property
    def draws_at_random(self) -> bool:
        """True if a method uses random numbers and its seed is not set."""
        return any(_lacks_seed(name, options) for name, options in self._list_methods_with_options())

    @property
    def files(self) -> list[str]:
        """Options that name a file, such as "thresholds of dymu". No file is opened."""
        return [
            f"{option} of {name}"
            for name, options in self._list_methods_with_options()
            for option in options
            if option in get_file_options(method_class(name))
        ]

    def without_files(self) -> Setting:
        """Return this setting. Raise OptionError if an option names a file."""
        for file in self.files:
            raise OptionError(
                f"{self.where}: {file} names a file. Set it in the configuration of the server, not in a request."
            )
        return self

    def with_files(self, read: Callable[[str], File] = File.read) -> Setting:
        """Return this setting with each file option replaced by its `File`.

        Args:
            read: Function that reads a file.

        Raises:
            OptionError: If a file cannot be read.
        """
        return replace(
            self, options=tuple(self._read_files(*method, read) for method in self._list_methods_with_options())
        )

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
        return self._get_budget(self.pixel_method)

    @cached_property
    def method(self) -> Method | None:
        """The first method that does not resize images, or None."""
        return next((method for method in self._methods_or_none if method.site is not Site.PRE_ENCODER), None)

    @cached_property
    def budget(self) -> Budget:
        """The budget of `method`. It keeps everything if there is no such method."""
        return self._get_budget(self.method)

    @cached_property
    def keeps_all_tokens(self) -> bool:
        """True if vLLM's prompt keeps all visual tokens of the encoder's output."""
        return self.method is None or bool(self.in_llm) or (self.budget.is_identity() and not self.bounds)

    @cached_property
    def joint_share(self) -> float:
        """The product of all shares, for a setting without numbers of tokens."""
        shares = (self.pixel_budget.keep, self.budget.keep, *self.bounds)
        return math.prod(share for share in shares if isinstance(share, float))

    @cached_property
    def joint_keep(self) -> float | int:
        """The share or the number of tokens that `pixel_method` and `method` together keep of a new image."""
        limit, keep = self.pixel_budget.keep, self.budget.keep
        if isinstance(limit, int) and keep is not None:
            keep = min(keep, limit) if isinstance(keep, int) else max(1, round(limit * keep))
        if isinstance(keep, int):
            return count_kept(keep, self.bounds)
        counts = [bound for bound in self.bounds if isinstance(bound, int)]
        return min(counts) if counts else round(self.joint_share, 4)

    @property
    def _methods_or_none(self) -> list[Method]:
        return self.methods if self.all_names else []

    def _get_budget(self, method: Method | None) -> Budget:
        return Budget(keep=1.0) if method is None else self.budgets[self.methods.index(method)]

    # -- other settings

    def with_keep(self, keep: Any) -> Setting:
        """Return this setting with another keep."""
        return replace(self, keep=keep)

    def with_defaults(self, defaults: Mapping[str, Mapping[str, Any]], seed: int | None = None) -> Setting:
        """Return this setting with defaults for options that are not set.

        Args:
            defaults: Options by method name.
            seed: Seed of methods that use random numbers.
        """
        options = tuple(
            {
                **({"seed": seed} if seed is not None and _lacks_seed(name, options) else {}),
                **defaults.get(name, {}),
                **options,
            }
            for name, options in self._list_methods_with_options()
        )
        return replace(self, options=options)

    def resolve(self, below: Setting | None) -> Setting:
        """Return this setting. If it has options but no method, they apply to the method of `below`.

        Raises:
            OptionError: If `below` has no method, or several.
        """
        if self.names or not self.options:
            return self
        if below is None or not below.names:
            raise OptionError(describe_missing_method(self.where))
        if len(below.names) > 1:
            raise OptionError(describe_ambiguity(self.where, *self.options))
        return replace(self, names=below.names)

    def merge_onto(self, below: Setting | None) -> Setting:
        """Return the combination of two settings, in which the keys of this setting have precedence.

        If the methods differ, the options, the list of keeps and `in_llm` of `below` are dropped.
        """
        if below is None:
            return self
        is_same = not self.names or self.names == below.names
        options = self.options if self.names else below.options
        if self.names and below.names and is_same:
            options = tuple(old | new for old, new in zip(below.options, self.options, strict=True))
        keep = None if not is_same and isinstance(below.keep, list) else below.keep
        return Setting(
            self.names or below.names,
            options,
            keep if self.keep is None else self.keep,
            below.per if self.per is None else self.per,
            self.off,
            below.in_llm if self.in_llm is None and is_same else self.in_llm,
            self.where,
            max_visual_tokens=below.max_visual_tokens if self.max_visual_tokens is None else self.max_visual_tokens,
        )


def _lacks_seed(name: str, options: Options) -> bool:
    return "seed" in get_option_types(method_class(name)) and "seed" not in options


def _replace_files_by_paths(options: Options) -> Options:
    """Return the options with the path in place of each file that was read, so that JSON and pickles stay small."""
    return {name: str(value) if isinstance(value, File) else value for name, value in options.items()}
