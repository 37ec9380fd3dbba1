# SPDX-License-Identifier: Apache-2.0
"""Keep what images became in a vision tower, within a number of bytes: what was used last goes last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

from tokenprune.statistics import FeatureCacheCounts


class CachedValue(Protocol):
    """One value under a key. intact: True if it still holds what was put there."""

    @property
    def bytes(self) -> int: ...

    @property
    def intact(self) -> bool: ...


class FeatureCache:
    """The encoded images of a model that was patched with `feature_cache=`; `tokenprune.feature_cache(model)` returns
    it. Threads may share it.

    limit: bytes that its entries may take in all. A copy of it, as a copy of the model has, is empty.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = Lock()
        self._entries: OrderedDict[bytes, CachedValue] = OrderedDict()
        self._made_by: Any = None
        self._bytes = self._hits = self._misses = self._evictions = self._not_kept = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit,)

    def __repr__(self) -> str:
        return f"FeatureCache({self.counts()})"

    def counts(self) -> FeatureCacheCounts:
        """Return what was looked up so far, and what is held now."""
        with self._lock:
            return FeatureCacheCounts(
                self._hits, self._misses, self._evictions, self._not_kept, len(self._entries), self._bytes, self.limit
            )

    def clear(self) -> None:
        """Forget all images; the counters go on. To be called where weights were written to past autograd
        (`parameter.data.copy_(...)`): nothing tells of that."""
        with self._lock:
            self._empty(None)

    def renew(self, made_by: Any) -> None:
        """Forget all images unless the same weights, `made_by`, encode the next ones."""
        with self._lock:
            if made_by != self._made_by:
                self._empty(made_by)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, CachedValue]:
        """Return what is kept under `keys`. One that stands there twice is looked for once, and found the second
        time: whoever misses it makes it for both."""
        found = {}
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and not entry.intact:
                    self._drop(key)
                elif entry is not None:
                    self._entries.move_to_end(key)
                    found[key] = entry
            self._misses += len(set(keys) - set(found))
            self._hits += len(keys) - len(set(keys) - set(found))
        return found

    def keep(self, made_by: Any, key: bytes, entry: CachedValue) -> None:
        """Keep `entry`, and let go of those that were used longest ago for it; not one that is larger than the limit,
        or was made by weights that are no longer those of the last `renew`."""
        with self._lock:
            if entry.bytes > self.limit or made_by != self._made_by:
                self._not_kept += 1
                return
            self._drop(key)
            while self._bytes + entry.bytes > self.limit:
                self._drop(next(iter(self._entries)))
                self._evictions += 1
            self._entries[key] = entry
            self._bytes += entry.bytes

    def pass_by(self) -> None:
        """Count a call whose images cannot be kept."""
        with self._lock:
            self._not_kept += 1

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.bytes

    def _empty(self, made_by: Any) -> None:
        self._entries.clear()
        self._bytes, self._made_by = 0, made_by
