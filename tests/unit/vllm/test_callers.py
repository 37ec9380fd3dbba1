# SPDX-License-Identifier: Apache-2.0
"""The rule of who is served by which profile, by itself. For requests and servers see tests/vllm/test_tenants.py."""

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


def rule(**given: Any) -> Callers:
    found = offer(profiles=PROFILES, callers=given).callers
    assert found is not None
    return found


def headers(*pairs: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


def test_an_api_key_decides() -> None:
    made = rule(profiles={digest(SECRET): ["fast", "ocr"], digest("ключ"): "small"})
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert made.may_use(headers(("authorization", f"{scheme} {SECRET}"))) == ("fast", "ocr")
    assert made.may_use(headers(("authorization", "Bearer ключ"))) == ("small",)
    for value in (SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer ", "", f"Bearer {digest(SECRET)}", "Bearer"):
        assert made.may_use(headers(("authorization", value))) == ("default",), value
    assert made.may_use([]) == made.may_use(headers(("x-api-key", SECRET))) == ("default",)
    assert (
        made.default_profiles == {"fast", "small", "default"}
        and made.describe() == "2 callers by API key, others default"
    )
    assert digest(SECRET)[7:] not in repr(made)


def test_a_header_decides() -> None:
    made = rule(header="X-Tenant", profiles={"acme": "fast", digest("beta"): ["ocr"]}, others=[])
    assert made.may_use(headers(("x-tenant", " acme "))) == made.may_use(headers(("X-TENANT", "acme"))) == ("fast",)
    assert made.may_use(headers(("x-tenant", "beta"))) == ("ocr",)
    # Nobody comes in by what stands in the operator's file in place of a secret.
    for value in (digest("beta"), digest("beta")[7:], "ACME", "acme, acme", "", "acme\u00fc"):
        with pytest.raises(CallerError, match="header x-tenant of this request is not assigned to a profile"):
            made.may_use(headers(("x-tenant", value)))
    with pytest.raises(CallerError):
        made.may_use([])
    assert made.default_profiles == {"fast", "ocr"} and made.describe() == "2 callers by x-tenant, others refused"


@pytest.mark.parametrize("second", ["acme", "other", ""])
def test_a_header_stands_once(second: str) -> None:
    """A server and a gateway may look at different ones of two."""
    made = rule(header="x-tenant", profiles={"acme": "fast"})
    for pair in (("acme", second), (second, "acme")):
        with pytest.raises(CallerError, match="occurs more than once"):
            made.may_use(headers(*(("x-tenant", value) for value in pair)))


def test_what_a_caller_may_not_use_is_not_told_apart_from_what_is_not_there() -> None:
    made = offer(profiles=PROFILES)
    assert made.profile("fast", ("fast",)) == made.profile("fast")
    said = set()
    for name in ("ocr", "default", "fsat", None, ["fast"], {"a": 1}):
        with pytest.raises(CallerError, match=r"may not use profile .*; it may use fast, small$") as caught:
            made.profile(name, ("fast", "small"))
        said.add(str(caught.value).partition("profile")[2].partition(";")[2])
    assert len(said) == 1
    with pytest.raises(ProfileError):
        made.profile("fsat")


@each(
    ("given", "says"),
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
def test_a_bad_rule_stops_the_server(given: Any, says: str) -> None:
    """And an error that goes into a log holds no secret."""
    with pytest.raises(OptionError, match=says) as caught:
        offer(profiles=PROFILES, callers=given)
    assert SECRET not in str(caught.value)


def test_a_rule_is_of_the_whole_server() -> None:
    with pytest.raises(OptionError, match="profile 'a': callers applies to the whole server"):
        offer(profiles={"a": {"keep": 0.5, "callers": {"profiles": {}}}})
    assert offer(profiles=PROFILES, min_keep=0.1, callers={"profiles": {}, "others": []}).describe_rules() == (
        "min_keep 0.1; 0 callers by API key, others refused"
    )
