# SPDX-License-Identifier: Apache-2.0
"""Check that packages are not newer than the tested versions. A renamed argument can make answers silently wrong."""

from __future__ import annotations

import logging
import os
from functools import cache

from packaging.version import Version

from tokenprune.errors import UnsupportedSetupError

UNTESTED = "TOKENPRUNE_UNTESTED"
_log = logging.getLogger(__name__)


def allow_untested() -> bool:
    """Return True if the environment allows untested versions."""
    return os.environ.get(UNTESTED, "0") not in ("", "0")


def check_tested(package: str, version: str, newest: str) -> None:
    """Raise UnsupportedSetupError if a package is of a later minor release than `newest`, the newest tested version.

    If the environment allows untested versions, log a warning once instead.
    """
    release = Version(newest).release
    if Version(version).release[: len(release)] <= release:
        return
    if not allow_untested():
        raise UnsupportedSetupError(
            f"{package} {version} is newer than {newest}, the newest version tested with this tokenprune. Run pip "
            f"install '{package}<{_format_next_release(release)}', upgrade tokenprune-vlm, or set {UNTESTED}=1 and "
            "compare answers."
        )
    _warn(package, version, newest)


def _format_next_release(release: tuple[int, ...]) -> str:
    return ".".join(map(str, (*release[:-1], release[-1] + 1)))


@cache
def _warn(package: str, version: str, newest: str) -> None:
    _log.warning("%s %s is newer than %s, the newest tested version. %s is set.", package, version, newest, UNTESTED)
