# SPDX-License-Identifier: Apache-2.0
"""The rules that map callers to profiles. tests/vllm/test_tenants.py tests requests and servers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from each import each
from tests.unit.vllm.test_offer import PROFILES, offer
from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.settings.callers import CallerError, Callers
from tokenprune.integrations.vllm.settings.server_config import ProfileError

SECRET = "sk-very-secret"


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def build_callers(**rule: Any) -> Callers:
    callers = offer(profiles=PROFILES, callers=rule).callers
    assert callers is not None
    return callers


def encode_headers(*pairs: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


def test_an_api_key_decides() -> None:
    callers = build_callers(profiles={digest(SECRET): ["fast", "ocr"], digest("ключ"): "small"})
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert callers.may_use(encode_headers(("authorization", f"{scheme} {SECRET}"))) == ("fast", "ocr")
    assert callers.may_use(encode_headers(("authorization", "Bearer ключ"))) == ("small",)
    for value in (SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer ", "", f"Bearer {digest(SECRET)}", "Bearer"):
        assert callers.may_use(encode_headers(("authorization", value))) == ("default",), value
    assert callers.may_use([]) == callers.may_use(encode_headers(("x-api-key", SECRET))) == ("default",)
    assert (
        callers.default_profiles == {"fast", "small", "default"}
        and callers.describe() == "2 callers by API key, others default"
    )
    assert digest(SECRET)[7:] not in repr(callers)


def test_a_header_decides() -> None:
    callers = build_callers(header="X-Tenant", profiles={"acme": "fast", digest("beta"): ["ocr"]}, others=[])
    assert (
        callers.may_use(encode_headers(("x-tenant", " acme ")))
        == callers.may_use(encode_headers(("X-TENANT", "acme")))
        == ("fast",)
    )
    assert callers.may_use(encode_headers(("x-tenant", "beta"))) == ("ocr",)
    # The digest in the operator's file is not a credential.
    for value in (digest("beta"), digest("beta")[7:], "ACME", "acme, acme", "", "acme\u00fc"):
        with pytest.raises(CallerError, match="header x-tenant of this request is not assigned to a profile"):
            callers.may_use(encode_headers(("x-tenant", value)))
    with pytest.raises(CallerError):
        callers.may_use([])
    assert callers.default_profiles == {"fast", "ocr"} and callers.describe() == "2 callers by x-tenant, others refused"


@pytest.mark.parametrize("second", ["acme", "other", ""])
def test_a_repeated_header_is_refused(second: str) -> None:
    """A server and a gateway may read different values of a repeated header."""
    callers = build_callers(header="x-tenant", profiles={"acme": "fast"})
    for pair in (("acme", second), (second, "acme")):
        with pytest.raises(CallerError, match="occurs more than once"):
            callers.may_use(encode_headers(*(("x-tenant", value) for value in pair)))


def test_forbidden_and_unknown_profiles_give_the_same_error() -> None:
    config = offer(profiles=PROFILES)
    assert config.profile("fast", ("fast",)) == config.profile("fast")
    messages = set()
    for name in ("ocr", "default", "fsat", None, ["fast"], {"a": 1}):
        with pytest.raises(CallerError, match=r"may not use profile .*; it may use fast, small$") as caught:
            config.profile(name, ("fast", "small"))
        messages.add(str(caught.value).partition("profile")[2].partition(";")[2])
    assert len(messages) == 1
    with pytest.raises(ProfileError):
        config.profile("fsat")


@each(
    ("rule", "message"),
    [
        (3, 'callers must be {"header"'),
        ({}, 'callers must be {"header"'),
        ({"profiles": []}, 'callers must be {"header"'),
        ({"profiles": {}, "who": 1}, 'callers must be {"header"'),
        ({"profiles": {}, "header": "x tenant"}, "the name of a header"),
        ({"profiles": {}, "header": ""}, "the name of a header"),
        ({"profiles": {}, "header": 3}, "the name of a header"),
        ({"profiles": {}, "others": "fsat"}, r"of known profiles \(default, fast, ocr, small\)"),
        ({"profiles": {}, "others": None}, "of known profiles"),
        ({"profiles": {digest("a"): SECRET}}, "of known profiles"),
        ({"profiles": {digest("a"): [["fast"]]}}, "of known profiles"),
        ({"profiles": {digest("a"): []}}, "at least one profile"),
        ({"profiles": {SECRET: "fast"}}, "must be digests.*sha256sum"),
        ({"profiles": {SECRET: "fast"}, "header": "X-Api-Key"}, "callers by x-api-key must be digests"),
        ({"profiles": {digest("a").upper(): "fast"}}, "must be digests"),
        ({"profiles": {"sha256:abc": "fast"}, "header": "x-tenant"}, "must be digests"),
    ],
)
def test_a_bad_rule_stops_the_server(rule: Any, message: str) -> None:
    """The error, which is logged, does not contain the secret."""
    with pytest.raises(OptionError, match=message) as caught:
        offer(profiles=PROFILES, callers=rule)
    assert SECRET not in str(caught.value)


def test_profiles_cannot_set_callers() -> None:
    with pytest.raises(OptionError, match="profile 'a': callers applies to the whole server"):
        offer(profiles={"a": {"keep": 0.5, "callers": {"profiles": {}}}})
    assert offer(profiles=PROFILES, min_keep=0.1, callers={"profiles": {}, "others": []}).describe_rules() == (
        "min_keep 0.1; 0 callers by API key, others refused"
    )
