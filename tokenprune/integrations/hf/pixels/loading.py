# SPDX-License-Identifier: Apache-2.0
"""load_image: decode only the pixels of an image file that a budget of visual tokens needs."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from PIL import Image

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError, shorten
from tokenprune.integrations.hf.pixels.marker import find_patch
from tokenprune.integrations.shared.decoding import decode, decode_by_content, find_need, get_full_size
from tokenprune.integrations.shared.resizing import Resizer
from tokenprune.methods.registry import build
from tokenprune.models.processor_settings import SettingsReader
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.settings.max_visual_tokens import LIMITER, check_limit

# Raised by Pillow's readers for damaged files.
DAMAGED = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error)


@contextmanager
def reading_source(source: str | Path | bytes, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn the errors of decoders inside the block into an OptionError that names the file.

    Args:
        source: Path or content of the file.
        kind: "an image" or "a video".
        errors: Further errors of the decoder.
    """
    if not isinstance(source, (str, bytes, os.PathLike)):
        raise OptionError(f"source must be a path or bytes, not {type(source).__name__}. Pass the content of a file.")
    damaged: tuple[type[Exception], ...] = (*DAMAGED, *errors)
    try:
        yield
    except TokenPruneError:
        raise
    except damaged as error:
        name = "these bytes" if isinstance(source, bytes) else shorten(str(source))
        raise OptionError(f"cannot read {name} as {kind}: {error}") from error


def load_image(
    source: str | Path | bytes, *, processor: Any = None, max_visual_tokens: int | None = None
) -> Image.Image:
    """Load an image file for a processor. Large JPEG files are decoded at 1/2, 1/4 or 1/8 of their size where possible.

    The processor makes the same number of tokens as of the complete image. Its pixels differ slightly, because the
    decoder does a part of the resizing. Files of other formats are decoded completely. Orientation tags are applied.

    Args:
        source: Path or content of an image file.
        processor: Processor or image processor that takes the image, patched or not. None: decode the complete image.
        max_visual_tokens: Maximum number of tokens of the image. Default: the budget of the processor's patch. A family
            that limits tokens by a setting of the processor needs a processor patched with the same number.

    Returns:
        The image, in mode RGB.

    Raises:
        OptionError: If the file is not a valid image or the arguments are invalid.
        BudgetError: If `max_visual_tokens` is too small.
        UnsupportedSetupError: If the tokens cannot be limited by the size of the image.
        DecompressionBombError: If the image has more pixels than Pillow allows (`PIL.Image.MAX_IMAGE_PIXELS`).

    Examples:
        >>> import io, transformers
        >>> file = io.BytesIO()
        >>> image.resize((2048, 2048)).save(file, "JPEG")
        >>> qwen = tokenprune.patch_processor(transformers.Qwen2VLImageProcessor(), max_visual_tokens=256)
        >>> tokenprune.load_image(file.getvalue(), processor=qwen).size
        (448, 448)
    """
    if processor is None and max_visual_tokens is not None:
        raise OptionError(f"max_visual_tokens={max_visual_tokens} needs the model's processor. Pass processor=.")
    patch = None if processor is None else find_patch(processor)
    patched: Resizer | None = getattr(patch, "resizer", None)
    resizer = patched
    if max_visual_tokens is not None:
        check_limit(max_visual_tokens, [])
        if patched is None or patched.max_tokens != max_visual_tokens:
            resizer = Resizer(cast(ResizeMethod, build(LIMITER, {})), Budget(tokens=max_visual_tokens), processor)
    has_count = resizer is not None and resizer.max_tokens is not None
    find = partial(find_need, processor, resizer, {}, has_count)

    def open_file() -> Image.Image:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source))

    with reading_source(source, "an image"):
        if resizer is not None and resizer.chooses_by_image:
            rule = resizer.rule
            assert rule is not None  # checked by `chooses_by_image`
            read = SettingsReader(processor)
            return decode_by_content(open_file, resizer, lambda height, width: rule.count(read, height, width, 1))
        with open_file() as file:
            full_size = get_full_size(file)
            image = decode(file, find).convert("RGB")
    if resizer is None or not has_count:
        return image
    # Here the size of the file is known. The processor leaves an image within the budget as it is.
    (image,), _ = resizer.resize([image], {}, sizes=[full_size])
    if resizer is not patched:
        _check_count(image, resizer)
    return image


def _check_count(image: Image.Image, resizer: Resizer) -> None:
    """Raise UnsupportedSetupError if a processor without a patch makes too many tokens of an image."""
    assert resizer.rule is not None and resizer.max_tokens is not None  # checked by Resizer
    tokens = resizer.rule.count(SettingsReader(resizer.processor), image.height, image.width, 1)
    if tokens > resizer.max_tokens:
        raise UnsupportedSetupError(
            f"The size of an image does not limit the tokens of this {type(resizer.image_processor).__name__} to "
            f"{resizer.max_tokens}: it makes {tokens}. Call tokenprune.patch_processor(processor, "
            f"max_visual_tokens={resizer.max_tokens}) first."
        )
