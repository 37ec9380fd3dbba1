# SPDX-License-Identifier: Apache-2.0
"""Find the visual tokens of a call and group them into images, videos or tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenprune.budgets.video import Clip
from tokenprune.errors import PlaceholderMismatchError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.alignment import align_per_image
from tokenprune.integrations.hf.sequence.record import record_of
from tokenprune.kernels.compact import partition
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.frames import count_tokens_per_frame, split_into_frames
from tokenprune.selection.segments import Segments

RunsPerImage = Callable[[int, list[tuple[int, int]]], list[int]]
GridOf = Callable[[int], tuple[int, int, int] | None]


class Piece(NamedTuple):
    """The placeholders of one image or video, or of a part that has a budget for itself, before they become a segment.

    columns: long `[n]`, on the host. frames, clip: see `Segments`.
    """

    row: int
    columns: Tensor
    grid: tuple[int, int, int] | None
    modality: str
    frames: list[int] | None
    clip: Clip | None = None


# Arguments of a base model with the seconds of a frame of each video.
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")


class Tempo(NamedTuple):
    """Facts by which budgets know how long the videos of a call last.

    seconds: that a frame of each stands for, such as the decoder sees it; empty where it is not known. joined: sampled
    frames that the decoder sees as one.
    """

    seconds: list[float]
    joined: int = 1

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any], config: Any) -> Tempo:
        """Read the seconds from the arguments of the base model's forward, and `joined` from the model's config."""
        seconds = next((arguments[name] for name in _SECONDS if arguments.get(name) is not None), ())
        vision = getattr(config, "vision_config", None)
        joined = getattr(vision, "temporal_patch_size", None) or getattr(vision, "temporal_merge_size", None) or 1
        return cls(torch.as_tensor(seconds, dtype=torch.float64, device="cpu").flatten().tolist(), joined)


def feature_counts(output: Any) -> list[int] | None:
    """Return the number of features of each image in an encoder's output, or None if it keeps no image apart."""
    features = getattr(output, "pooler_output", None)
    if isinstance(features, (list, tuple)):
        return [math.prod(feature.shape[:-1]) for feature in features]
    return None


def feature_total(output: Any) -> int | None:
    """Return how many features an encoder's output holds in all, or None if that is not known."""
    counts = feature_counts(output)
    if counts is not None:
        return sum(counts)
    features = getattr(output, "pooler_output", None)
    return math.prod(features.shape[:-1]) if isinstance(features, Tensor) else None


def encoding_key(outputs: dict[str, Any]) -> tuple:
    """Return all that segments are found by of the encoder's output for each modality, to tell prompts apart by."""
    facts: list[Any] = []
    for modality, output in outputs.items():
        record = record_of(output)
        facts += modality, repr((feature_counts(output), record.grids, record.frames))
    return tuple(facts)


def check_placeholders(modality: str, placeholders: int, output: Any) -> None:
    """Raise PlaceholderMismatchError where a prompt holds fewer or more placeholders than there are features."""
    features = feature_total(output)
    if features is not None and features != placeholders:
        raise PlaceholderMismatchError(
            f"the prompt holds {placeholders} {modality} placeholders, but the encoder returned {features} features. "
            "A prompt cut by the tokenizer does this: leave out truncation and max_length for prompts with images, "
            "or raise them; and pass as many images as the prompt names"
        )


def find_segments(
    masks: dict[str, Tensor], outputs: dict[str, Any], per: str, device: torch.device, step: int = 1,
    runs_per_image: RunsPerImage | None = None, grid_of: GridOf | None = None, behind_video: int = 0,
    tempo: Tempo | None = None,
) -> Segments | None:  # fmt: skip
    """Group placeholders into segments, with tensors on `device`; None if there are none.

    masks: bool `[B, L]` for each modality, on the host. outputs: the encoder's output for each modality, where known:
    it tells images apart that stand side by side, and carries their grids; without it every unbroken run of
    placeholders is a segment.
    per: "image"; "frame", where each frame of a video is a segment; or "prompt" for one segment a row. step: from one
    placeholder to the next within a run; 2 where ids for the ends of rows stand between. runs_per_image: tells of a
    row's number and the (first, last + 1) of its runs how many each image consists of; None: one.
    grid_of: tells of an image's number of tokens its grid, where nothing else does. behind_video: tokens of a video
    that follow its last frame. tempo: of the videos, where budgets ask for clips.
    Raises UnsupportedSetupError for a video whose frames are not known.
    """
    pieces: list[Piece] = []
    for modality, mask in masks.items():
        rows, columns = mask.nonzero(as_tuple=True)
        if len(rows):
            found = pieces_of(modality, rows, columns, outputs.get(modality), step, grid_of, behind_video)
            if modality == "video" and (tempo is not None or per == "frame"):
                found = _by_frame(found, outputs.get(modality), tempo or Tempo([]), per == "frame")
            pieces += found
    if not pieces:
        return None
    pieces.sort(key=lambda piece: (piece.row, int(piece.columns[0])))
    if runs_per_image is not None:
        pieces = _whole_images(pieces, runs_per_image)
    if per == "prompt":
        pieces = _by_row(pieces)

    row, columns_of, grids, modalities, frames, clips = map(list, zip(*pieces, strict=True))
    counts = list(map(len, columns_of))
    position = torch.nn.utils.rnn.pad_sequence(columns_of, batch_first=True)
    mask = torch.arange(max(counts), device="cpu") < torch.tensor(counts, device="cpu")[:, None]
    ordinal = [place for _, of_row in groupby(row) for place, _ in enumerate(of_row)]
    position, mask = to_device(position, device), to_device(mask, device)
    return Segments(row, ordinal, counts, position, mask, grids, modalities, frames, [] if tempo is None else clips)


def pieces_of(
    modality: str, rows: Tensor, columns: Tensor, output: Any, step: int, grid_of: GridOf | None = None,
    behind_video: int = 0,
) -> list[Piece]:  # fmt: skip
    """Return the pieces of a modality, one with features or an unbroken run each; see `find_segments`.

    rows, columns: long `[n]`, of the modality's placeholders, on the host.
    """
    counts = feature_counts(output)
    grids = record_of(output).grids or []
    if counts is None or sum(counts) != len(rows):
        breaks = (rows.diff() != 0) | (columns.diff() > step)
        ends = (breaks.nonzero().flatten() + 1).tolist()
        counts, grids = [b - a for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)], []
    spans = [(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True) if count]
    of_rows = [int(rows[start]) for start, _ in spans]
    numbers = align_per_image(record_of(output).frames or [], of_rows)
    pieces = []
    for row, (start, end), grid, number in zip(of_rows, spans, align_per_image(grids, of_rows), numbers, strict=True):
        count = end - start
        if grid is None or math.prod(grid) != count:
            grid = grid_of(count) if grid_of is not None and modality == "image" else None
        frames = [count] if modality == "image" else count_tokens_per_frame(count, number or 0, behind_video)
        pieces.append(Piece(row, columns[start:end], grid, modality, frames))
    return pieces


def _by_frame(pieces: list[Piece], output: Any, tempo: Tempo, split: bool) -> list[Piece]:
    """Return pieces that are videos with their clips; `split`: one for each frame."""
    rows = [piece.row for piece in pieces]
    known = record_of(output).frames or []
    # `generate` repeats the caller's numbers for beams, one after the other; what was encoded is known of once.
    once = tempo.seconds[:: max(1, len(tempo.seconds) // max(1, len(known)))]
    found = []
    numbers = zip(align_per_image(known, rows), align_per_image(once, rows), strict=True)
    for piece, (number, each) in zip(pieces, numbers, strict=True):
        clip = Clip(number, None, each, tempo.joined)
        if not split:
            found.append(piece._replace(clip=clip))
            continue
        counts = split_into_frames(len(piece.columns), number or 0)
        if counts is None:
            raise UnsupportedSetupError(
                f"nothing tells which of a video's {len(piece.columns)} tokens belong to which frame: use a Budget "
                'with per="image", which the whole video shares'
            )
        grid = None if piece.grid is None else (1, *piece.grid[1:])
        parts = piece.columns.split(counts)
        found += [
            Piece(piece.row, part, grid, piece.modality, [len(part)], replace(clip, frame=frame))
            for frame, part in enumerate(parts)
        ]
    return found


def _whole_images(pieces: list[Piece], runs_per_image: RunsPerImage) -> list[Piece]:
    whole = []
    for row, of_row in groupby(pieces, key=itemgetter(0)):
        tiles = list(of_row)
        runs = [(int(tile.columns[0]), int(tile.columns[-1]) + 1) for tile in tiles]
        ends = accumulate(numbers := runs_per_image(row, runs))
        for number, end in zip(numbers, ends, strict=True):
            first, *_ = image = tiles[end - number : end]
            if number > 1:
                columns = torch.cat([tile.columns for tile in image])
                first = Piece(row, columns, None, first.modality, [len(columns)])
            whole.append(first)
    return whole


def _by_row(pieces: list[Piece]) -> list[Piece]:
    merged: dict[int, Piece] = {}
    for piece in pieces:
        first = merged.setdefault(piece.row, piece)
        if first is not piece:
            columns = torch.cat([first.columns, piece.columns])
            merged[piece.row] = Piece(piece.row, columns, None, first.modality, None)
    return list(merged.values())


@dataclass(frozen=True)
class Kept:
    """Visual tokens that a cut leaves; a segment of which nothing is left is a segment no more.

    keep: bool `[S, N]`, which are left, none of them padding; counts: its row sums.
    """

    keep: Tensor
    counts: list[int]

    @cached_property
    def alive(self) -> list[int]:
        """The segments that are left, S' of them."""
        return [index for index, count in enumerate(self.counts) if count]

    @cached_property
    def order(self) -> Tensor:
        """long `[S', N']`: which tokens of each are left, in order."""
        return partition(self.segments_of(self.keep))[:, : max(self.counts)]

    @cached_property
    def mask(self) -> Tensor:
        """bool `[S', N']`: False for padding."""
        device = self.keep.device
        return torch.arange(max(self.counts), device=device) < to_device(self.segments_of(self.counts), device)[:, None]

    @property
    def withdraws(self) -> bool:
        """True if nothing is left of some segment."""
        return len(self.alive) < len(self.counts)

    def segments_of(self, values: Any) -> Any:
        """Return those of S `values` (a list, or a tensor `[S, ...]`) whose segments are left."""
        if not self.withdraws:
            return values
        if isinstance(values, Tensor):
            return values[to_device(self.alive, values.device, torch.long)]
        return [values[index] for index in self.alive]

    def follow(self, values: Tensor) -> Tensor:
        """`[S, N, ...]` -> `[S', N', ...]`, zero for padding."""
        values = self.segments_of(values)
        order, mask = self.order.to(values.device), self.mask.to(values.device)
        rows = torch.arange(len(order), device=values.device)[:, None]
        return values[rows, order].masked_fill(~mask.view(*mask.shape, *[1] * (values.ndim - 2)), 0)


def keep_segments(segments: Segments, kept: Kept) -> Segments:
    """Return the segments after a cut."""
    position, counts = kept.follow(segments.position), kept.counts
    grids = [g if new == old else None for g, new, old in zip(segments.grids, counts, segments.counts, strict=True)]
    facts = (segments.row, segments.ordinal, counts, grids, segments.modality, frames_left(segments, counts))
    row, ordinal, counts, *about = map(kept.segments_of, facts)
    # Padding must point at a token that is still there.
    return Segments(row, ordinal, counts, torch.where(kept.mask, position, position[:, :1]), kept.mask, *about)


def frames_left(segments: Segments, counts: list[int]) -> list[list[int] | None]:
    """Return the frames of segments of which `counts` tokens are left: those of a video that was cut are unequal."""
    known = segments.frames or [None] * len(counts)
    return [
        frames if new == old else [new] if modality == "image" and frames is not None else None
        for frames, new, old, modality in zip(known, counts, segments.counts, segments.modality, strict=True)
    ]
