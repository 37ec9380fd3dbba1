# SPDX-License-Identifier: Apache-2.0
"""A server's rule of who is served by which profile: by a header that a gateway sets, or by the API key.

A key stands in the setting as its SHA-256 digest, because vLLM writes its arguments into its log.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError, short
from tokenprune.integrations.vllm.settings.configuration import check_key
from tokenprune.integrations.vllm.settings.keys import KEY

API_KEY = "authorization"  # the header of an API key, `Bearer KEY`
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_SECRET = ("auth", "key", "token", "secret", "cookie")  # in the name of a header whose value is to be digested
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_WANTED = '{"header": "x-tenant", "profiles": {"acme": "gold", "beta": ["fast", "gold"]}, "others": "default"}'
_WHERE = "callers"
Headers = Iterable[tuple[bytes, bytes]]


class CallerError(OptionError):
    """A caller is not known, or asks for a profile that the operator does not let it use."""

    reason = "caller"


@dataclass(frozen=True)
class Callers:
    """The profiles that each caller may use; the first is its own, by which it is served where it asks for none.

    header:  lower case name of the one that tells callers apart; `API_KEY` for the key of a bearer.
    names:   profiles by the header's value.
    digests: profiles by the SHA-256 of the header's value, in hexadecimal digits.
    others:  profiles of everybody else; empty if they are refused.
    """

    header: str = API_KEY
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    others: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, given: Any, profiles: Collection[str], default: str) -> Callers:
        """Read the value of the key `callers`. profiles: names of those that there are. default: that of others, if
        nothing is said of them. Raises OptionError, which holds no value of a header."""
        known = isinstance(given, dict) and {"profiles"} <= set(given) <= {"header", "profiles", "others"}
        check_key(known and isinstance(given["profiles"], dict), _WHERE, _WANTED)
        header = given.get("header", API_KEY)
        fits = isinstance(header, str) and _NAME.fullmatch(header.lower())
        check_key(bool(fits), _WHERE, f"with the name of a header, not {short(header)}")
        header = header.lower()
        names, digests = {}, {}
        for value, one in given["profiles"].items():
            may = _profiles(one, profiles)
            check_key(
                bool(may), _WHERE, f"of one profile at least for each caller; those to be refused are others: {_WANTED}"
            )
            if digest := _DIGEST.fullmatch(value):
                digests[digest[1]] = may
                continue
            if value.startswith("sha256:") or any(part in header for part in _SECRET):
                raise OptionError(
                    f"{KEY}: callers by {header} stand there as digests of what is secret, sha256: and 64 hexadecimal "
                    "digits in lower case, as printf %s KEY | sha256sum writes them"
                )
            names[value] = may
        return cls(header, names, digests, _profiles(given.get("others", default), profiles))

    def may_use(self, headers: Headers) -> tuple[str, ...]:
        """Return the profiles that a request may use, its caller's own first. headers: names in lower case, and
        values. Raises CallerError for a caller that is refused, and where the header stands more than once."""
        wanted = self.header.encode()
        found = [value.strip() for name, value in headers if name.lower() == wanted]
        if len(found) > 1:
            raise CallerError(f"{KEY}: the header {self.header} stands more than once in this request: send one")
        may = self._find_profiles(found[0]) if found else self.others
        if not may:
            by = "API key" if self.header == API_KEY else f"header {self.header}"
            raise CallerError(f"{KEY}: this server has no profile for the caller, whom it knows by the {by}")
        return may

    def _find_profiles(self, value: bytes) -> tuple[str, ...]:
        if self.header == API_KEY:
            scheme, _, value = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return self.others
        digest = hashlib.sha256(value).hexdigest()
        return self.digests.get(digest) or self.names.get(value.decode("latin-1"), self.others)

    @property
    def default_profiles(self) -> set[str]:
        """The profiles by which callers are served that ask for none."""
        return {may[0] for may in (*self.names.values(), *self.digests.values(), self.others) if may}

    def describe(self) -> str:
        """Return the rule in words for the line of the log, without any value of a header."""
        by = "API key" if self.header == API_KEY else self.header
        count = len(self.names) + len(self.digests)
        return f"{count} callers by {by}, others {'+'.join(self.others) or 'refused'}"


def _profiles(given: Any, there: Collection[str]) -> tuple[str, ...]:
    named = [given] if isinstance(given, str) else given
    fits = isinstance(named, list) and all(isinstance(name, str) and name in there for name in named)
    check_key(fits, _WHERE, f"of profiles that are there ({', '.join(there)}), by name or as a list: {_WANTED}")
    return tuple(named)
