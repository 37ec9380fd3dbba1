# SPDX-License-Identifier: Apache-2.0
"""Sessions, which see images without end and hold a bounded number of visual tokens, and the policies that choose these
(docs/sessions.md)."""

from __future__ import annotations

from tokenprune.policies.base import Policy, PolicyView
from tokenprune.policies.registry import available_policies, policy, register_policy
from tokenprune.workflows.session import Session, session
from tokenprune.workflows.session_results import Answer, HeldEntries, SessionStats

__all__ = [
    "Answer",
    "HeldEntries",
    "Policy",
    "PolicyView",
    "Session",
    "SessionStats",
    "available_policies",
    "policy",
    "register_policy",
    "session",
]
