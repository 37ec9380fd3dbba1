# SPDX-License-Identifier: Apache-2.0
"""Images for the text guard: drawn documents as positives, and photographs from other packages as negatives.

Documents are drawn from one seeded generator: pages, receipts, tables, code, screenshots, slides and forms, light and
dark, in several fonts and sizes. Some look photographed (uneven light, noise, JPEG).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WORDS = (
    "the of and total date from amount invoice please with number report order under street item price page this that "
    "which for not are was his her they have been were water people company results value method table figure section "
    "between model before after tokens during until because several language without against government important"
).split()
FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "DejaVuSans-Bold", "cmr10")
# Background and text color.
PALETTES = (
    ("white", "black"), ("white", "#222244"), ("#fdf6e3", "#073642"), ("#f4f0e6", "#40301a"), ("#1e1e1e", "#d4d4d4"),
    ("#0d1b3d", "#e8eefc"), ("#e8f0d8", "#204020"), ("white", "#666666"),
)  # fmt: skip


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / f"fonts/ttf/{name}.ttf"), size)


def _sentence(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words)).capitalize()


class Sheet:
    """Canvas with a palette and a font."""

    def __init__(self, rng: np.random.Generator, width: int, height: int, letters: int) -> None:
        self.rng, self.width, self.height, self.letters = rng, width, height, letters
        self.paper, self.ink = PALETTES[rng.integers(len(PALETTES))]
        self.image = Image.new("RGB", (width, height), self.paper)
        self.draw = ImageDraw.Draw(self.image)
        self.font = _font(FONTS[rng.integers(len(FONTS))], letters)

    def lines(self, left: int, top: int, right: int, bottom: int, spacing: float = 1.35) -> None:
        """Fill a box with paragraphs."""
        y, left_in_paragraph = float(top), 0
        while y + self.letters < bottom:
            if not left_in_paragraph:
                left_in_paragraph = int(self.rng.integers(3, 12))
                y += self.letters * spacing / 2
            text = _sentence(self.rng, 40)
            while text and self.draw.textlength(text, self.font) > right - left:
                text = text.rpartition(" ")[0]
            left_in_paragraph -= 1
            if not left_in_paragraph:
                text = text[: max(4, int(len(text) * self.rng.uniform(0.3, 1)))]
            self.draw.text((left, y), text, fill=self.ink, font=self.font)
            y += self.letters * spacing


def page(rng: np.random.Generator) -> Image.Image:
    height = int(rng.integers(800, 1700))
    sheet = Sheet(rng, int(height / rng.choice([1.414, 1.29])), height, int(height * rng.uniform(0.012, 0.026)))
    edge, columns = int(sheet.width * rng.uniform(0.06, 0.13)), int(rng.integers(1, 3))
    wide = (sheet.width - edge) // columns
    for column in range(columns):
        sheet.lines(edge + column * wide, edge, column * wide + wide, height - edge)
    return sheet.image


def receipt(rng: np.random.Generator) -> Image.Image:
    letters = int(rng.integers(14, 26))
    rows = int(rng.integers(18, 45))
    sheet = Sheet(rng, letters * 24, int(rows * letters * 1.4), letters)
    sheet.font = _font("DejaVuSansMono", letters)
    for row in range(rows):
        name, price = str(rng.choice(WORDS)).upper(), f"{rng.uniform(0.5, 99):.2f}"
        text = name + price.rjust(max(1, 32 - len(name))) if rng.random() < 0.85 else "-" * 32
        sheet.draw.text((letters, row * letters * 1.4), text, fill=sheet.ink, font=sheet.font)
    return sheet.image


def table(rng: np.random.Generator) -> Image.Image:
    letters, rows, columns = int(rng.integers(14, 24)), int(rng.integers(8, 25)), int(rng.integers(3, 8))
    wide, high = letters * 7, int(letters * rng.uniform(1.5, 2.2))
    sheet = Sheet(rng, columns * wide, rows * high, letters)
    for row in range(rows):
        for column in range(columns):
            box = (column * wide, row * high, column * wide + wide, row * high + high)
            if rng.random() < 0.9:
                sheet.draw.rectangle(box, outline=sheet.ink)
            text = str(rng.choice(WORDS)) if column == 0 or row == 0 else f"{rng.uniform(0, 9999):.1f}"
            sheet.draw.text((box[0] + 4, box[1] + high // 5), text, fill=sheet.ink, font=sheet.font)
    return sheet.image


def code(rng: np.random.Generator) -> Image.Image:
    letters = int(rng.integers(13, 24))
    sheet = Sheet(rng, int(rng.integers(700, 1400)), int(rng.integers(500, 1000)), letters)
    sheet.font, y, indent = _font("DejaVuSansMono", letters), letters, 1
    colours = ("#569cd6", "#ce9178", "#6a9955", sheet.ink) if sheet.paper < "#3" else ("#0000aa", "#880000", sheet.ink)
    while y < sheet.height - letters:
        indent = int(np.clip(indent + rng.integers(-1, 2), 1, 6))
        x = letters * (3 + 2 * indent)
        sheet.draw.text((letters // 2, y), str(y // letters), fill="#888888", font=sheet.font)
        for word in rng.choice(WORDS, int(rng.integers(0, 9))):
            text = f"{word}{rng.choice(['(', ').', ' =', ': ', ','])}"
            sheet.draw.text((x, y), text, fill=str(rng.choice(colours)), font=sheet.font)
            x += int(sheet.draw.textlength(text + " ", sheet.font))
        y += int(letters * 1.4)
    return sheet.image


def screenshot(rng: np.random.Generator) -> Image.Image:
    sheet = Sheet(rng, int(rng.integers(900, 1600)), int(rng.integers(600, 1000)), int(rng.integers(14, 22)))
    wide, high, letters = sheet.width, sheet.height, sheet.letters
    bar = ["#dddddd", "#3b5998", "#2d2d2d"][rng.integers(3)]
    sheet.draw.rectangle((0, 0, wide, 3 * letters), fill=bar)
    for index in range(6):
        sheet.draw.text((20 + index * 8 * letters, letters), str(rng.choice(WORDS)), fill="#999999", font=sheet.font)
    side = int(wide * rng.uniform(0.15, 0.3))
    for row in range(5, high // letters // 2):
        sheet.draw.text((12, row * 2 * letters), _sentence(rng, 2), fill=sheet.ink, font=sheet.font)
    sheet.lines(side + 30, 4 * letters, wide - 30, int(high * rng.uniform(0.6, 0.95)))
    for _ in range(3):
        x, y = int(rng.integers(side, wide - 150)), int(rng.integers(high // 2, high - 60))
        sheet.draw.rounded_rectangle((x, y, x + 140, y + 46), 8, fill="#2878d0")
        sheet.draw.text((x + 20, y + 12), "Submit", fill="white", font=sheet.font)
    return sheet.image


def slide(rng: np.random.Generator) -> Image.Image:
    sheet = Sheet(rng, 1280, 720, int(rng.integers(26, 44)))
    title = _font("DejaVuSans-Bold", 64)
    sheet.draw.text((60, 40), _sentence(rng, 4), fill=sheet.ink, font=title)
    for row in range(int(rng.integers(6, 11))):
        text = "• " + _sentence(rng, int(rng.integers(6, 14)))
        sheet.draw.text((80, 150 + row * sheet.letters * 1.5), text, fill=sheet.ink, font=sheet.font)
    return sheet.image


def form(rng: np.random.Generator) -> Image.Image:
    sheet = Sheet(rng, 850, 1100, int(rng.integers(14, 20)))
    for row in range(24):
        y = 50 + row * 42
        sheet.draw.text((50, y), _sentence(rng, int(rng.integers(1, 4))) + ":", fill=sheet.ink, font=sheet.font)
        sheet.draw.rectangle((330, y - 6, 800, y + 26), outline=sheet.ink)
        if rng.random() < 0.7:
            sheet.draw.text((340, y), _sentence(rng, int(rng.integers(2, 5))), fill="#203080", font=sheet.font)
    return sheet.image


def photographed(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """Simulate a photograph of an image: rotation, uneven light, blur, noise and JPEG compression."""
    image = image.rotate(rng.uniform(-4, 4), Image.Resampling.BICUBIC, fillcolor=(120, 100, 80))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.0)))
    values = np.asarray(image, np.float32)
    high, wide, _ = values.shape
    light = np.linspace(rng.uniform(0.5, 0.9), 1, wide)[None, :] * np.linspace(1, rng.uniform(0.6, 1), high)[:, None]
    values = values * light[..., None] + rng.normal(0, 5, values.shape)
    memory = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(memory, "JPEG", quality=int(rng.integers(50, 90)))
    return Image.open(memory).convert("RGB")


DOCUMENTS = {f.__name__: f for f in (page, receipt, table, code, screenshot, slide, form)}


def documents(num_per_kind: int, seed: int) -> Iterator[tuple[str, Image.Image]]:
    """Yield `each` documents of every kind, every third one photographed."""
    rng = np.random.default_rng(seed)
    for name, draw in DOCUMENTS.items():
        for index in range(num_per_kind):
            image = draw(rng)
            yield (f"{name}, photographed", photographed(rng, image)) if index % 3 == 2 else (name, image)


# From scikit-image, without images of text (page, text, clock), scientific plots and plain patterns.
SCENES = (
    "astronaut camera chelsea coffee coins grass brick gravel hubble_deep_field ihc moon motorcycle_left rocket horse "
    "retina cell"
).split()


def photographs(crops: int, seed: int) -> Iterator[tuple[str, Image.Image]]:
    """Yield each photograph and `crops` of its random crops."""
    import matplotlib
    import skimage
    import sklearn

    folder = Path(skimage.__file__).parent / "data"
    paths = [next(folder.glob(f"{name}.*")) for name in SCENES]
    paths += sorted((Path(sklearn.__file__).parent / "datasets/images").glob("*.jpg"))
    paths.append(Path(matplotlib.get_data_path()) / "sample_data/grace_hopper.jpg")
    rng = np.random.default_rng(seed)
    for path in paths:
        image = Image.open(path).convert("RGB")
        yield path.stem, image
        for _ in range(crops):
            share = rng.uniform(0.4, 0.9)
            wide, high = int(image.width * share), int(image.height * share)
            x, y = int(rng.integers(image.width - wide)), int(rng.integers(image.height - high))
            yield path.stem, image.crop((x, y, x + wide, y + high))
