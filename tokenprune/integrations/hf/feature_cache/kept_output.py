# SPDX-License-Identifier: Apache-2.0
"""An encoder's output as it is kept: as a whole, or image by image, to be joined with others again."""

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

# What the tower's blocks gave, and the projector alone reads: many times as large as what it made of them.
_OF_BLOCKS = ("hidden_states", "attentions")


@dataclass
class KeptOutput:
    """The kept parts of an output. kind: its class. values: tensors, and what holds tensors. record: of the patch."""

    kind: type
    values: dict[str, Any]
    record: EncoderRecord

    def __post_init__(self) -> None:
        self._versions = self._seen()

    @cached_property
    def bytes(self) -> int:
        """Memory that is held for it."""
        storages = (one.untyped_storage() for one in tensors_of((self.values, self.record)))
        return sum({one._cdata: one.nbytes() for one in storages}.values())

    @property
    def intact(self) -> bool:
        """True if its tensors were not written to since."""
        return self._versions == self._seen()

    def _seen(self) -> list[int]:
        return [one._version for one in tensors_of(self.values) if not one.is_inference()]


class Whole(KeptOutput):
    """All of an output but the states of the tower's blocks."""

    @classmethod
    def of(cls, output: Any) -> Whole:
        own = {one.name for one in fields(output)} - {*_OF_BLOCKS}  # beside these, others may have left notes on it
        values = {name: value for name, value in output.items() if name in own}
        if values.get("pooler_output") is not None:
            values.pop("last_hidden_state", None)  # else it is the features
        return cls(type(output), values, get_record(output))

    def output(self) -> Any:
        """Return it as the encoder did, in containers of its own."""
        values = {name: type(x)(x) if isinstance(x, (list, dict)) else x for name, x in self.values.items()}
        return _output(self.kind, values, replace(self.record))


@dataclass
class OfImage(KeptOutput):
    """One image of an output: its features `[n, D]`, the projector's and those of each depth. containers: in what the
    output holds those of all images, `list`, `tuple` or, one upon the other, `Tensor`."""

    containers: list[type]

    @classmethod
    def of(cls, output: Any, images: int) -> list[OfImage] | None:
        """Return each image of an output; None where it does not keep them apart."""
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        if any(not isinstance(part, (list, tuple, Tensor)) or len(part) != images for part in parts):
            return None
        containers = [Tensor if isinstance(part, Tensor) else type(part) for part in parts]
        counts, record = [one.shape[:-1].numel() for one in parts[0]], get_record(output)
        encoded, looks = _split(record.encoded, counts), record.looks
        if encoded is None or (looks is not None and looks.count != images):
            return None
        made = []
        for number, features in enumerate(zip(*parts, strict=True)):
            seen = EncoderRecord(encoded=encoded[number], looks=None if looks is None else looks.select(number))
            made.append(cls(type(output), {"features": [_alone(one) for one in features]}, seen, containers))
        return made

    @staticmethod
    def joined(images: Sequence[OfImage]) -> Any:
        """Return the output of these images."""
        first, record = images[0], EncoderRecord()
        parts = zip(*(one.values["features"] for one in images), strict=True)
        features, *depths = [
            torch.stack(part) if kind is Tensor else kind(part)
            for kind, part in zip(first.containers, parts, strict=True)
        ]
        if first.record.encoded is not None:
            record = replace(record, encoded=_joined(cast(list[TowerValues], [one.record.encoded for one in images])))
        if first.record.looks is not None:
            record = replace(record, looks=JoinedValues(cast(list[AsyncValues], [one.record.looks for one in images])))
        values = {"pooler_output": features} | ({"deepstack_features": depths} if depths else {})
        return _output(first.kind, values, record)


def _output(kind: type, values: dict[str, Any], record: EncoderRecord) -> Any:
    # Outputs of timm's towers have no default for states that are not kept.
    needed = {one.name: None for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    output = kind(**needed | values)
    output[KEY] = record
    return output


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that does not hold on to the memory of those beside it."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _split(encoded: TowerValues | None, counts: list[int]) -> list[TowerValues | None] | None:
    """Return what was read of the visual tokens of each image, `counts` of them; None where these are others."""
    if encoded is None:
        return [None] * len(counts)
    placed = encoded.tokens
    if len(placed.cells) != sum(counts):
        return None
    made: list[TowerValues | None] = []
    for number, cells in enumerate(placed.cells.split(counts)):
        values = {key: _alone(value.split(counts)[number]) for key, value in encoded.values.items()}
        tiles = cells[cells[:, 0] >= 0, 0]
        first, end = (int(tiles.min()), int(tiles.max()) + 1) if len(tiles) else (0, 0)
        made.append(TowerValues(values, TracedTokens(placed.scores.new_empty(0), _shifted(cells, -first), end - first)))
    return made


def _joined(parts: list[TowerValues]) -> TowerValues:
    values = {key: torch.cat([part.values[key] for part in parts]) for key in parts[0].values}
    cells, tiles = [], 0
    for part in parts:
        cells.append(_shifted(part.tokens.cells, tiles))
        tiles += part.tokens.tiles
    return TowerValues(values, TracedTokens(parts[0].tokens.scores, torch.cat(cells), tiles))


def _shifted(cells: Tensor, by: int) -> Tensor:
    """Return cells (see `Placed`) whose tiles have other numbers."""
    tile = cells[:, :1]
    return torch.cat([torch.where(tile < 0, tile, tile + by), cells[:, 1:]], dim=1)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Return all tensors in lists, tuples, dicts and dataclasses within each other."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)
    elif is_dataclass(value):
        yield from tensors_of([getattr(value, one.name) for one in fields(value)])
