# SPDX-License-Identifier: Apache-2.0
"""Sessions, which see images without end and hold a bounded number of visual tokens, and the policies that choose these
(docs/guides/chats.md). An add-on: nothing of a patch knows it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Where each public name lives; a policy is written, and tried, without what runs a model.
_HOMES = {
    "tokenprune.integrations.hf.sessions.api": ("Session", "session"),
    "tokenprune.integrations.hf.sessions.results": ("Answer", "HeldEntries", "SessionStats"),
    "tokenprune.integrations.hf.sessions.policies.base": ("Policy", "PolicyView"),
    "tokenprune.integrations.hf.sessions.policies.registry": ("available_policies", "policy", "register_policy"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from tokenprune.integrations.hf.sessions.api import Session, session
    from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
    from tokenprune.integrations.hf.sessions.policies.registry import available_policies, policy, register_policy
    from tokenprune.integrations.hf.sessions.results import Answer, HeldEntries, SessionStats


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tokenprune.integrations.hf.sessions' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


__all__ = [*_HOME_OF]
