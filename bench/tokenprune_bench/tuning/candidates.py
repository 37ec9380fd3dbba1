# SPDX-License-Identifier: Apache-2.0
"""The settings that are tried: methods and keeps, each with a seed if it draws at random."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.base import ImageChooser, Method, Site
from tokenprune.budget import Budget
from tokenprune.config import Config
from tokenprune.errors import OptionError
from tokenprune.registry import available_methods
from tokenprune.spelling import setting_of
from tokenprune.view.registry import compares_frames

KEEPS = (0.75, 0.5, 0.33, 0.25, 0.15)
SEED = 0  # of methods that draw at random: what is promised holds for the draw that was tested


@dataclass(frozen=True)
class Candidate:
    """A setting, as JSON so that it can be a key; `Candidate.of` makes one."""

    json: str

    @classmethod
    def of(cls, setting: Mapping[str, Any]) -> Candidate:
        """Return the candidate of a setting; raise what `Config.steps` raises for a setting that cannot be built."""
        Config(dict(setting)).steps()
        return cls(json.dumps(setting))

    @property
    def setting(self) -> dict[str, Any]:
        return json.loads(self.json)

    @property
    def steps(self) -> tuple[list[Method], list[Budget]]:
        """The methods with their budgets."""
        return Config(self.setting).steps()

    @property
    def methods(self) -> list[Method]:
        return self.steps[0]

    @property
    def name(self) -> str:
        return "+".join(method.name for method in self.methods)

    @property
    def keep(self) -> str:
        keeps = self.setting.get("keep", "")
        return ", ".join(f"{keep:g}" for keep in (keeps if isinstance(keeps, list) else [keeps]))

    def __str__(self) -> str:
        return f"{self.name} {self.keep}"

    def unfit(self, videos: bool) -> str | None:
        """Return why it cannot act on such questions. videos: whether any is about a video."""
        for method in self.methods:
            if isinstance(method, ImageChooser):
                return f"{method.name} chooses between the images of a prompt: it has no budget to tune"
            if (method.site is Site.ATTENTION or compares_frames(method)) and not videos:
                return f"{method.name} acts on videos, and these questions are about images only"
        return None


def grid(methods: Iterable[str] = (), keeps: Sequence[float | int] = KEEPS) -> list[Candidate]:
    """Return a candidate for each method, or stack, and keep; no methods: all that are registered."""
    if not keeps:
        raise OptionError("the tuner needs at least one keep")
    made = []
    for name in tuple(methods) or available_methods():
        made += [Candidate.of(setting_of(name, keep, seed=SEED)) for keep in keeps]
    return list(dict.fromkeys(made))


__all__ = ["KEEPS", "Candidate", "grid"]
