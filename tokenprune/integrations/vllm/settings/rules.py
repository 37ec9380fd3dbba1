# SPDX-License-Identifier: Apache-2.0
"""Rules for the requests of a server or of one profile: `min_keep`, `methods`, `rollout` and `on_error`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, shorten
from tokenprune.integrations.vllm.settings.configuration import check_key
from tokenprune.integrations.vllm.settings.items import settings_by_age
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.methods.registry import method_class
from tokenprune.settings import Setting

REFUSE, FULL = "refuse", "full"  # values of `on_error`
_MAX_METHODS = 32


class LimitError(OptionError):
    """The request exceeds a limit of the server."""

    reason = "limit"


@dataclass(frozen=True)
class Rules:
    """Rules of a server or of a profile.

    Limits of a profile apply in addition to the server's. `rollout` and `on_error` of a profile replace the server's.

    Args:
        whose: "this server" or "profile 'gold'", for messages.
        min_keep: Smallest share of visual tokens that a setting may keep. None: no limit.
        methods: Names of the allowed methods. None: all methods that can be served.
        rollout: Share of requests that are pruned. The other requests are served unpruned, and the tokens that their
            setting would have kept are counted. None: not set, which means all requests.
        on_error: `FULL` serves requests unpruned that fail under their setting. `REFUSE` or None answers with HTTP 400.
    """

    whose: str = "this server"
    min_keep: float | None = None
    methods: tuple[str, ...] | None = None
    rollout: float | None = None
    on_error: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any], whose: str = "this server") -> Rules:
        """Read the keys in `RULES` that are present; raise OptionError or UnknownMethodError."""
        return cls(
            whose,
            min_keep=_read_min_keep(value["min_keep"]) if "min_keep" in value else None,
            methods=_read_methods(value["methods"]) if "methods" in value else None,
            rollout=_read_rollout(value["rollout"]) if "rollout" in value else None,
            on_error=_read_on_error(value["on_error"]) if "on_error" in value else None,
        )

    def check(self, setting: Setting) -> None:
        """Raise LimitError if a setting exceeds `min_keep` or `methods`."""
        for name in setting.all_names:
            if self.methods is not None and name not in self.methods:
                raise LimitError(f"{KEY}: {self.whose} does not allow {name}; allowed are {', '.join(self.methods)}")
        if self.min_keep is None or setting.off:
            return
        for age, tier in settings_by_age(setting):
            of_age = "" if setting.budget.ages is None else f" of an image of age {age}"
            keep = tier.joint_keep
            if isinstance(keep, int):
                raise LimitError(
                    f"{KEY}: {self.whose} has min_keep={self.min_keep}, so keep{of_age} must be a share, "
                    f"not {keep} tokens"
                )
            share = tier.joint_share
            if share < self.min_keep * (1 - 1e-9):
                raise LimitError(f"{KEY}: keep={share:g}{of_age} is below min_keep={self.min_keep} of {self.whose}")

    def describe(self) -> str:
        """Describe the rules for the log. Empty if there are none."""
        texts = {
            "min_keep": None if self.min_keep is None else f"{self.min_keep:g}",
            "methods": None if self.methods is None else "+".join(self.methods),
            "rollout": None if self.rollout is None else f"{self.rollout:g}",
            "on_error": self.on_error,
        }
        return ", ".join(f"{key} {value}" for key, value in texts.items() if value is not None)


def _read_min_keep(value: Any) -> float:
    check_key(
        isinstance(value, float) and 0 < value <= 1, "min_keep", f"a share in (0, 1], such as 0.1, not {shorten(value)}"
    )
    return float(value)


def _read_methods(names: Any) -> tuple[str, ...]:
    is_list = isinstance(names, list) and 0 < len(names) <= _MAX_METHODS
    check_key(is_list, "methods", f"a list of methods, not {shorten(names)}")
    return tuple(method_class(name).name for name in names)


def _read_rollout(value: Any) -> float:
    is_share = isinstance(value, float) and 0 <= value <= 1
    check_key(is_share, "rollout", f"a share in [0.0, 1.0], such as 0.05, not {shorten(value)}")
    return float(value)


def _read_on_error(value: Any) -> str:
    check_key(value in (REFUSE, FULL), "on_error", f'"{REFUSE}" or "{FULL}", not {shorten(value)}')
    return str(value)
