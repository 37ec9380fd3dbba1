# SPDX-License-Identifier: Apache-2.0
"""LRU cache of encoder outputs with a limit in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

from tokenprune.statistics import FeatureCacheCounts


class CachedValue(Protocol):
    """Value of the cache. `intact` is False after a write to its tensors."""

    @property
    def bytes(self) -> int: ...

    @property
    def intact(self) -> bool: ...


class FeatureCache:
    """Encoded images of a model that is patched with `feature_cache=`. It is thread-safe.

    `tokenprune.feature_cache(model)` returns it. A copy starts empty, so `deepcopy(model)` does not share entries.

    Args:
        limit: Maximum total size of the entries, in bytes.

    Examples:
        >>> model = tokenprune.patch(model, "divprune", keep=0.25, feature_cache=2**24)
        >>> ids = [model.generate(**inputs, max_new_tokens=1) for _ in range(2)]
        >>> tokenprune.feature_cache(model).counts().hits
        1
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = Lock()
        self._entries: OrderedDict[bytes, CachedValue] = OrderedDict()
        self._weights: Any = None
        self._bytes = self._hits = self._misses = self._evictions = self._not_kept = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.limit,)

    def __repr__(self) -> str:
        return f"FeatureCache({self.counts()})"

    def counts(self) -> FeatureCacheCounts:
        """Return the counters and the current size."""
        with self._lock:
            return FeatureCacheCounts(
                self._hits, self._misses, self._evictions, self._not_kept, len(self._entries), self._bytes, self.limit
            )

    def clear(self) -> None:
        """Remove all entries, and keep the counters.

        Call it after writes to `parameter.data`, which are not detected.
        """
        with self._lock:
            self._empty(None)

    def renew(self, weights: Any) -> None:
        """Remove all entries if the weights of the encoder have changed."""
        with self._lock:
            if weights != self._weights:
                self._empty(weights)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, CachedValue]:
        """Return the entries of `keys`. A repeated missing key counts as one miss, because it is encoded once."""
        entries = {}
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and not entry.intact:
                    self._drop(key)
                elif entry is not None:
                    self._entries.move_to_end(key)
                    entries[key] = entry
            self._misses += len(set(keys) - set(entries))
            self._hits += len(keys) - len(set(keys) - set(entries))
        return entries

    def keep(self, weights: Any, key: bytes, entry: CachedValue) -> None:
        """Store an entry, and evict the least recently used entries if needed.

        Entries larger than the limit, or of other weights than in the last `renew`, are not stored.
        """
        with self._lock:
            if entry.bytes > self.limit or weights != self._weights:
                self._not_kept += 1
                return
            self._drop(key)
            while self._bytes + entry.bytes > self.limit:
                self._drop(next(iter(self._entries)))
                self._evictions += 1
            self._entries[key] = entry
            self._bytes += entry.bytes

    def skip(self) -> None:
        """Count a call that cannot be cached."""
        with self._lock:
            self._not_kept += 1

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.bytes

    def _empty(self, weights: Any) -> None:
        self._entries.clear()
        self._bytes, self._weights = 0, weights
