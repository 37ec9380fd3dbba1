# SPDX-License-Identifier: Apache-2.0
"""A line in vLLM's log when an engine starts, and `tokenprune:info` at /metrics: that the plugin is on, and as what."""

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
    """Return the labels of `tokenprune:info` but the model's name. "none" stands for a setting, profiles or
    rules that the server does not have."""
    model_config, setting = vllm_config.model_config, NONE
    said: dict[str, list[str]] = {"profiles": [], "policy": [], "hooks": []}
    kinds = ["setting"]  # to look for the others imports vLLM's endpoints
    if (server := get_server_setting(model_config)) is not None:
        kinds, said = ["setting", "profiles", "cache"], get_policy(model_config).collect_facts()
        served = parse_setting(server)
        method, keep = get_label(served)
        share = f"{served.joint_keep} tokens" if keep == "tokens" else keep
        where = " in the language model" if served.in_llm else "" if served.budget.ages is None else BY_AGE
        setting = "off" if served.off else f"{method} {share}{where}"
    hold = [kind for kind in kinds if not compat.missing_hooks(kind)]
    return {
        "version": sys.modules["tokenprune"].__version__,  # an import of it would close a circle
        "setting": setting,
        "profiles": ",".join(said["profiles"]) or NONE,
        "policy": "; ".join(said["policy"]) or NONE,
        "vllm": compat.vllm_version(),
        "runner": "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1",
        "hooks": ",".join(hold + said["hooks"]) or NONE,
    }


def announce(engine: Any) -> None:
    """Say what an engine of vLLM's starts with, and make its counters."""
    model_config = engine.vllm_config.model_config
    found = collect_facts(engine.vllm_config)
    metrics.set_info(model_config, found)
    if get_server_setting(model_config) is not None:
        get_policy(model_config).start_at_zero()
    logger.info("%s", format_line(found))


def format_line(found: Mapping[str, str]) -> str:
    """Return the format_line of the log about these collect_facts."""
    state = f"on: {found['setting']}, profiles: {found['profiles'].replace(',', ', ')}, policy: {found['policy']}"
    if found["setting"] == NONE:
        state = f"loaded, and no setting turns it on (--mm-processor-kwargs '{{\"{KEY}\": ...}}'): nothing is reduced"
    tested = "tested" if found["vllm"] == compat.TESTED else f"tested with {compat.TESTED}"
    return (
        f"tokenprune {found['version']} is {state}; vLLM {found['vllm']} ({tested}), model runner {found['runner']}; "
        f"hooks that hold: {found['hooks'].replace(',', ', ')}"
    )
