# SPDX-License-Identifier: Apache-2.0
"""Files of what was fitted to a model, and the `fit` of the methods that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError

from tokenprune.errors import OptionError, require
from tokenprune.models.fingerprint import fingerprint
from tokenprune.selection.files import File, reason


class LazyFit:
    """Stand for a method's `fit` that runs the whole model, and so lives in tokenprune-bench: it is imported when `fit`
    is read."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, method: Any, cls: type) -> Callable[..., Any]:
        return getattr(require(self.module, "fitting"), self.name)


@dataclass(frozen=True, eq=False)
class FittedTable:
    """Base of what was fitted. table: float32. layer: decoder layer at which it was read; 0 where that says nothing.
    model: `fingerprint` of the decoder.

    kind: name of the kind of file, which the file holds. command: the command that writes it. dims: of the table.
    """

    kind: ClassVar[str]
    command: ClassVar[str]
    dims: ClassVar[int] = 2

    table: torch.Tensor
    layer: int
    model: str

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        metadata = {"kind": self.kind, "layer": str(self.layer), "model": self.model}
        try:
            save_file({"table": self.table.float().contiguous()}, str(path), metadata)
        except (OSError, SafetensorError) as error:
            raise OptionError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; raises OptionError for any other file."""
        try:
            tensors, metadata = File.of(path).tensors()
            if metadata.get("kind") != cls.kind:
                raise OptionError(f"{path} was not made by `tokenprune {cls.command}`")
            table = tensors["table"]
            if table.ndim != cls.dims or not table.numel() or not bool(table.isfinite().all() & (table >= 0).all()):
                raise OptionError(f"{path} is damaged: make it anew with `tokenprune {cls.command}`")
            return cls(table.float(), int(metadata["layer"]), metadata["model"])
        except (OSError, KeyError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"cannot read {path}, which `tokenprune {cls.command}` makes: {reason(error)}") from error

    def check_decoder(self, name: str, path: str | Path, decoder: torch.nn.Module) -> None:
        """Raise OptionError if this was fitted to another decoder. name: of the method."""
        if self.model != fingerprint(decoder):
            raise OptionError(
                f"{name}: {path} was fitted to another model (or to this one in another dtype): run `tokenprune "
                f"{self.command}` with this model"
            )
