# SPDX-License-Identifier: Apache-2.0
"""The server key `callers`: which profiles each caller may use, by a header of its requests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError, shorten
from tokenprune.integrations.vllm.settings.configuration import check_key
from tokenprune.integrations.vllm.settings.keys import KEY

API_KEY = "authorization"  # the header `Authorization: Bearer KEY`
_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}", re.ASCII)
_SECRET = ("auth", "key", "token", "secret", "cookie")  # headers with these parts in their name may hold secrets
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_EXAMPLE = '{"header": "x-tenant", "profiles": {"acme": "gold", "beta": ["fast", "gold"]}, "others": "default"}'
_CALLERS_KEY = "callers"
Headers = Iterable[tuple[bytes, bytes]]


class CallerError(OptionError):
    """The caller is unknown, or requests a profile that it may not use."""

    reason = "caller"


@dataclass(frozen=True)
class Callers:
    """Profiles of each caller. The first profile of a caller is used if its request selects none.

    Args:
        header: Lower-case name of the header that identifies callers. `API_KEY` reads the key of a bearer token.
        names: Profiles by the value of the header.
        digests: Profiles by the SHA-256 of the header's value, in hexadecimal digits.
        others: Profiles of all other callers. Empty if they are refused.
    """

    header: str = API_KEY
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    others: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: Any, profiles: Collection[str], default: str) -> Callers:
        """Read the value of the key `callers`; raise OptionError, without quoting values of a header."""
        is_known = isinstance(value, dict) and {"profiles"} <= set(value) <= {"header", "profiles", "others"}
        check_key(is_known and isinstance(value["profiles"], dict), _CALLERS_KEY, _EXAMPLE)
        header = value.get("header", API_KEY)
        is_valid = isinstance(header, str) and _NAME.fullmatch(header.lower())
        check_key(bool(is_valid), _CALLERS_KEY, f"with the name of a header, not {shorten(header)}")
        header = header.lower()
        names, digests = {}, {}
        for caller, names_of_caller in value["profiles"].items():
            allowed = _read_profiles(names_of_caller, profiles)
            check_key(bool(allowed), _CALLERS_KEY, f"with at least one profile for each caller, as in {_EXAMPLE}")
            if digest := _DIGEST.fullmatch(caller):
                digests[digest[1]] = allowed
                continue
            if caller.startswith("sha256:") or any(part in header for part in _SECRET):
                raise OptionError(
                    f"{KEY}: callers by {header} must be digests, sha256: and the 64 lower-case hexadecimal digits "
                    "that printf %s KEY | sha256sum prints"
                )
            names[caller] = allowed
        return cls(header, names, digests, _read_profiles(value.get("others", default), profiles))

    def may_use(self, headers: Headers) -> tuple[str, ...]:
        """Return the profiles that a request with these headers may use, the caller's default first.

        Raises CallerError if the caller is refused, or the header occurs more than once.
        """
        header = self.header.encode()
        values = [value.strip() for name, value in headers if name.lower() == header]
        if len(values) > 1:
            raise CallerError(f"{KEY}: the header {self.header} occurs more than once in this request. Send it once.")
        allowed = self._find_profiles(values[0]) if values else self.others
        if not allowed:
            by = "API key" if self.header == API_KEY else f"header {self.header}"
            raise CallerError(f"{KEY}: the {by} of this request is not assigned to a profile")
        return allowed

    def _find_profiles(self, value: bytes) -> tuple[str, ...]:
        if self.header == API_KEY:
            scheme, _, value = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return self.others
        digest = hashlib.sha256(value).hexdigest()
        return self.digests.get(digest) or self.names.get(value.decode("latin-1"), self.others)

    @property
    def default_profiles(self) -> set[str]:
        """The profiles used for requests that select none."""
        return {allowed[0] for allowed in (*self.names.values(), *self.digests.values(), self.others) if allowed}

    def describe(self) -> str:
        """Describe the rule for the log, without any value of a header."""
        by = "API key" if self.header == API_KEY else self.header
        count = len(self.names) + len(self.digests)
        return f"{count} callers by {by}, others {'+'.join(self.others) or 'refused'}"


def _read_profiles(value: Any, profiles: Collection[str]) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    are_known = isinstance(names, list) and all(isinstance(name, str) and name in profiles for name in names)
    check_key(are_known, _CALLERS_KEY, f"of known profiles ({', '.join(profiles)}), by name or as a list: {_EXAMPLE}")
    return tuple(names)
