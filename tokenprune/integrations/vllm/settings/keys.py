# SPDX-License-Identifier: Apache-2.0
"""Names of the keys in the vLLM plugin's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "tokenprune"
NO_SETTING: Mapping[str, Any] = {}  # value of `KEY` for a request that does not set it
FREE_KV = "experimental_free_kv"
RULES = ("min_keep", "methods", "rollout", "on_error")  # rules of a server or of one profile, see rules.py
GATEWAY_KEYS = ("profiles", *RULES, "callers", "overload", "reload")  # the server needs `gateway` if it sets one
SERVER_KEYS = (*GATEWAY_KEYS, "log", FREE_KV, "positions")  # keys that a request must not set
PROFILE = "profile"  # a request selects a profile of the server with this key
DEFAULT = "default"  # name of the profile with the server's own setting
REQUEST = "request"  # metrics label of requests with a setting
