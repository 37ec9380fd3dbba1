# SPDX-License-Identifier: Apache-2.0
"""Thresholds of calibration: for each block of one vision tower, the similarity from which two tokens are merged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.files import File, reason

_SHIPPED = Path(__file__).resolve().parent / "data"
_ENTRY, _VERSION = "tokenprune_thresholds", 1


@dataclass(frozen=True, eq=False)
class Thresholds:
    """The thresholds of one vision tower, for one or several shares of tokens to keep.

    values: for each `keep` one cosine for each block, float32 `[blocks]`; 1.0 where a block merges nothing.
    fingerprint: of the tower. images: how many it was calibrated on. settings: what else went into it, for the reader.
    Raises OptionError for values of another shape or type, and for those that are not finite.
    """

    values: dict[float, torch.Tensor] = field(repr=False)
    fingerprint: Fingerprint
    images: int
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or not self.values:
            raise OptionError("thresholds are a dict, from each keep to float32 `[blocks]`, with at least one entry")
        for keep, values in self.values.items():
            if not isinstance(keep, float) or not 0 < keep <= 1:
                raise OptionError(f"thresholds are for shares to keep, floats in (0, 1], not for {keep!r}")
            if not isinstance(values, torch.Tensor) or values.dim() != 1 or not values.is_floating_point():
                is_tensor = isinstance(values, torch.Tensor)
                got = f"{values.dtype} {list(values.shape)}" if is_tensor else type(values).__name__
                raise OptionError(f"thresholds for keep={keep} must be float32 `[blocks]`, one cosine each, not {got}")
            if not torch.isfinite(values).all():
                raise OptionError(f"thresholds for keep={keep} are not finite: run `tokenprune fit dymu` again")

    def __str__(self) -> str:
        rows = [f"keep {keep:g}: " + " ".join(f"{value:.3f}" for value in self.for_keep(keep)) for keep in self.keeps]
        return "\n".join([*rows, f"calibrated on {self.images} images"])

    @property
    def keeps(self) -> list[float]:
        """The shares that these are for, largest first."""
        return sorted(self.values, reverse=True)

    def for_keep(self, keep: float | int | None) -> torch.Tensor:
        """Return the thresholds for a share; raises BudgetError for one that was not calibrated."""
        for share, values in self.values.items():
            if isinstance(keep, float) and abs(share - keep) < 1e-9:
                return values
        raise BudgetError(
            f"keep={keep!r} was not calibrated: these thresholds are for keep={' or '.join(map(str, self.keeps))}; use "
            "one of these shares (or 1.0, which merges nothing), or run `tokenprune fit dymu` with this one"
        )

    def check(self, fingerprint: Fingerprint) -> None:
        """Raise OptionError if these were calibrated for another tower."""
        ours = self.fingerprint
        if ours == fingerprint:
            return
        if ours.kind != fingerprint.kind:
            what = f"a {ours.kind}, and this tower is a {fingerprint.kind}"
        elif ours.dtype != fingerprint.dtype:
            what = f"a tower in {ours.dtype}, and this one is in {fingerprint.dtype}"
        else:
            what = f"a {ours.kind} with other weights or another shape"
        raise OptionError(f"these thresholds were calibrated for {what}: run `tokenprune fit dymu` for this model")

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; raises TokenPruneError where that is impossible."""
        from safetensors.torch import save

        about = {
            "version": _VERSION,
            "fingerprint": vars(self.fingerprint),
            "images": self.images,
            "settings": self.settings,
        }
        tensors = {f"keep={keep!r}": self.values[keep] for keep in self.keeps}
        # One entry: safetensors promises no order of several, and equal thresholds shall make equal files.
        write_atomically(Path(path), save(tensors, {_ENTRY: json.dumps(about, sort_keys=True)}))

    @staticmethod
    def load(path: str | Path) -> Thresholds:
        """Read what `save` wrote; raises OptionError for anything else."""
        try:
            tensors, metadata = File.of(path).tensors()
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot read {path} as thresholds: {reason(error)}") from error
        try:
            about = json.loads(metadata.get(_ENTRY, "{}"))
            if about.get("version") == _VERSION:
                values = {float(name.removeprefix("keep=")): tensor for name, tensor in tensors.items()}
                return Thresholds(values, Fingerprint(**about["fingerprint"]), about["images"], about["settings"])
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, OptionError):
                raise OptionError(f"{path}: {error}") from error
        raise OptionError(
            f"{path} does not hold thresholds that this version of tokenprune can read: make it with `tokenprune "
            "fit dymu`"
        )


@cache
def _load_shipped() -> list[Thresholds]:
    return [Thresholds.load(path) for path in sorted(_SHIPPED.glob("*.safetensors"))]


def find_shipped(fingerprint: Fingerprint) -> Thresholds:
    """Return the thresholds that the package has for a tower; raises OptionError if it has none."""
    for one in _load_shipped():
        if one.fingerprint == fingerprint:
            return one
    raise OptionError(
        f"dymu has no thresholds for this model ({fingerprint.kind}, {fingerprint.dtype}): run `tokenprune fit dymu "
        "--model MODEL --images DIR --keep 0.25 --out thresholds.safetensors` (or "
        "tokenprune_bench.calibration.calibrate), then pass "
        'thresholds="thresholds.safetensors"'
    )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one step, so that a run that is cut short leaves the old one; raises TokenPruneError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
