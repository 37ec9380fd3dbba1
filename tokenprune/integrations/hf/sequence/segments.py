# SPDX-License-Identifier: Apache-2.0
"""Find the visual tokens of a prompt and group them into images, videos or tiles."""

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
from tokenprune.integrations.hf.sequence.record import align_per_image, get_record
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.frames import count_tokens_per_frame, split_into_frames
from tokenprune.selection.segments import Segments

RunsPerImage = Callable[[int, list[tuple[int, int]]], list[int]]
GridOf = Callable[[int], tuple[int, int, int] | None]


class Piece(NamedTuple):
    """Placeholders of an image, a video, or a part with its own budget, before they become a segment.

    Attributes:
        row: Row of the batch.
        columns: Columns of the placeholders, int64, on the host.
        grid: (frames, height, width) in tokens, or None.
        modality: "image" or "video".
        frames: See `Segments`.
        clip: See `Segments`.
    """

    row: int
    columns: Tensor
    grid: tuple[int, int, int] | None
    modality: str
    frames: list[int] | None
    clip: Clip | None = None


# Arguments of a base model that hold the seconds per frame of each video.
_SECONDS = ("second_per_grid_ts", "video_second_per_grid")


class VideoTiming(NamedTuple):
    """Timing of the videos of a call, for budgets per second.

    Attributes:
        seconds: Seconds per decoder frame of each video. Empty if unknown.
        joined: Sampled frames per decoder frame.
    """

    seconds: list[float]
    joined: int = 1

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any], config: Any) -> VideoTiming:
        """Read `seconds` from the arguments of the base model's forward, and `joined` from the model's config."""
        seconds = next((arguments[name] for name in _SECONDS if arguments.get(name) is not None), ())
        vision = getattr(config, "vision_config", None)
        joined = getattr(vision, "temporal_patch_size", None) or getattr(vision, "temporal_merge_size", None) or 1
        return cls(torch.as_tensor(seconds, dtype=torch.float64, device="cpu").flatten().tolist(), joined)


def count_features_per_image(output: Any) -> list[int] | None:
    """Return the number of features of each image, or None if the encoder's output does not separate images."""
    features = getattr(output, "pooler_output", None)
    if isinstance(features, (list, tuple)):
        return [math.prod(feature.shape[:-1]) for feature in features]
    return None


def count_features(output: Any) -> int | None:
    """Return the number of all features of an encoder's output, or None if it is unknown."""
    counts = count_features_per_image(output)
    if counts is not None:
        return sum(counts)
    features = getattr(output, "pooler_output", None)
    return math.prod(features.shape[:-1]) if isinstance(features, Tensor) else None


def build_encoding_key(outputs: dict[str, Any]) -> tuple:
    """Return a cache key of everything that `find_segments` reads of the encoder's outputs."""
    facts: list[Any] = []
    for modality, output in outputs.items():
        record = get_record(output)
        facts += modality, repr((count_features_per_image(output), record.grids, record.frames))
    return tuple(facts)


def check_placeholders(modality: str, placeholders: int, output: Any) -> None:
    """Raise PlaceholderMismatchError if a prompt has fewer or more placeholders than features."""
    features = count_features(output)
    if features is not None and features != placeholders:
        raise PlaceholderMismatchError(
            f"The prompt has {placeholders} {modality} placeholders, but the encoder returned {features} features. "
            "Pass one image per image of the prompt, and tokenize without truncation and max_length."
        )


def find_segments(
    masks: dict[str, Tensor], outputs: dict[str, Any], per: str, device: torch.device, step: int = 1,
    runs_per_image: RunsPerImage | None = None, grid_of: GridOf | None = None, tokens_after_video: int = 0,
    timing: VideoTiming | None = None,
) -> Segments | None:  # fmt: skip
    """Group placeholders into segments. Return None without placeholders.

    Args:
        masks: Placeholder mask of each modality, shape (batch, length), bool, on the host.
        outputs: The encoder's output for each modality, if known. It separates adjacent images and has their grids.
            Without it, each unbroken run of placeholders is a segment.
        per: "image", "frame" (each frame of a video is a segment), or "prompt" (one segment per row).
        device: Device of the segments' tensors.
        step: Distance between adjacent placeholders. It is 2 if other ids separate them.
        runs_per_image: Returns the number of runs of each image, from the row's index and its (first, last + 1) runs.
            None if each run is an image.
        grid_of: Returns the grid of an image from its number of tokens, if it is not known otherwise.
        tokens_after_video: Number of tokens after the last frame of a video.
        timing: Timing of the videos, if a budget needs clips.

    Raises:
        UnsupportedSetupError: If segments per frame are requested, and the frames of a video are unknown.
    """
    pieces: list[Piece] = []
    for modality, mask in masks.items():
        rows, columns = mask.nonzero(as_tuple=True)
        if len(rows):
            modality_pieces = find_pieces(
                modality, rows, columns, outputs.get(modality), step, grid_of, tokens_after_video
            )
            if modality == "video" and (timing is not None or per == "frame"):
                modality_pieces = _add_clips(
                    modality_pieces, outputs.get(modality), timing or VideoTiming([]), per == "frame"
                )
            pieces += modality_pieces
    if not pieces:
        return None
    pieces.sort(key=lambda piece: (piece.row, int(piece.columns[0])))
    if runs_per_image is not None:
        pieces = _join_runs(pieces, runs_per_image)
    if per == "prompt":
        pieces = _join_rows(pieces)

    row, columns_of, grids, modalities, frames, clips = map(list, zip(*pieces, strict=True))
    counts = list(map(len, columns_of))
    position = torch.nn.utils.rnn.pad_sequence(columns_of, batch_first=True)
    mask = torch.arange(max(counts), device="cpu") < torch.tensor(counts, device="cpu")[:, None]
    ordinal = [index for _, of_row in groupby(row) for index, _ in enumerate(of_row)]
    position, mask = to_device(position, device), to_device(mask, device)
    return Segments(row, ordinal, counts, position, mask, grids, modalities, frames, [] if timing is None else clips)


def find_pieces(
    modality: str, rows: Tensor, columns: Tensor, output: Any, step: int, grid_of: GridOf | None = None,
    tokens_after_video: int = 0,
) -> list[Piece]:  # fmt: skip
    """Return the pieces of a modality, one per image with features or per unbroken run. See `find_segments`.

    Args:
        modality: "image" or "video".
        rows, columns: Indices of the placeholders, int64, on the host.
        output: The encoder's output, or None.
        step, grid_of, tokens_after_video: See `find_segments`.
    """
    counts = count_features_per_image(output)
    grids = get_record(output).grids or []
    if counts is None or sum(counts) != len(rows):
        breaks = (rows.diff() != 0) | (columns.diff() > step)
        ends = (breaks.nonzero().flatten() + 1).tolist()
        counts, grids = [b - a for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)], []
    spans = [(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True) if count]
    piece_rows = [int(rows[start]) for start, _ in spans]
    frames_of_pieces = align_per_image(get_record(output).frames or [], piece_rows)
    pieces = []
    for row, (start, end), grid, num_frames in zip(
        piece_rows, spans, align_per_image(grids, piece_rows), frames_of_pieces, strict=True
    ):
        count = end - start
        if grid is None or math.prod(grid) != count:
            grid = grid_of(count) if grid_of is not None and modality == "image" else None
        frames = [count] if modality == "image" else count_tokens_per_frame(count, num_frames or 0, tokens_after_video)
        pieces.append(Piece(row, columns[start:end], grid, modality, frames))
    return pieces


def _add_clips(pieces: list[Piece], output: Any, timing: VideoTiming, split: bool) -> list[Piece]:
    """Add clips to pieces that are videos, and split them into frames if `split`."""
    rows = [piece.row for piece in pieces]
    known = get_record(output).frames or []
    # For beams, `generate` repeats the seconds of each video in adjacent copies. The encoder's record has no copies.
    seconds = timing.seconds[:: max(1, len(timing.seconds) // max(1, len(known)))]
    result = []
    facts = zip(align_per_image(known, rows), align_per_image(seconds, rows), strict=True)
    for piece, (num_frames, seconds_per_frame) in zip(pieces, facts, strict=True):
        clip = Clip(num_frames, None, seconds_per_frame, timing.joined)
        if not split:
            result.append(piece._replace(clip=clip))
            continue
        counts = split_into_frames(len(piece.columns), num_frames or 0)
        if counts is None:
            raise UnsupportedSetupError(
                f"The frames of a video with {len(piece.columns)} tokens are unknown. Use a Budget with "
                'per="image", which spans all frames.'
            )
        grid = None if piece.grid is None else (1, *piece.grid[1:])
        parts = piece.columns.split(counts)
        result += [
            Piece(piece.row, part, grid, piece.modality, [len(part)], replace(clip, frame=frame))
            for frame, part in enumerate(parts)
        ]
    return result


def _join_runs(pieces: list[Piece], runs_per_image: RunsPerImage) -> list[Piece]:
    images = []
    for row, of_row in groupby(pieces, key=itemgetter(0)):
        tiles = list(of_row)
        runs = [(int(tile.columns[0]), int(tile.columns[-1]) + 1) for tile in tiles]
        ends = accumulate(counts := runs_per_image(row, runs))
        for num_runs, end in zip(counts, ends, strict=True):
            first, *_ = image = tiles[end - num_runs : end]
            if num_runs > 1:
                columns = torch.cat([tile.columns for tile in image])
                first = Piece(row, columns, None, first.modality, [len(columns)])
            images.append(first)
    return images


def _join_rows(pieces: list[Piece]) -> list[Piece]:
    merged: dict[int, Piece] = {}
    for piece in pieces:
        first = merged.setdefault(piece.row, piece)
        if first is not piece:
            columns = torch.cat([first.columns, piece.columns])
            merged[piece.row] = Piece(piece.row, columns, None, first.modality, None)
    return list(merged.values())


@dataclass(frozen=True)
class KeptTokens:
    """Visual tokens that a cut keeps. A segment without kept tokens is removed.

    Attributes:
        keep: Mask of kept tokens, shape (segments, tokens), bool. False for padding.
        counts: Number of kept tokens of each segment.
    """

    keep: Tensor
    counts: list[int]

    @cached_property
    def remaining(self) -> list[int]:
        """Indices of segments with kept tokens."""
        return [index for index, count in enumerate(self.counts) if count]

    @cached_property
    def order(self) -> Tensor:
        """Indices of the kept tokens, in order, shape (remaining segments, kept tokens), int64."""
        return partition(self.select_segments(self.keep))[:, : max(self.counts)]

    @cached_property
    def mask(self) -> Tensor:
        """False for padding, shape like `order`, bool."""
        device, counts = self.keep.device, self.select_segments(self.counts)
        if not self.has_padding:
            return torch.ones(len(counts), counts[0], dtype=torch.bool, device=device)
        return torch.arange(max(self.counts), device=device) < to_device(counts, device)[:, None]

    @cached_property
    def has_padding(self) -> bool:
        """True if the remaining segments have different numbers of kept tokens."""
        return len(set(self.select_segments(self.counts))) != 1

    @property
    def drops_segments(self) -> bool:
        """True if a segment has no kept token."""
        return len(self.remaining) < len(self.counts)

    def select_segments(self, values: Any) -> Any:
        """Return the entries of the remaining segments, from a list or a tensor with one entry per segment."""
        if not self.drops_segments:
            return values
        if isinstance(values, Tensor):
            return values[to_device(self.remaining, values.device, torch.long)]
        return [values[index] for index in self.remaining]

    def gather(self, values: Tensor) -> Tensor:
        """Gather values of the kept tokens from shape (segments, tokens, ...). Padding is zero."""
        gathered = gather_tokens(self.select_segments(values), self.order.to(values.device), 1)
        if not self.has_padding:
            return gathered
        mask = self.mask.to(values.device)
        return gathered.masked_fill(~mask.view(*mask.shape, *[1] * (values.ndim - 2)), 0)


def drop_tokens(segments: Segments, kept: KeptTokens) -> Segments:
    """Return the segments after a cut."""
    position, counts = kept.gather(segments.position), kept.counts
    grids = [g if new == old else None for g, new, old in zip(segments.grids, counts, segments.counts, strict=True)]
    facts = (segments.row, segments.ordinal, counts, grids, segments.modality, update_frames(segments, counts))
    row, ordinal, counts, *about = map(kept.select_segments, facts)
    if kept.has_padding:  # padding must point at a kept token
        position = torch.where(kept.mask, position, position[:, :1])
    return Segments(row, ordinal, counts, position, kept.mask, *about)


def update_frames(segments: Segments, counts: list[int]) -> list[list[int] | None]:
    """Return the tokens per frame after a cut to `counts` tokens per segment. None for a video that was cut."""
    known = segments.frames or [None] * len(counts)
    return [
        frames if new == old else [new] if modality == "image" and frames is not None else None
        for frames, new, old, modality in zip(known, counts, segments.counts, segments.modality, strict=True)
    ]
