# SPDX-License-Identifier: Apache-2.0
"""Requests that are served unpruned by a rollout or after a failure.

tests/vllm/test_rollout_counts.py and tests/vllm/test_on_error.py test the counters.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.vllm.test_offer import offer
from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.frontend.served import RequestRecord
from tokenprune.integrations.vllm.gateway.choice import Choice, HeldBack, draw_lot
from tokenprune.integrations.vllm.settings.items import OFF
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import ServerConfig

PROFILES = {"fast": {"keep": 0.11}, "new": {"keep": 0.5, "rollout": 0.5}, "ocr": {"off": True}}


def is_unpruned(config: ServerConfig, lot: float, body: Any = None) -> bool:
    request = Choice(body or {}, config, config.setting(body or {}), RequestRecord(), lot).resolve({"image": 2})
    assert isinstance(request, HeldBack) == (request.full == "rollout")
    if isinstance(request, HeldBack):
        assert request.shadow.setting == config.setting(body or {}) and request.setting.off
    return request.full is not None


def test_a_share_of_requests_is_reduced() -> None:
    config = offer(profiles=PROFILES, rollout=0.05)
    assert [is_unpruned(config, lot) for lot in (0.0, 0.0499, 0.05, 0.99)] == [False, False, True, True]
    assert [is_unpruned(config, 0.3, {"profile": name}) for name in ("fast", "new", "ocr")] == [True, False, False]
    assert (
        is_unpruned(config, 0.5, {"profile": "new"})
        and is_unpruned(config, 0.5, {"keep": 0.5})
        and not is_unpruned(config, 0.5, {"off": True})
    )
    assert not is_unpruned(offer(profiles=PROFILES), 0.999) and is_unpruned(
        offer(profiles=PROFILES), 0.5, {"profile": "new"}
    )
    assert is_unpruned(offer(rollout=0.0), 0.0) and not is_unpruned(offer(rollout=1.0), 1 - 2**-48)


def test_the_lot_follows_from_the_id() -> None:
    assert draw_lot("chatcmpl-1") == draw_lot("chatcmpl-1") != draw_lot("chatcmpl-2")
    assert draw_lot("mine.1") == pytest.approx(0.582576, abs=1e-6)  # on every machine
    lots = [draw_lot(f"request-{index}") for index in range(20_000)]
    for share in (0.05, 0.25, 0.5):
        # Five standard deviations of a binomial count.
        assert abs(sum(lot < share for lot in lots) / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5
    assert all(0 <= draw_lot(request_id) < 1 for request_id in ("", "\ud800", "x" * 10**6, 3))
    assert len({draw_lot(None) for _ in range(9)}) == 9
    assert len({Choice({}, offer(), OFF, RequestRecord()).lot for _ in range(9)}) == 9


def test_a_rollout_is_a_share() -> None:
    config = offer(profiles=PROFILES, rollout=0.05)
    assert config.describe_rules() == "rollout 0.05; new: rollout 0.5"
    for invalid in (1, 0, 1.5, -0.1, "5%", None, True, [0.5]):
        with pytest.raises(OptionError, match="rollout must be a share in"):
            offer(rollout=invalid)
        with pytest.raises(OptionError, match=r"profile 'a': .*rollout must be a share in"):
            offer(profiles={"a": {"keep": 0.5, "rollout": invalid}})
    assert config.setting() == parse_setting({"method": "divprune", "keep": 0.25})  # the setting of the rollout


def test_on_error_full_serves_failed_requests_unpruned() -> None:
    profiles = {"fast": {"keep": 0.11}, "strict": {"keep": 0.5, "on_error": "refuse"}, "ocr": {"off": True}}
    config = offer(profiles=profiles, on_error="full")
    assert config.describe_rules() == "on_error full; strict: on_error refuse"

    def falls_back(config: ServerConfig, request: dict[str, Any]) -> bool:
        fallback = Choice(request, config, config.setting(request), RequestRecord(), 0.5).resolve({"image": 2}).fallback
        assert fallback is None or (fallback.setting.off and fallback.full == "failure" and fallback.fallback is None)
        return fallback is not None

    requests = [{}, {"profile": "fast"}, {"profile": "fast", "keep": 0.5}, {"profile": "strict"}, {"profile": "ocr"}]
    assert [falls_back(config, request) for request in requests] == [True, True, True, False, False]
    assert not falls_back(offer(), {}) and not falls_back(offer(on_error="refuse"), {})
    assert not falls_back(offer(on_error="full", rollout=0.0), {})  # the rollout already serves it unpruned
    for invalid in ("skip", None, True, ["full"], {}):
        with pytest.raises(OptionError, match='on_error must be "refuse" or "full"'):
            offer(on_error=invalid)
