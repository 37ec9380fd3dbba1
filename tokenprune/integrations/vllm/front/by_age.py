# SPDX-License-Identifier: Apache-2.0
"""Front end: settings by age, under which each image of a request has a setting of its own, by its place there.

An image at its age is to all caches what it would be under a setting that says the same of every image. So one that
ages is another image to them, and the others of its request stay what they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.setting.settings import KEY, ServedSetting

_INSTEAD = f'ask for a profile without age=, or switch it off for the request, {{"{KEY}": {{"off": true}}}}'
Key = dict[str, Any]


def check_videos(setting: ServedSetting, counts: Mapping[str, int]) -> None:
    """Raise OptionError for a request with videos, of which nothing tells where they stand among its images. counts:
    of its items, by modality."""
    if setting.age is not None and counts.get("video"):
        raise OptionError(f"age= counts the images of a request, and this one has videos: {_INSTEAD}")


def check_segments(setting: ServedSetting, segments: Iterable[int]) -> None:
    """Raise OptionError for a request in which an image has several budgets. segments: of each item, how many."""
    if setting.age is not None and any(count > 1 for count in segments):
        raise OptionError(
            "age= counts images, and an image of this request is cut into tiles or crops with a budget each: have the "
            f"processor make one of it, or {_INSTEAD}"
        )


def hashes(
    inputs: Any, key_of: Callable[[str, int], Key], hash_under: Callable[[Any, Key], Mapping[str, list[str]]]
) -> dict[str, list[str]]:
    """Return the hash of each item, by modality. Each is read once.

    inputs: vLLM's `ProcessorInputs`. key_of: the part of an item's cache key that its setting makes, by modality and
    index. hash_under: hashes all items of such inputs under one key.
    """
    items, uuids = inputs.mm_data_items, inputs.mm_uuid_items or {}
    groups: list[tuple[Key, dict[str, list[int]]]] = []
    for modality, of_modality in items.items():
        for index in range(len(of_modality)):
            key = key_of(modality, index)
            places = next((places for other, places in groups if other == key), None)
            if places is None:
                groups.append((key, places := {}))
            places.setdefault(modality, []).append(index)
    if len(groups) == 1:
        return dict(hash_under(inputs, groups[0][0]))
    found = {modality: [""] * len(of_modality) for modality, of_modality in items.items()}
    for key, places in groups:
        part = dataclasses.replace(
            inputs,
            mm_data_items=type(items)({name: _Some(items[name], indices) for name, indices in places.items()}),
            mm_uuid_items={
                name: [uuids[name][index] for index in indices] for name, indices in places.items() if name in uuids
            },
        )
        for name, values in hash_under(part, key).items():
            for index, value in zip(places[name], values, strict=True):
                found[name][index] = value
    return found


class _Some:
    """Some of the items of a modality, as far as hashes read them."""

    def __init__(self, items: Any, indices: list[int]) -> None:
        self._items, self._indices = items, indices

    def __len__(self) -> int:
        return len(self._indices)

    def get_all_items_for_hash(self) -> list[Any]:
        return [self._items.get_item_for_hash(index) for index in self._indices]
