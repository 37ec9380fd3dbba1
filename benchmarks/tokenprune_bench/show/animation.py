# SPDX-License-Identifier: Apache-2.0
"""A GIF of what is kept: over several keeps, or over the frames of a video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune_bench.show import layout
from tokenprune_bench.show.side_by_side import Shown

KEEP, FRAMES = "keep", "frames"
KEEPS = "1.0,0.75,0.5,0.35,0.25,0.18,0.1"
_STEP, _LAST = 900, 2500  # milliseconds of each image, and of the last one


def check_kind(kind: str, keeps: Sequence[float | int], frames: int) -> None:
    """Raise OptionError for a kind of animation that is not known, or that would not move.

    kind: over what it moves. keeps: that it would show. frames: of what is shown.
    """
    if kind not in (KEEP, FRAMES):
        raise OptionError(f"--gif {kind!r}: write {KEEP} (an image for each keep) or {FRAMES} (for each video frame)")
    if kind == KEEP and len(set(keeps)) < 2:
        raise OptionError(f"--gif {KEEP} moves over several keeps: name them with commas, such as --keep {KEEPS}")
    if kind == FRAMES and len(set(keeps)) > 1:
        raise OptionError(f"--gif {FRAMES} moves over the frames of a video at one keep: name one, or use --gif {KEEP}")
    if kind == FRAMES and frames < 2:
        raise OptionError(f"--gif {FRAMES} needs a video or several images, and this is one image: use --gif {KEEP}")


def stills(shown: Shown, kind: str, methods: int) -> list[Image.Image]:
    """Return the images of an animation, of one size. kind: see `check_kind`. methods: how many settings each image
    shows; those of the first keep come first. Raises OptionError for a single image."""
    if kind == KEEP:
        parts = [shown.of_settings(start, start + methods) for start in range(0, len(shown.seen), methods)]
    else:
        parts = [shown.of_frame(number) for number in range(max(panel.frames for panel in shown.panels))]
    if len(parts) < 2:
        raise OptionError(f"the model has all frames as one: give it more (--frames), or use --gif {KEEP}")
    rows = [one.lines(one.across) for one in parts]
    least = max(layout.deepest(lines, layout.ANIMATED) for lines in rows)  # nothing jumps where a caption is longer
    return [one.image(layout.ANIMATED, least) for one in parts]


def save(images: Sequence[Image.Image], out: Path) -> None:
    """Write images as a GIF that goes on for ever; raises TokenPruneError where it cannot be written."""
    first, *rest = (image.quantize(256, dither=Image.Dither.NONE) for image in images)
    times = [_STEP] * len(rest) + [_LAST]
    try:
        first.save(out, "GIF", save_all=True, append_images=rest, duration=times, loop=0)
    except (OSError, ValueError) as error:
        raise TokenPruneError(f"cannot write {out}: {error}") from error


__all__ = ["FRAMES", "KEEP", "KEEPS", "check_kind", "save", "stills"]
