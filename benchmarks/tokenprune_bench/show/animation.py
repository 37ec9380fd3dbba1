# SPDX-License-Identifier: Apache-2.0
"""GIF of kept tokens over several keeps, or over the frames of a video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune_bench.show import layout
from tokenprune_bench.show.side_by_side import Shown

KEEP, FRAMES = "keep", "frames"
KEEPS = "1.0,0.75,0.5,0.35,0.25,0.18,0.1"
_STEP, _LAST = 900, 2500  # milliseconds per image, and of the last image


def check_kind(kind: str, keeps: Sequence[float | int], frames: int) -> None:
    """Check that an animation has several images.

    Args:
        kind: "keep" or "frames".
        keeps: Keeps of the animation.
        frames: Number of input frames.

    Raises:
        OptionError: If the kind is not known, or the animation would have one image.
    """
    if kind not in (KEEP, FRAMES):
        raise OptionError(
            f"--gif {kind!r} is not valid. Pass {KEEP} (an image per keep) or {FRAMES} (an image per frame)."
        )
    if kind == KEEP and len(set(keeps)) < 2:
        raise OptionError(f"--gif {KEEP} needs several keeps. Pass for example --keep {KEEPS}.")
    if kind == FRAMES and len(set(keeps)) > 1:
        raise OptionError(f"--gif {FRAMES} needs one keep. Pass one --keep, or --gif {KEEP}.")
    if kind == FRAMES and frames < 2:
        raise OptionError(f"--gif {FRAMES} needs a video or several images. Use --gif {KEEP} for one image.")


def build_stills(shown: Shown, kind: str, methods: int) -> list[Image.Image]:
    """Return the images of an animation, all of one size.

    Args:
        shown: Output of `show`, with all settings of the first keep first.
        kind: See `check_kind`.
        methods: Number of settings per image.

    Raises:
        OptionError: If there is only one image.
    """
    if kind == KEEP:
        parts = [shown.select_settings(start, start + methods) for start in range(0, len(shown.seen), methods)]
    else:
        parts = [shown.select_frame(index) for index in range(max(panel.frames for panel in shown.panels))]
    if len(parts) < 2:
        raise OptionError(f"The model merges all frames into one. Pass more --frames, or use --gif {KEEP}.")
    rows = [part.lines(part.across) for part in parts]
    caption_height = max(
        layout.get_caption_height(lines, layout.ANIMATED) for lines in rows
    )  # equal heights, so that images do not jump
    return [part.image(layout.ANIMATED, caption_height) for part in parts]


def save(images: Sequence[Image.Image], out: Path) -> None:
    """Write images as an endless GIF.

    Raises:
        TokenPruneError: If the file cannot be written.
    """
    first, *rest = (image.quantize(256, dither=Image.Dither.NONE) for image in images)
    times = [_STEP] * len(rest) + [_LAST]
    try:
        first.save(out, "GIF", save_all=True, append_images=rest, duration=times, loop=0)
    except (OSError, ValueError) as error:
        raise TokenPruneError(f"Cannot write {out}: {error}") from error


__all__ = ["FRAMES", "KEEP", "KEEPS", "build_stills", "check_kind", "save"]
