# SPDX-License-Identifier: Apache-2.0
"""State of a calibration, with a file to resume an interrupted run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tokenprune.errors import OptionError
from tokenprune.selection.files import check_output, write_atomically
from tokenprune.selection.sites.encoder import Tower
from tokenprune_bench.calibration.images import ImageFiles

_ENTRY = "tokenprune_calibration"


@dataclass
class CalibrationState:
    """Sums of the thresholds so far.

    Attributes:
        sums: Summed thresholds, float64, shape (keeps, blocks), over `batches` batches.
        path: File of the state, or None.
        identity: Settings, files and model. A run resumes only if they are equal.
        images: Number of images so far.
        batches: Number of batches so far.
    """

    sums: Tensor
    path: Path | None
    identity: dict[str, Any]
    images: int = 0
    batches: int = 0

    @staticmethod
    def load_or_create(
        out: str | Path | None, images: ImageFiles, tower: Tower, settings: dict[str, Any], resume: bool
    ) -> CalibrationState:
        """Load the state of an interrupted run, or create an empty state.

        Raises:
            OptionError: If the file belongs to another calibration.
        """
        same = settings | {"files": images.digest, "model": vars(tower.fingerprint)}
        path = None
        if out is not None:
            out = Path(out)
            check_output(out)
            path = out.with_name(f"{out.name}.partial") if images.digest else None
        state = CalibrationState(
            torch.zeros(len(settings["keeps"]), tower.blocks, dtype=torch.float64, device="cpu"), path, same
        )
        if resume and path is not None and path.exists():
            state._load()
        return state

    def _load(self) -> None:
        remedy = "delete it, or start again with resume=False (--restart)"
        try:
            with safe_open(str(self.path), "pt") as file:
                about, sums = json.loads(file.metadata()[_ENTRY]), file.get_tensor("sums")
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise OptionError(f"{self.path} is not a readable state of a calibration: {remedy}") from error
        other = [name for name, value in self.identity.items() if about["same"].get(name) != value]
        if other:
            raise OptionError(f"{self.path} belongs to a calibration with other {', '.join(other)}: {remedy}")
        self.sums, self.images, self.batches = sums, about["images"], about["batches"]

    def save(self) -> None:
        if self.path is not None:
            about = {"same": self.identity, "images": self.images, "batches": self.batches}
            write_atomically(self.path, save({"sums": self.sums}, {_ENTRY: json.dumps(about, sort_keys=True)}))

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
