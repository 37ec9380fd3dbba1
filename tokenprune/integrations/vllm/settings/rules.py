# SPDX-License-Identifier: Apache-2.0
"""Rules of an operator's for the requests of a server, or of one of its profiles: limits of the setting (`min_keep`,
`methods`), the share that it acts on (`rollout`), and what is done where it fails (`on_error`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.errors import OptionError, short
from tokenprune.integrations.vllm.settings.configuration import check_key
from tokenprune.integrations.vllm.settings.items import settings_by_age
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.methods.registry import method_class
from tokenprune.settings import Setting

REFUSE, FULL = "refuse", "full"  # values of `on_error`
_MOST = 32  # methods


class LimitError(OptionError):
    """A request asks for more than the server allows."""

    reason = "limit"


@dataclass(frozen=True)
class Rules:
    """The rules of a server, or of a profile. A profile's limits hold beside the server's: the narrower one binds. Its
    rollout and on_error hold in place of the server's.

    whose:    "this server" or "profile 'gold'", for errors.
    min_keep: the least share of visual tokens that a setting may keep; None: any.
    methods:  names of those that a setting may use; None: any that can be served.
    rollout:  the share of requests that are reduced; the others are served in full, and what their setting would have
              kept is counted. None: nothing is said, which means all.
    on_error: `FULL` to serve a request in full that cannot be served under its setting; `REFUSE`, and None, to answer
              it with HTTP 400.
    """

    whose: str = "this server"
    min_keep: float | None = None
    methods: tuple[str, ...] | None = None
    rollout: float | None = None
    on_error: str | None = None

    @classmethod
    def from_json(cls, given: Mapping[str, Any], whose: str = "this server") -> Rules:
        """Read those of the keys `RULES` that are given. Raises OptionError or UnknownMethodError."""
        return cls(
            whose,
            min_keep=_min_keep(given["min_keep"]) if "min_keep" in given else None,
            methods=_methods(given["methods"]) if "methods" in given else None,
            rollout=_rollout(given["rollout"]) if "rollout" in given else None,
            on_error=_on_error(given["on_error"]) if "on_error" in given else None,
        )

    def check(self, setting: Setting) -> None:
        """Raise LimitError for a setting beyond `min_keep` and `methods`."""
        for name in setting.names:
            if self.methods is not None and name not in self.methods:
                raise LimitError(f"{KEY}: {self.whose} does not allow {name}; allowed are {', '.join(self.methods)}")
        if self.min_keep is None or setting.off:
            return
        for age, tier in settings_by_age(setting):
            of_age = "" if setting.budget.ages is None else f" of an image of age {age}"
            keep = tier.joint_keep
            if isinstance(keep, int):
                raise LimitError(
                    f"{KEY}: the limit of {self.whose} is a share, min_keep={self.min_keep}, so keep{of_age} must be a "
                    f"share too, not {keep} tokens"
                )
            share = tier.joint_share
            if share < self.min_keep * (1 - 1e-9):
                raise LimitError(
                    f"{KEY}: keep={share:g}{of_age} is less than {self.whose} allows: min_keep is {self.min_keep}"
                )

    def describe(self) -> str:
        """Return the rules in words for the line of the log; empty if there are none."""
        said = {
            "min_keep": None if self.min_keep is None else f"{self.min_keep:g}",
            "methods": None if self.methods is None else "+".join(self.methods),
            "rollout": None if self.rollout is None else f"{self.rollout:g}",
            "on_error": self.on_error,
        }
        return ", ".join(f"{key} {value}" for key, value in said.items() if value is not None)


def _min_keep(value: Any) -> float:
    check_key(isinstance(value, float) and 0 < value <= 1, "min_keep", f"a share in (0, 1], as 0.1, not {short(value)}")
    return float(value)


def _methods(names: Any) -> tuple[str, ...]:
    known = isinstance(names, list) and 0 < len(names) <= _MOST
    check_key(known, "methods", f"a list of methods, not {short(names)}")
    return tuple(method_class(name).name for name in names)


def _rollout(value: Any) -> float:
    known = isinstance(value, float) and 0 <= value <= 1
    check_key(known, "rollout", f"a share in [0.0, 1.0], as 0.05; 0.0 reduces nothing and counts; not {short(value)}")
    return float(value)


def _on_error(value: Any) -> str:
    check_key(value in (REFUSE, FULL), "on_error", f'"{REFUSE}" or "{FULL}", not {short(value)}')
    return str(value)
