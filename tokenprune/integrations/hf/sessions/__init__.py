# SPDX-License-Identifier: Apache-2.0
"""Sessions: endless streams of images in a bounded visual memory, and the policies that prune it.

See docs/guides/chats.md. Patches do not depend on this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Modules of the public names. They are imported on demand, so that a policy can be tested without the model code.
_MODULES = {
    "tokenprune.integrations.hf.sessions.api": ("Session", "session"),
    "tokenprune.integrations.hf.sessions.results": ("Answer", "HeldEntries", "SessionStats"),
    "tokenprune.integrations.hf.sessions.policies.base": ("Policy", "PolicyView"),
    "tokenprune.integrations.hf.sessions.policies.registry": ("available_policies", "policy", "register_policy"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from tokenprune.integrations.hf.sessions.api import Session, session
    from tokenprune.integrations.hf.sessions.policies.base import Policy, PolicyView
    from tokenprune.integrations.hf.sessions.policies.registry import available_policies, policy, register_policy
    from tokenprune.integrations.hf.sessions.results import Answer, HeldEntries, SessionStats


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tokenprune.integrations.hf.sessions' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])


__all__ = [*_MODULE_OF]
