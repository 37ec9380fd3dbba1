# SPDX-License-Identifier: Apache-2.0
"""Versions of other packages that are newer than those tested: refused, since a renamed argument can make answers wrong
in silence."""

from __future__ import annotations

import logging
import os
from functools import cache

from packaging.version import Version

from tokenprune.errors import UnsupportedSetupError

UNTESTED = "TOKENPRUNE_UNTESTED"
_log = logging.getLogger(__name__)


def allow_untested() -> bool:
    """Return True if the environment allows versions that are newer than those tested."""
    return os.environ.get(UNTESTED, "0") not in ("", "0")


def check_tested(package: str, version: str, newest: str) -> None:
    """Raise UnsupportedSetupError if a package is of a later minor release than `newest`, the newest tested; where the
    environment allows it, log a warning once instead."""
    release = Version(newest).release
    if Version(version).release[: len(release)] <= release:
        return
    if not allow_untested():
        raise UnsupportedSetupError(
            f"{package} {version} is newer than {newest}, the newest on which this tokenprune is tested: what it "
            f"renamed could make answers wrong in silence. pip install '{package}<{_after(release)}', or upgrade "
            f"tokenprune-vlm; or set {UNTESTED}=1, and compare answers with those of a tested version"
        )
    _warn(package, version, newest)


def _after(release: tuple[int, ...]) -> str:
    return ".".join(map(str, (*release[:-1], release[-1] + 1)))


@cache
def _warn(package: str, version: str, newest: str) -> None:
    _log.warning("%s %s is newer than %s, the newest tested; %s allows it", package, version, newest, UNTESTED)
