# SPDX-License-Identifier: Apache-2.0
"""Extract drawings of the named things from the color font Noto Color Emoji (Debian: fonts-noto-color-emoji).

python benchmarks/experiments/training/qwen/emoji.py NotoColorEmoji.ttf runs/emoji.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from qwen_vocabulary import THINGS

SIZE = 109  # the only size of the font's bitmaps


def render(font: ImageFont.FreeTypeFont, code: int) -> np.ndarray:
    """Return a drawing, cropped to its opaque part, as a square of bytes, shape (128, 128, 4)."""
    canvas = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(canvas).text((12, 16), chr(code), font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        raise SystemExit(f"The font lacks a drawing of U+{code:X}.")
    drawing = canvas.crop(box)
    square = Image.new("RGBA", (max(drawing.size),) * 2)
    square.paste(drawing, ((square.width - drawing.width) // 2, (square.height - drawing.height) // 2))
    return np.asarray(square.resize((128, 128), Image.LANCZOS))


def main() -> None:
    font = ImageFont.truetype(sys.argv[1], SIZE)
    drawings = {name: render(font, code) for name, code in THINGS.items()}
    Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(sys.argv[2], **drawings)


if __name__ == "__main__":
    main()
