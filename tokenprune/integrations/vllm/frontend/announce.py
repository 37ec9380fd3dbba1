# SPDX-License-Identifier: Apache-2.0
"""The log line at the start of an engine, and the metric `tokenprune:info`: the plugin's state and setting."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from tokenprune.integrations.vllm import compat
from tokenprune.integrations.vllm.frontend import metrics
from tokenprune.integrations.vllm.frontend.request import get_policy
from tokenprune.integrations.vllm.log import SERVER
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.items import get_label
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.parse import parse_setting

logger = logging.getLogger(SERVER)
NONE = "none"
BY_AGE = " by age"


def collect_facts(vllm_config: Any) -> dict[str, str]:
    """Return the labels of `tokenprune:info` except the model's name. "none" marks missing settings and profiles."""
    model_config, setting = vllm_config.model_config, NONE
    parts: dict[str, list[str]] = {"profiles": [], "policy": [], "hooks": []}
    kinds = ["setting"]  # checking other kinds would import vLLM's endpoints
    if (server := get_server_setting(model_config)) is not None:
        kinds, parts = ["setting", "profiles", "cache"], get_policy(model_config).collect_facts()
        served = parse_setting(server)
        method, keep = get_label(served)
        share = f"{served.joint_keep} tokens" if keep == "tokens" else keep
        where = " in the language model" if served.in_llm else "" if served.budget.ages is None else BY_AGE
        setting = "off" if served.off else f"{method} {share}{where}"
    available = [kind for kind in kinds if not compat.missing_hooks(kind)]
    return {
        "version": sys.modules["tokenprune"].__version__,  # an import would be circular
        "setting": setting,
        "profiles": ",".join(parts["profiles"]) or NONE,
        "policy": "; ".join(parts["policy"]) or NONE,
        "vllm": compat.vllm_version(),
        "runner": "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1",
        "hooks": ",".join(available + parts["hooks"]) or NONE,
    }


def announce(engine: Any) -> None:
    """Log the plugin's state for an engine that starts, and create its counters."""
    model_config = engine.vllm_config.model_config
    facts = collect_facts(engine.vllm_config)
    metrics.set_info(model_config, facts)
    if get_server_setting(model_config) is not None:
        get_policy(model_config).start_at_zero()
    logger.info("%s", format_line(facts))


def format_line(facts: Mapping[str, str]) -> str:
    """Format the facts as a log line."""
    state = f"on: {facts['setting']}, profiles: {facts['profiles'].replace(',', ', ')}, policy: {facts['policy']}"
    if facts["setting"] == NONE:
        state = f"loaded without a setting (--mm-processor-kwargs '{{\"{KEY}\": ...}}'): no tokens are pruned"
    tested = "tested" if facts["vllm"] == compat.TESTED else f"tested with {compat.TESTED}"
    return (
        f"tokenprune {facts['version']} is {state}; vLLM {facts['vllm']} ({tested}), model runner {facts['runner']}; "
        f"hooks: {facts['hooks'].replace(',', ', ')}"
    )
