# SPDX-License-Identifier: Apache-2.0
"""The seam's other side: requests that are served by what the server offers (see offer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenprune.integrations.vllm.frontend import metrics
from tokenprune.integrations.vllm.frontend.items import CountedDetails
from tokenprune.integrations.vllm.frontend.request import RequestPolicy, RequestRun
from tokenprune.integrations.vllm.frontend.served import BY_KEY, CALLER, LOAD, Served, ServedRequest
from tokenprune.integrations.vllm.gateway.answers import attached
from tokenprune.integrations.vllm.gateway.choice import KEPT, SHADOWS, Choice, HeldBack, check_age
from tokenprune.integrations.vllm.settings.configuration import checked, settings_of
from tokenprune.integrations.vllm.settings.offer import offer_of, offered
from tokenprune.integrations.vllm.settings.servable import DEFAULT, PROFILE


@dataclass(frozen=True)
class ServePolicy(RequestPolicy):
    """The policy of a server whose requests choose among what it offers."""

    def _resolve(self, asked: Any, counts: Mapping[str, int], served: Served) -> ServedRequest:
        if isinstance(asked, Choice):
            return asked.resolve(counts)
        # It came from `LLM(...)` in Python, or by an endpoint that knows the key alone.
        offer = offer_of(self.model_config, lambda _: asked.get(PROFILE) if isinstance(asked, Mapping) else None)
        setting = checked(offer.setting(asked), self.model_config)
        served.by = BY_KEY if asked else DEFAULT
        return Choice(asked, offer, setting, served).resolve(counts)

    def _process(self, request: ServedRequest, run: RequestRun) -> tuple[Any, list[CountedDetails]]:
        check_age(request.setting, run.counts)
        made, items = super()._process(request, run)
        check_age(request.setting, run.counts, (one.segments for one in items))
        return made, items

    def observe(self, request: ServedRequest, run: RequestRun, items: list[CountedDetails]) -> None:
        served, setting = request.served, request.setting
        if setting.ages is not None:
            served.aged = sum(one != setting.tiers[0] for one in request.items.get("image", ()))
        if isinstance(request, HeldBack):
            outcome = request.outcome(run, items)
            metrics.add(self.model_config, "shadow_requests", served.profile, outcome)
            if outcome == KEPT:
                served.shadow = sum(one.more.tokens for one in items)
                for one in items:
                    metrics.add_tokens(self.model_config, "shadow_tokens", one.more.label, one.before, one.more.tokens)
        super().observe(request, run, items)

    def facts(self) -> dict[str, list[str]]:
        offer = offered(self.model_config)
        policy = offer.policy()
        return {"profiles": offer.names, "policy": [policy] if policy else [], "hooks": attached()}

    def start_at_zero(self) -> None:
        super().start_at_zero()
        offer = offered(self.model_config)
        under_load = () if offer.overload is None else offer.overload.profiles
        own = set() if offer.callers is None else offer.callers.own - {DEFAULT}
        for profile, by in (*((one, LOAD) for one in under_load), *((one, CALLER) for one in own)):
            metrics.add(self.model_config, "requests", profile, by, count=0)
        for profile, setting in settings_of(self.model_config).items():
            if offer.rollout(profile) == 1 or setting.is_off:
                continue
            for outcome in SHADOWS:
                metrics.add(self.model_config, "shadow_requests", profile, outcome, count=0)
            for label in {tier.label() for tier in setting.tiers}:
                metrics.add_tokens(self.model_config, "shadow_tokens", label)
