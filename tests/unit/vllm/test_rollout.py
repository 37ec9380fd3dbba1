# SPDX-License-Identifier: Apache-2.0
"""Requests that a rollout, or a failure, has served in full. For what is counted see tests/vllm/test_rollout_counts.py
and tests/vllm/test_on_error.py."""

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


def full(made: ServerConfig, lot: float, asked: Any = None) -> bool:
    request = Choice(asked or {}, made, made.setting(asked or {}), RequestRecord(), lot).resolve({"image": 2})
    assert isinstance(request, HeldBack) == (request.full == "rollout")
    if isinstance(request, HeldBack):
        assert request.shadow.setting == made.setting(asked or {}) and request.setting.off
    return request.full is not None


def test_a_share_of_requests_is_reduced() -> None:
    made = offer(profiles=PROFILES, rollout=0.05)
    assert [full(made, lot) for lot in (0.0, 0.0499, 0.05, 0.99)] == [False, False, True, True]
    assert [full(made, 0.3, {"profile": name}) for name in ("fast", "new", "ocr")] == [True, False, False]
    assert full(made, 0.5, {"profile": "new"}) and full(made, 0.5, {"keep": 0.5}) and not full(made, 0.5, {"off": True})
    assert not full(offer(profiles=PROFILES), 0.999) and full(offer(profiles=PROFILES), 0.5, {"profile": "new"})
    assert full(offer(rollout=0.0), 0.0) and not full(offer(rollout=1.0), 1 - 2**-48)


def test_the_lot_follows_from_the_id() -> None:
    assert draw_lot("chatcmpl-1") == draw_lot("chatcmpl-1") != draw_lot("chatcmpl-2")
    assert draw_lot("mine.1") == pytest.approx(0.582576, abs=1e-6)  # on every machine
    lots = [draw_lot(f"request-{number}") for number in range(20_000)]
    for share in (0.05, 0.25, 0.5):
        # Five standard deviations of a binomial count.
        assert abs(sum(lot < share for lot in lots) / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5
    assert all(0 <= draw_lot(one) < 1 for one in ("", "\ud800", "x" * 10**6, 3))
    assert len({draw_lot(None) for _ in range(9)}) == 9
    assert len({Choice({}, offer(), OFF, RequestRecord()).lot for _ in range(9)}) == 9


def test_a_rollout_is_a_share() -> None:
    made = offer(profiles=PROFILES, rollout=0.05)
    assert made.describe_rules() == "rollout 0.05; new: rollout 0.5"
    for wrong in (1, 0, 1.5, -0.1, "5%", None, True, [0.5]):
        with pytest.raises(OptionError, match="rollout must be a share in"):
            offer(rollout=wrong)
        with pytest.raises(OptionError, match=r"profile 'a': .*rollout must be a share in"):
            offer(profiles={"a": {"keep": 0.5, "rollout": wrong}})
    assert made.setting() == parse_setting({"method": "divprune", "keep": 0.25})  # what it is a rollout of


def test_what_is_done_where_it_fails() -> None:
    profiles = {"fast": {"keep": 0.11}, "strict": {"keep": 0.5, "on_error": "refuse"}, "ocr": {"off": True}}
    made = offer(profiles=profiles, on_error="full")
    assert made.describe_rules() == "on_error full; strict: on_error refuse"

    def in_full(made: ServerConfig, asked: dict[str, Any]) -> bool:
        instead = Choice(asked, made, made.setting(asked), RequestRecord(), 0.5).resolve({"image": 2}).fallback
        assert instead is None or (instead.setting.off and instead.full == "failure" and instead.fallback is None)
        return instead is not None

    asked = [{}, {"profile": "fast"}, {"profile": "fast", "keep": 0.5}, {"profile": "strict"}, {"profile": "ocr"}]
    assert [in_full(made, one) for one in asked] == [True, True, True, False, False]
    assert not in_full(offer(), {}) and not in_full(offer(on_error="refuse"), {})
    assert not in_full(offer(on_error="full", rollout=0.0), {})  # it was served in full
    for wrong in ("skip", None, True, ["full"], {}):
        with pytest.raises(OptionError, match='on_error must be "refuse" or "full"'):
            offer(on_error=wrong)
