# SPDX-License-Identifier: Apache-2.0
"""Cached encoder outputs: of a call, or of single images that can be joined again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from tokenprune.integrations.hf.sequence.record import KEY, EncoderRecord, get_record
from tokenprune.integrations.shared.towers.patch_grid import TracedTokens
from tokenprune.integrations.shared.towers.tower_scores import TowerValues
from tokenprune.kernels.transfer import AsyncValues, JoinedValues

# Hidden states of the blocks are not cached: only the projector reads them, and they are much larger than its output.
_BLOCK_OUTPUTS = ("hidden_states", "attentions")


@dataclass
class KeptOutput:
    """Cached parts of an encoder output.

    Attributes:
        kind: Class of the output.
        values: Tensors and containers of tensors, by name.
        record: Record of the patch.
    """

    kind: type
    values: dict[str, Any]
    record: EncoderRecord

    def __post_init__(self) -> None:
        self._versions = self._get_versions()

    @cached_property
    def bytes(self) -> int:
        """Memory of the tensors, in bytes."""
        storages = (tensor.untyped_storage() for tensor in iter_tensors((self.values, self.record)))
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    @property
    def intact(self) -> bool:
        """True if the tensors are unmodified."""
        return self._versions == self._get_versions()

    def _get_versions(self) -> list[int]:
        return [tensor._version for tensor in iter_tensors(self.values) if not tensor.is_inference()]


class KeptCall(KeptOutput):
    """Output of an encoder call, without the hidden states of the blocks."""

    @classmethod
    def from_output(cls, output: Any) -> KeptCall:
        """Return the cached parts of an encoder output."""
        names = {field.name for field in fields(output)} - {*_BLOCK_OUTPUTS}  # other keys belong to other code
        values = {name: value for name, value in output.items() if name in names}
        if values.get("pooler_output") is not None:
            values.pop("last_hidden_state", None)  # without pooler_output it holds the features
        return cls(type(output), values, get_record(output))

    def make_output(self) -> Any:
        """Return an encoder output with new containers."""
        values = {
            name: type(value)(value) if isinstance(value, (list, dict)) else value
            for name, value in self.values.items()
        }
        return _make_output(self.kind, values, replace(self.record))


@dataclass
class KeptImage(KeptOutput):
    """Features of one image from the projector and from each deepstack level, shape (tokens, width).

    Attributes:
        containers: Container of all images in the output for each of these features: `list`, `tuple` or `Tensor`.
    """

    containers: list[type]

    @classmethod
    def from_output(cls, output: Any, num_images: int) -> list[KeptImage] | None:
        """Split an encoder output into images, or return None if that is not possible."""
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        if any(not isinstance(part, (list, tuple, Tensor)) or len(part) != num_images for part in parts):
            return None
        containers = [Tensor if isinstance(part, Tensor) else type(part) for part in parts]
        counts, record = [features.shape[:-1].numel() for features in parts[0]], get_record(output)
        encoded, looks = _split(record.encoded, counts), record.looks
        if encoded is None or (looks is not None and looks.count != num_images):
            return None
        images = []
        for index, features in enumerate(zip(*parts, strict=True)):
            image_looks = None if looks is None else looks.select(index)
            image_record = EncoderRecord(encoded=encoded[index], looks=image_looks)
            values = {"features": [_detach_storage(tensor) for tensor in features]}
            images.append(cls(type(output), values, image_record, containers))
        return images

    @staticmethod
    def join(images: Sequence[KeptImage]) -> Any:
        """Return the encoder output of several images."""
        first, record = images[0], EncoderRecord()
        parts = zip(*(image.values["features"] for image in images), strict=True)
        features, *deepstack = [
            torch.stack(part) if kind is Tensor else kind(part)
            for kind, part in zip(first.containers, parts, strict=True)
        ]
        if first.record.encoded is not None:
            record = replace(record, encoded=_join(cast(list[TowerValues], [image.record.encoded for image in images])))
        if first.record.looks is not None:
            looks = cast(list[AsyncValues], [image.record.looks for image in images])
            record = replace(record, looks=JoinedValues(looks))
        values = {"pooler_output": features} | ({"deepstack_features": deepstack} if deepstack else {})
        return _make_output(first.kind, values, record)


def _make_output(kind: type, values: dict[str, Any], record: EncoderRecord) -> Any:
    # Outputs of timm towers have required fields for the hidden states that are not cached.
    required = {
        field.name: None for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING
    }
    output = kind(**required | values)
    output[KEY] = record
    return output


def _detach_storage(tensor: Tensor) -> Tensor:
    """Clone a view, so that it does not keep the storage of a larger tensor alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _split(encoded: TowerValues | None, counts: list[int]) -> list[TowerValues | None] | None:
    """Split tower values into images with `counts` tokens, or return None if the counts disagree."""
    if encoded is None:
        return [None] * len(counts)
    traced = encoded.tokens
    if len(traced.cells) != sum(counts):
        return None
    images: list[TowerValues | None] = []
    for index, cells in enumerate(traced.cells.split(counts)):
        values = {key: _detach_storage(value.split(counts)[index]) for key, value in encoded.values.items()}
        tiles = cells[cells[:, 0] >= 0, 0]
        first, end = (int(tiles.min()), int(tiles.max()) + 1) if len(tiles) else (0, 0)
        tokens = TracedTokens(traced.scores.new_empty(0), _shift_tiles(cells, -first), end - first)
        images.append(TowerValues(values, tokens))
    return images


def _join(parts: list[TowerValues]) -> TowerValues:
    values = {key: torch.cat([part.values[key] for part in parts]) for key in parts[0].values}
    cells, tiles = [], 0
    for part in parts:
        cells.append(_shift_tiles(part.tokens.cells, tiles))
        tiles += part.tokens.tiles
    return TowerValues(values, TracedTokens(parts[0].tokens.scores, torch.cat(cells), tiles))


def _shift_tiles(cells: Tensor, offset: int) -> Tensor:
    """Add `offset` to the tile indices of cells (see `TracedTokens`)."""
    tile = cells[:, :1]
    return torch.cat([torch.where(tile < 0, tile, tile + offset), cells[:, 1:]], dim=1)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from iter_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from iter_tensors(element)
    elif is_dataclass(value):
        yield from iter_tensors([getattr(value, field.name) for field in fields(value)])
