# SPDX-License-Identifier: Apache-2.0
"""A setting that vLLM serves an item with: one whose methods are known to be servable, apart by where they act."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.budgets.by_age import Ages, compute_ages, count_kept, find_bounds
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, shorten
from tokenprune.integrations.vllm.settings.servable import KEY, check_method, servable
from tokenprune.selection.files import File
from tokenprune.selection.method import Method, Site
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites import check_sites
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.settings import IN_LLM, Setting
from tokenprune.settings.budget_checks import check_scope
from tokenprune.settings.json_values import to_plain_json

__all__ = ["IN_LLM", "KEY", "ServedSetting", "check_method", "check_override", "servable"]

# Part of every cache key. Raise it whenever the same setting begins to keep other tokens.
ALGORITHM = 1
_LONGEST = 2048  # characters of a setting as JSON
Files = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class ServedSetting:
    """The reduction of an item: a whole `Setting` that vLLM can serve, its methods built and apart by their places.

    An item is reduced at two places, by numbers that are known before the model runs, and is cached under all that its
    methods would do: so nothing here is left to a default, and two that reduce alike are equal.

    method, keep:  acts on the features of the encoder, in the encoder, or (`in_llm`) in the language model; None if all
                   tokens stay.
    pixels, share: acts on an image before the encoder (see front/pixels.py); None if images stay as they are.
    per:           "image", or "frame" if every frame of a video has `keep` for itself (see `Budget`).
    in_llm:        True if `method` acts inside the language model, and leaves the prompt as it is.
    files:         options of `method` that were given as files: name, path and digest of the content.
    ages:          see `Budget`: what `method` keeps of an image depends on its position in the request, see `of_items`.
    bounds:        of an image that is no longer new, within which `keep` is (see `tokenprune.budgets.by_age.reached`).
    """

    method: Method | None = None
    keep: float | int = 1.0
    pixels: Method | None = None
    share: float = 1.0
    per: str = "image"
    in_llm: bool = False
    files: Files = ()
    ages: Ages | None = None
    bounds: tuple[float | int, ...] = ()

    @classmethod
    def from_json(cls, *layers: Any, trusted: bool = True) -> ServedSetting:
        """Merge settings as users write them, the later over the earlier, and check the result.

        A layer that names other methods drops the options of the one before. trusted: False if the last layer comes
        from a request, which must not name a file: an option that is one is refused, wherever it stands, whatever it
        holds, and before anything is opened. Raises OptionError, UnknownMethodError or BudgetError, which are
        ValueErrors: a server answers them with HTTP 400.
        """
        return _parsed(tuple(_text(layer) for layer in layers), trusted)

    @property
    def acting(self) -> Method:
        """The `method` of a setting that has one."""
        assert self.method is not None
        return self.method

    @property
    def is_off(self) -> bool:
        """True for `{"off": true}`."""
        return self.method is None and self.pixels is None

    @cached_property
    def removes_nothing(self) -> bool:
        """True if every feature of the encoder stays in the prompt."""
        whole = Budget.from_number(self.keep).is_identity() and not self.bounds and self.ages is None
        return self.method is None or self.in_llm or whole

    def without_method(self) -> ServedSetting:
        """Return what is left of the setting where `method` does not act."""
        return dataclasses.replace(self, method=None, keep=1.0, files=(), ages=None, bounds=())

    def of_items(self, modality: str, count: int) -> tuple[ServedSetting, ...]:
        """Return what the setting is to each of a request's items of a modality, which no longer depends on others:
        images stay as they are where frames are compared."""
        if modality == "image" and compares_frames(self.method):
            return (self.without_method(),) * count
        if modality != "image" or self.ages is None:
            return (self.tiers[0],) * count
        return tuple(map(self._at, compute_ages(count, self.ages.step)))

    @property
    def tiers(self) -> list[ServedSetting]:
        """The settings that an image can have by its age, the newest first."""
        return [self] if self.ages is None else [self._at(age) for age, _ in self.ages.tiers]

    def _at(self, age: int) -> ServedSetting:
        """Return the setting of an image of this age; without bounds where a `keep` says the same, so that it shares
        caches with a setting that was written so."""
        assert self.ages is not None
        bounds = find_bounds(self.ages.tiers, age)
        new = dataclasses.replace(self, ages=None)
        if len(bounds) == 1 and Budget.from_number(self.keep).is_identity():
            return dataclasses.replace(new, keep=bounds[0])
        if len(bounds) == 1 and isinstance(self.keep, int) and isinstance(bounds[0], int):
            return dataclasses.replace(new, keep=min(self.keep, bounds[0]))
        return dataclasses.replace(new, bounds=bounds)

    def to_json(self) -> dict[str, Any]:
        """Return the setting with nothing left implicit but `bounds`; `ServedSetting.from_json` reads it."""
        share, keep = Budget.from_number(self.share), Budget.from_number(self.keep)
        budgets = [(self.pixels, share, ()), (self.method, dataclasses.replace(keep, ages=self.ages), self.files)]
        methods = [(method, files) for method, _, files in budgets if method is not None]
        keeps = [budget.to_json() for method, budget, _ in budgets if method is not None]
        if not methods:
            return {"off": True}
        per = None if self.per == "image" else self.per
        names, options = tuple(method.name for method, _ in methods), tuple(_options(*one) for one in methods)
        return Setting(names, options, keeps if keeps[1:] else keeps[0], per, in_llm=self.in_llm or None).to_json()

    def label(self) -> tuple[str, str]:
        """Return its labels in metrics: the methods, and the kept share in hundredths, a bounded number of values."""
        used = "+".join(step.name for step in (self.pixels, self.method) if step is not None)
        share = "tokens" if isinstance(self.whole_keep, int) else f"{round(self.whole_keep, 2):g}"
        return used or "off", share

    @cached_property
    def whole_keep(self) -> float | int:
        """The share, or the number of tokens, that both methods together keep of an image; of a new one, by age."""
        numbers = [one for one in (self.keep, *self.bounds) if isinstance(one, int)]
        if isinstance(self.keep, int):
            return count_kept(self.keep, self.bounds)
        return min(numbers) if numbers else round(math.prod((self.share, self.keep, *self.bounds)), 4)

    def cache_key(self) -> dict[str, Any]:
        """Return the entries by which a cache key tells this setting of an image from others."""
        bounds = {"bounds": list(self.bounds)} if self.bounds else {}
        return {"algorithm": ALGORITHM} | self.to_json() | bounds | {name: digest for name, _, digest in self.files}

    def count(self, tokens: int) -> int:
        """Return how many of `tokens` features of the encoder stay in the prompt: a function of integers, the same in
        every process."""
        return tokens if self.removes_nothing else self.wanted(tokens)

    def wanted(self, tokens: int) -> int:
        """Return how many of `tokens` visual tokens the method has to keep."""
        wanted = count_kept(Budget.from_number(self.keep).resolve_keep(tokens), self.bounds)
        return min(tokens, max(1, self.acting.resolve_count(tokens, wanted)))


def of_request(server: Mapping[str, Any], asked: Mapping[str, Any]) -> ServedSetting:
    """Return what a request makes of a whole setting. Raises as `ServedSetting.from_json` and `check_override`."""
    if not asked:
        return ServedSetting.from_json(server)
    setting = ServedSetting.from_json(server, asked, trusted=False)
    check_override(ServedSetting.from_json(server), setting)
    return setting


def check_override(server: ServedSetting, request: ServedSetting) -> None:
    """Raise OptionError if a request asks for another reduction than its server, and one of them is inside the language
    model: its layers are prepared for one."""
    if (server.in_llm or request.in_llm) and not request.is_off and request != server:
        raise OptionError(
            f"{IN_LLM} is a matter of the whole server, set when it starts: a request can only switch the reduction "
            'off, with {"off": true}'
        )


def _text(layer: Any) -> str:
    """Return a layer as JSON; raises OptionError or BudgetError for what is no layer at all."""
    if not isinstance(layer, Mapping):
        raise OptionError(
            f'{KEY} must be an object like {{"method": "divprune", "keep": 0.25}} or {{"off": true}}, '
            f"not {shorten(layer)}"
        )
    if "config" in layer:  # a server's own was read before
        raise OptionError(f"{KEY}: config names a file of the server: it belongs to its setting, not to a request")
    text = json.dumps(to_plain_json(layer, KEY))
    if len(text) > _LONGEST:
        raise OptionError(f"{KEY} is {len(text)} characters long; at most {_LONGEST} are read")
    return text


# Each request is parsed several times, and many are alike. Exceptions are not cached, and no lock is held.
@lru_cache(maxsize=256)
def _parsed(layers: tuple[str, ...], trusted: bool) -> ServedSetting:
    merged: Setting | None = None
    for number, text in enumerate(layers, start=1):
        layer = Setting.from_json(json.loads(text), KEY).resolve(merged)
        if number == len(layers) and not trusted:
            layer = layer.without_files()
        merged = layer.merge_onto(merged)
    return ServedSetting() if merged is None or merged.off else _checked(merged.with_files(_file))


# A server reads each of its own files once, so its setting means the same as long as it runs.
_file = lru_cache(maxsize=64)(File.read)


def _checked(whole: Setting) -> ServedSetting:
    """Return what serves a whole setting; raises OptionError or BudgetError if vLLM cannot serve it."""
    per, in_llm, count = whole.per or "image", bool(whole.in_llm), len(whole.names)
    if per not in ("image", "frame"):
        raise OptionError(f'{KEY}: per must be "image" or "frame", not {shorten(per)}')
    if in_llm and count > 1:
        raise OptionError(f"{KEY}: {IN_LLM} goes with one method, not with {count}")
    methods = whole.methods
    for one in whole.keep if isinstance(whole.keep, list) else [whole.keep]:
        if isinstance(one, dict) and set(one) - {"age", "step"} not in ({"keep"}, {"tokens"}):
            raise _no_number(one)
    steps = [_step(*one, in_llm) for one in zip(methods, whole.budgets, whole.options, strict=True)]
    check_sites(methods)
    pixels = [step for step in steps if step[0].site is Site.PRE_ENCODER]
    others = [step for step in steps if step[0].site is not Site.PRE_ENCODER]
    if len(others) > 1:
        raise OptionError(f"{KEY}: one method can act after an image's pixels, not {len(others)}: leave one out")
    nothing: tuple[Method | None, Budget, Files] = (None, Budget(keep=1.0), ())
    method, budget, files = others[0] if others else nothing
    shrinker, smaller, _ = pixels[0] if pixels else nothing
    if per == "frame" and method is not None and method.site is not Site.PRE_LLM:
        raise OptionError(f'{KEY}: per="frame" goes with methods that act on the features, not with {method.name}')
    if per == "frame" and method is not None and compares_frames(method):
        raise BudgetError(
            f"{KEY}: {method.name} compares the frames of a video, so the whole video has one budget: leave out "
            'per="frame"'
        )
    if budget.ages is not None and method is not None and compares_frames(method):
        raise BudgetError(f"{KEY}: {method.name} leaves images whole, whose ages age= is about: leave it out")
    keep, share = (one.keep for one in (budget, smaller))
    assert keep is not None and share is not None  # see `_step`
    return ServedSetting(method, keep, shrinker, share, per, in_llm, files, budget.ages)


def _no_number(keep: Any) -> BudgetError:
    return BudgetError(
        f"{KEY}: the prompt is written before the model runs, so keep must be a number, 4 for four tokens or 0.25 for "
        f"a share, alone or with age and step, not {shorten(keep)}"
    )


def _step(method: Method, budget: Budget, options: Mapping[str, Any], in_llm: bool) -> tuple[Method, Budget, Files]:
    """Return one of the methods of a setting, its budget and its files (see `ServedSetting`), checked."""
    keep = budget.keep
    if keep is None:
        raise _no_number(budget)
    check_scope(method, budget)
    try:
        check_method(method, in_llm)
    except TokenPruneError:
        raise
    except Exception as error:  # when it was tried
        raise OptionError(f"{KEY}: {method.name} fails with these options: {error}") from error
    if method.site is Site.PRE_ENCODER:
        if isinstance(keep, int):
            raise BudgetError(f"{method.name} takes keep as a share (a float), not {keep}")
        assert isinstance(method, ResizeMethod)  # `check_method` refuses others
        method.check_keep(keep)
    read = {name: value for name, value in options.items() if isinstance(value, File)}
    return method, budget, tuple((name, str(file), file.digest) for name, file in read.items())


def _options(method: Method, files: Files) -> dict[str, Any]:
    """Return all options of a method, with the names of its files."""
    options = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return options | {name: path for name, path, _ in files}
