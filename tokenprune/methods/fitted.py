# SPDX-License-Identifier: Apache-2.0
"""Values that are fitted to a model, their files, and the `fit` attribute of the methods that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from tokenprune.errors import OptionError, require
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.files import File, describe_error, write_atomically

if TYPE_CHECKING:
    from torch import Tensor


class LazyFit:
    """Descriptor for a method's `fit` that lives in tokenprune-bench and is imported on access."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, method: Any, cls: type) -> Callable[..., Any]:
        return getattr(require(self.module, "fitting"), self.name)


class FittedFile:
    """Base class of tensors that are fitted to one model and stored in a safetensors file.

    Attributes:
        kind: Kind of the file, stored in its metadata.
        command: Arguments of `tokenprune` that write the file, such as "fit hawk".
        model: `fingerprint` of the decoder.
    """

    kind: ClassVar[str]
    command: ClassVar[str]

    model: str

    def pack(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors and the metadata of the file. `save` adds the kind and the model."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Self | None:
        """Return the values of a file, or None if they are not valid. May raise KeyError or ValueError."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            OptionError: If the file cannot be written.
        """
        from safetensors.torch import save

        tensors, metadata = self.pack()
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomically(Path(path), save(tensors, {"kind": self.kind, **metadata, "model": self.model}))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`.

        Raises:
            OptionError: If the file is missing, damaged or of another kind.
        """
        try:
            tensors, metadata = File.from_path(path).tensors()
            is_ours = metadata.get("kind") == cls.kind
            fitted = cls.unpack(tensors, metadata) if is_ours else None
        except (OSError, KeyError, ValueError) as error:
            raise OptionError(
                f"cannot read {path}, a file of `tokenprune {cls.command}`: {describe_error(error)}"
            ) from error
        if not is_ours:
            raise OptionError(f"{path} was not written by `tokenprune {cls.command}`")
        if fitted is None:
            raise OptionError(f"{path} is damaged. Write it again with `tokenprune {cls.command}`.")
        return fitted

    def check_decoder(self, name: str, path: str | Path, decoder: torch.nn.Module) -> None:
        """Raise OptionError if the values were fitted to another decoder.

        Args:
            name: Name of the method.
            path: File that the values were read from.
            decoder: Decoder of the patched model.
        """
        if self.model != compute_fingerprint(decoder):
            raise OptionError(
                f"{name}: {path} was fitted to another model or dtype. Run `tokenprune {self.command}` with this model."
            )


@dataclass(frozen=True, eq=False)
class FittedTable(FittedFile):
    """Base class of tables that are fitted to one model.

    Attributes:
        dims: Number of dimensions of the table.
        table: The fitted values, float32.
        layer: Decoder layer that was observed, or 0 if the table does not depend on one layer.
        model: `fingerprint` of the decoder.
    """

    dims: ClassVar[int] = 2

    table: torch.Tensor
    layer: int
    model: str

    def pack(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        return {"table": self.table}, {"layer": str(self.layer)}

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Self | None:
        table = tensors["table"]
        if table.ndim != cls.dims or not table.numel() or not bool(table.isfinite().all() & (table >= 0).all()):
            return None
        return cls(table.float(), int(metadata["layer"]), metadata["model"])
