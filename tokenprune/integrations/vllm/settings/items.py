# SPDX-License-Identifier: Apache-2.0
"""The setting of each item (image or video) of a request, and the token counts, cache key and labels of a setting.

Settings are normalized (`parse_setting`): they have at most one method that resizes images and one other method.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from tokenprune.budgets import by_age
from tokenprune.selection.method import Method
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.settings import Setting

# Part of every cache key. Increment it when the same setting starts to keep different tokens.
ALGORITHM_VERSION = 1
OFF = Setting(off=True)


def get_method(setting: Setting) -> Method:
    """Return the method of a setting that has one (besides a method that resizes images)."""
    assert setting.method is not None
    return setting.method


def count_kept(setting: Setting, num_tokens: int) -> int:
    """Return the number of an item's visual tokens in the prompt. The result is the same in every process."""
    return num_tokens if setting.keeps_all_tokens else count_requested(setting, num_tokens)


def count_requested(setting: Setting, num_tokens: int) -> int:
    """Return the number of an item's visual tokens that the method keeps, in the prompt or in the language model."""
    requested = by_age.count_kept(setting.budget.resolve_keep(num_tokens), setting.bounds)
    return min(num_tokens, max(1, get_method(setting).resolve_count(num_tokens, requested)))


def get_label(setting: Setting) -> tuple[str, str]:
    """Return the metrics labels: method names, and the kept share in hundredths, so that few values occur."""
    keep = setting.joint_keep
    return "+".join(setting.all_names) or "off", "tokens" if isinstance(keep, int) else f"{round(keep, 2):g}"


@lru_cache(maxsize=256)
def get_cache_key(setting: Setting) -> MappingProxyType[str, Any]:
    """Return the fields that distinguish an item under this setting in vLLM's caches."""
    bounds = {"bounds": list(setting.bounds)} if setting.bounds else {}
    return MappingProxyType({"algorithm": ALGORITHM_VERSION} | setting.to_json() | bounds | setting.digests)


# -- settings of items


def settings_of_items(setting: Setting, modality: str, count: int) -> tuple[Setting, ...]:
    """Return the setting of each of a request's `count` items of a modality, which does not depend on other items.

    Methods that compare the frames of a video do not act on images.
    """
    if modality == "image" and compares_frames(setting.method):
        return (_keep_pixel_method(setting),) * count
    tiers = setting.budget.ages
    if tiers is None:
        return (setting,) * count
    tiers_by_age = settings_by_age(setting)
    if modality != "image":
        return (tiers_by_age[0][1],) * count
    return tuple(
        next(aged for since, aged in reversed(tiers_by_age) if since <= age)
        for age in by_age.compute_ages(count, tiers.step)
    )


@lru_cache(maxsize=256)
def settings_by_age(setting: Setting) -> list[tuple[int, Setting]]:
    """Return pairs of an age and the setting of images from this age on, newest first."""
    tiers = setting.budget.ages
    return [(0, setting)] if tiers is None else [(age, _build_age_setting(setting, age)) for age, _ in tiers.tiers]


def _build_age_setting(setting: Setting, age: int) -> Setting:
    """Return the setting of an image of this age.

    A single bound becomes the keep if that means the same, so that the image shares caches with equal settings.
    """
    budget = replace(setting.budget, ages=None)
    assert setting.budget.ages is not None
    assert budget.keep is not None
    bounds = by_age.find_bounds(setting.budget.ages.tiers, age)
    if len(bounds) == 1 and budget.is_identity():
        budget, bounds = budget.from_number(bounds[0]), ()
    elif len(bounds) == 1 and isinstance(budget.keep, int) and isinstance(bounds[0], int):
        budget, bounds = budget.from_number(min(budget.keep, bounds[0])), ()
    keep = budget.to_json()
    keeps = [*setting.keep[:-1], keep] if isinstance(setting.keep, list) else keep
    return replace(setting, keep=keeps, bounds=bounds)


@lru_cache(maxsize=256)
def _keep_pixel_method(setting: Setting) -> Setting:
    """Return the setting with only its method that resizes images, or `OFF`."""
    if setting.pixel_method is None:
        return OFF
    if setting.max_visual_tokens is not None:
        return replace(setting, names=(), options=(), keep=None, bounds=())
    keep = setting.keep[0] if isinstance(setting.keep, list) else setting.keep
    return replace(setting, names=setting.names[:1], options=setting.options[:1], keep=keep, bounds=())
