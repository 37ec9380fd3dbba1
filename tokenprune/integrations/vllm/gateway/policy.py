# SPDX-License-Identifier: Apache-2.0
"""The policy of servers whose requests select profiles (see settings/server_config.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.integrations.vllm.frontend import metrics
from tokenprune.integrations.vllm.frontend.items import CountedDetails
from tokenprune.integrations.vllm.frontend.request import RequestPolicy, RequestRun
from tokenprune.integrations.vllm.frontend.served import BY_KEY, CALLER, LOAD, RequestRecord, ServedRequest
from tokenprune.integrations.vllm.gateway.answers import list_attached
from tokenprune.integrations.vllm.gateway.choice import KEPT, SHADOWS, Choice, HeldBack, check_age
from tokenprune.integrations.vllm.settings.configuration import check_request_setting
from tokenprune.integrations.vllm.settings.items import get_label, settings_by_age
from tokenprune.integrations.vllm.settings.keys import DEFAULT, PROFILE
from tokenprune.integrations.vllm.settings.server_config import (
    find_server_config,
    get_profile_settings,
    get_server_config,
)


@dataclass(frozen=True)
class ServePolicy(RequestPolicy):
    """The policy of a server with keys of the gateway."""

    def _resolve(self, requested: Any, counts: Mapping[str, int], served: RequestRecord) -> ServedRequest:
        if isinstance(requested, Choice):
            return requested.resolve(counts)
        # The request came from `LLM(...)` in Python, or from an endpoint that supports only the key.
        server = find_server_config(
            self.model_config, lambda _: requested.get(PROFILE) if isinstance(requested, Mapping) else None
        )
        setting = check_request_setting(server.setting(requested), self.model_config)
        served.by = BY_KEY if requested else DEFAULT
        return Choice(requested, server, setting, served).resolve(counts)

    def _process(self, request: ServedRequest, run: RequestRun) -> tuple[Any, list[CountedDetails]]:
        check_age(request.setting, run.counts)
        result, items = super()._process(request, run)
        check_age(request.setting, run.counts, (item.segments for item in items))
        return result, items

    def observe(self, request: ServedRequest, run: RequestRun, items: list[CountedDetails]) -> None:
        served, setting = request.served, request.setting
        if setting.budget.ages is not None:
            (_, newest), *_ = settings_by_age(setting)
            served.aged = sum(item != newest for item in request.items.get("image", ()))
        if isinstance(request, HeldBack):
            outcome = request.outcome(run, items)
            metrics.add(self.model_config, "shadow_requests", served.profile, outcome)
            if outcome == KEPT:
                served.shadow = sum(item.more.tokens for item in items)
                for item in items:
                    metrics.add_tokens(
                        self.model_config, "shadow_tokens", item.more.label, item.before, item.more.tokens
                    )
        super().observe(request, run, items)

    def collect_facts(self) -> dict[str, list[str]]:
        server = get_server_config(self.model_config)
        policy = server.describe_rules()
        return {"profiles": server.names, "policy": [policy] if policy else [], "hooks": list_attached()}

    def start_at_zero(self) -> None:
        super().start_at_zero()
        server = get_server_config(self.model_config)
        under_load = () if server.overload is None else server.overload.profiles
        by_caller = set() if server.callers is None else server.callers.default_profiles - {DEFAULT}
        for profile, by in (*((name, LOAD) for name in under_load), *((name, CALLER) for name in by_caller)):
            metrics.add(self.model_config, "requests", profile, by, count=0)
        for profile, setting in get_profile_settings(self.model_config).items():
            if server.rollout(profile) == 1 or setting.off:
                continue
            for outcome in SHADOWS:
                metrics.add(self.model_config, "shadow_requests", profile, outcome, count=0)
            for label in {get_label(tier) for _, tier in settings_by_age(setting)}:
                metrics.add_tokens(self.model_config, "shadow_tokens", label)
