# SPDX-License-Identifier: Apache-2.0
"""Videos under methods that act on pixels: their frames are made smaller where the number of tokens follows that."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.resizing import find_token_grid


def smaller_videos(before: Any, name: str, share: float | None) -> type:
    """Return the class of a video processor that makes frames of `share` of the tokens that `before` makes.

    before: one that resizes by `resize(videos=, size=, resample=, factor=)`, as Qwen's do, whose tokens are `factor`
    pixels on a side; of any other, a video raises UnsupportedSetupError, as it does where nothing is to be resized.
    name: of the method. share: None where the budget is a number of tokens of an image: then a video raises it too.
    """
    own = next((one.resize for one in before.__mro__ if "resize" in vars(one)), None)
    follows = own is not None and "factor" in inspect.signature(own).parameters

    @functools.wraps(before.preprocess)
    def preprocess(self: Any, videos: Any, *args: Any, **kwargs: Any) -> Any:
        if share is None:
            raise UnsupportedSetupError(
                f"{name}: keep is a number of tokens of an image, which says nothing of a video; give a share, or give "
                f"{name} videos=False to leave videos as they are"
            )
        if not follows:
            raise UnsupportedSetupError(
                f"{name}: {before.__name__} makes as many tokens of a small video as of a large one; give {name} "
                'videos=False to leave videos as they are, or use "uniform" with Budget(keep=..., per="frame")'
            )
        if kwargs.get("do_resize", self.do_resize) is False:
            raise UnsupportedSetupError(f"{name}: do_resize=False leaves nothing to shrink in a video")
        return before.preprocess(self, videos, *args, **kwargs)

    def resize(self: Any, *, videos: Any, size: Any, resample: Any, factor: int, **kwargs: Any) -> Any:
        full = before.resize(self, videos=videos, size=size, resample=resample, factor=factor, **kwargs)
        assert share is not None  # see `preprocess`
        rows, columns = (side // factor for side in full.shape[-2:])
        small = tuple(side * factor for side in find_token_grid(rows, columns, share))
        if small == tuple(full.shape[-2:]):
            return full
        # From the frames as they came in, by what any processor resizes with.
        plain = next(one for one in before.__mro__ if "resize" in vars(one) and one.resize is not own)
        return plain.resize(self, image=videos, size=type(size)(height=small[0], width=small[1]), resample=resample)

    names = {"preprocess": preprocess, "__module__": before.__module__} | ({"resize": resize} if follows else {})
    return type(before.__name__, (before,), names)
