# SPDX-License-Identifier: Apache-2.0
"""Calibrated thresholds of DyMU: the similarity per block of a vision tower above which two tokens merge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tokenprune.errors import BudgetError, OptionError
from tokenprune.models.fingerprint import Fingerprint
from tokenprune.selection.files import File, describe_error, write_atomically

_SHIPPED = Path(__file__).resolve().parent / "data"
_ENTRY, _VERSION = "tokenprune_thresholds", 1


@dataclass(frozen=True, eq=False)
class Thresholds:
    """Thresholds of one vision tower, for one or several shares of kept tokens.

    Args:
        values: For each `keep`, one cosine per block, shape (blocks,), float32. 1.0 if a block merges no tokens.
        fingerprint: Fingerprint of the vision tower.
        images: Number of calibration images.
        settings: Other settings of the calibration, for information.

    Raises:
        OptionError: If values have a wrong shape or type, or are not finite.

    Examples:
        >>> from tokenprune.models.fingerprint import Fingerprint
        >>> thresholds = Thresholds({0.5: torch.tensor([0.9, 0.8])}, Fingerprint("clip", "float32", "0" * 8), images=10)
        >>> print(thresholds)
        keep 0.5: 0.900 0.800
        calibrated on 10 images
    """

    values: dict[float, torch.Tensor] = field(repr=False)
    fingerprint: Fingerprint
    images: int
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or not self.values:
            raise OptionError("thresholds must be a non-empty dict from keep to float tensors (blocks,)")
        for keep, values in self.values.items():
            if not isinstance(keep, float) or not 0 < keep <= 1:
                raise OptionError(f"thresholds key {keep!r} is not a share. Use floats in (0, 1].")
            if not isinstance(values, torch.Tensor) or values.dim() != 1 or not values.is_floating_point():
                is_tensor = isinstance(values, torch.Tensor)
                got = f"{values.dtype} {list(values.shape)}" if is_tensor else type(values).__name__
                raise OptionError(f"thresholds for keep={keep} must be float (blocks,), not {got}")
            if not torch.isfinite(values).all():
                raise OptionError(f"thresholds for keep={keep} are not finite. Run `tokenprune fit dymu` again.")

    def __str__(self) -> str:
        rows = [f"keep {keep:g}: " + " ".join(f"{value:.3f}" for value in self.for_keep(keep)) for keep in self.keeps]
        return "\n".join([*rows, f"calibrated on {self.images} images"])

    @property
    def keeps(self) -> list[float]:
        """Calibrated shares, in descending order."""
        return sorted(self.values, reverse=True)

    def for_keep(self, keep: float | int | None) -> torch.Tensor:
        """Return the thresholds for a share.

        Raises:
            BudgetError: If the share was not calibrated.
        """
        for share, values in self.values.items():
            if isinstance(keep, float) and abs(share - keep) < 1e-9:
                return values
        raise BudgetError(
            f"keep={keep!r} is not calibrated. Use keep={' or '.join(map(str, self.keeps))} (or 1.0), or run "
            "`tokenprune fit dymu` with this share."
        )

    def check(self, fingerprint: Fingerprint) -> None:
        """Raise OptionError if the thresholds were calibrated for another tower."""
        ours = self.fingerprint
        if ours == fingerprint:
            return
        if ours.kind != fingerprint.kind:
            target = f"a {ours.kind}, but this tower is a {fingerprint.kind}"
        elif ours.dtype != fingerprint.dtype:
            target = f"{ours.dtype}, but this tower uses {fingerprint.dtype}"
        else:
            target = f"a {ours.kind} with other weights or another shape"
        raise OptionError(f"the thresholds were calibrated for {target}. Run `tokenprune fit dymu` for this model.")

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            OptionError: If the file cannot be written.
        """
        from safetensors.torch import save

        metadata = {
            "version": _VERSION,
            "fingerprint": vars(self.fingerprint),
            "images": self.images,
            "settings": self.settings,
        }
        tensors = {f"keep={keep!r}": self.values[keep] for keep in self.keeps}
        # safetensors does not order metadata entries. A single entry gives equal files for equal thresholds.
        write_atomically(Path(path), save(tensors, {_ENTRY: json.dumps(metadata, sort_keys=True)}))

    @staticmethod
    def load(path: str | Path) -> Thresholds:
        """Read a file written by `save`.

        Raises:
            OptionError: If the file is missing or has another format.
        """
        try:
            tensors, metadata = File.from_path(path).tensors()
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot read thresholds from {path}: {describe_error(error)}") from error
        try:
            header = json.loads(metadata.get(_ENTRY, "{}"))
            if header.get("version") == _VERSION:
                values = {float(name.removeprefix("keep=")): tensor for name, tensor in tensors.items()}
                return Thresholds(values, Fingerprint(**header["fingerprint"]), header["images"], header["settings"])
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, OptionError):
                raise OptionError(f"{path}: {error}") from error
        raise OptionError(
            f"{path} does not contain thresholds that this version of tokenprune can read. Write it with `tokenprune "
            "fit dymu`."
        )


@cache
def _load_shipped() -> list[Thresholds]:
    return [Thresholds.load(path) for path in sorted(_SHIPPED.glob("*.safetensors"))]


def find_shipped(fingerprint: Fingerprint) -> Thresholds:
    """Return the thresholds that ship with the package for a tower.

    Raises:
        OptionError: If there are none.
    """
    for thresholds in _load_shipped():
        if thresholds.fingerprint == fingerprint:
            return thresholds
    raise OptionError(
        f"dymu has no thresholds for this model ({fingerprint.kind}, {fingerprint.dtype}). Run `tokenprune fit dymu "
        "--model MODEL --images DIR --keep 0.25 --out thresholds.safetensors` and pass "
        'thresholds="thresholds.safetensors".'
    )
