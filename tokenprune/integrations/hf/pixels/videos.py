# SPDX-License-Identifier: Apache-2.0
"""Shrink the frames of videos for methods on pixels."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.resizing import find_token_grid


def build_video_class(base: Any, name: str, share: float | None) -> type:
    """Return a subclass of a video processor whose frames have `share` of the tokens.

    Its `preprocess` raises UnsupportedSetupError if `base` cannot shrink videos, or if `share` is None.

    Args:
        base: Class of the video processor. It must resize by `resize(videos=, size=, resample=, factor=)` as Qwen's
            video processors do, where a token covers `factor` x `factor` pixels.
        name: Name of the method, for errors.
        share: Share of the tokens. None if the budget is a number of tokens per image.
    """
    base_resize = next((cls.resize for cls in base.__mro__ if "resize" in vars(cls)), None)
    can_shrink = base_resize is not None and "factor" in inspect.signature(base_resize).parameters

    @functools.wraps(base.preprocess)
    def preprocess(self: Any, videos: Any, *args: Any, **kwargs: Any) -> Any:
        if share is None:
            raise UnsupportedSetupError(
                f"{name}: keep is a number of tokens per image, which does not apply to videos. Pass a share, or set "
                f"videos=False on {name} to leave videos unchanged."
            )
        if not can_shrink:
            raise UnsupportedSetupError(
                f"{name}: {base.__name__} makes as many tokens of a small video as of a large one. Set videos=False on "
                f'{name}, or use "uniform" with Budget(keep=..., per="frame").'
            )
        if kwargs.get("do_resize", self.do_resize) is False:
            raise UnsupportedSetupError(f"{name} cannot shrink videos with do_resize=False. Set do_resize=True.")
        return base.preprocess(self, videos, *args, **kwargs)

    def resize(self: Any, *, videos: Any, size: Any, resample: Any, factor: int, **kwargs: Any) -> Any:
        frames = base.resize(self, videos=videos, size=size, resample=resample, factor=factor, **kwargs)
        assert share is not None  # checked by `preprocess`
        rows, columns = (side // factor for side in frames.shape[-2:])
        small = tuple(side * factor for side in find_token_grid(rows, columns, share))
        if small == tuple(frames.shape[-2:]):
            return frames
        # Resize the original frames with the generic method of the base class.
        generic = next(cls for cls in base.__mro__ if "resize" in vars(cls) and cls.resize is not base_resize)
        return generic.resize(self, image=videos, size=type(size)(height=small[0], width=small[1]), resample=resample)

    names = {"preprocess": preprocess, "__module__": base.__module__} | ({"resize": resize} if can_shrink else {})
    return type(base.__name__, (base,), names)
