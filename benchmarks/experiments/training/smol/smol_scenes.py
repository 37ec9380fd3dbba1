# SPDX-License-Identifier: Apache-2.0
"""Draw images of 336 x 336 pixels for the third demo model: shapes, photographs with items, pages, and charts.

Each scene has a sort in `SORTS`. Photographs come from installed packages and from the Debian package
lomiri-wallpapers-16.04, unpacked in the folder named by TOKENPRUNE_PHOTOS ("/" if it is installed).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "benchmarks/experiments/training/qwen"))

from native_scenes import Canvas, NativeScene, _letters, backdrop, clear_of_middle, quadrant
from tokenprune_demo.backgrounds import BACKGROUNDS, PHOTOS
from tokenprune_demo.scenes import COLORS, LARGE, TINY, WORDS, Item, SceneQuestion

SIZE = 336
SORTS = ("shapes", "photo", "sparse", "sign", "document", "chart")
WEIGHTS = (0.34, 0.24, 0.16, 0.1, 0.08, 0.08)
KINDS = ("colour", "presence", "position", "count", "digits", "word", "thing", "sparse", "document", "chart")
# Things that no photograph below shows, and that differ from each other at 36 pixels.
NAMES = tuple(
    "rabbit panda lion cow pig frog monkey penguin owl bee butterfly snail spider turtle octopus crab fish elephant "
    "giraffe cactus mushroom apple banana strawberry pineapple carrot pizza burger cake donut bicycle airplane "
    "umbrella key book guitar gift crown bell robot".split()
)
_DEBIAN = "lomiri-wallpapers-16.04/usr/share/backgrounds/"
SMOL_PHOTOS = {
    "train": (
        *PHOTOS["train"],
        _DEBIAN + "Picture_0B_by_freespace.jpg",
        _DEBIAN + "aitzgorri_by_Aitzol_Berasategi.jpg",
        _DEBIAN + "friends_by_Aitzol_Berasategi.jpg",
        _DEBIAN + "picosdeeuropa_by_Aitzol_Berasategi.jpg",
        _DEBIAN + "seeding_by_Clements_Engelhardt.jpg",
        _DEBIAN + "sunset_by_Aitzol_Berasategi.jpg",
    ),
    "heldout": (
        *PHOTOS["heldout"],
        _DEBIAN + "Picture_1A_by_freespace.jpg",
        _DEBIAN + "Wine_by_Jakkub_Mede.jpg",
        _DEBIAN + "life_by_Aitzol_Berasategi.jpg",
    ),
}
# Photographs have round cups, square bricks and flags with stars. Over a photograph, only these shapes are counted or
# may be absent.
UNLIKE_PHOTOS = ("triangle",)
_TEXT_SIZES = (9, 10, 11)


@cache
def photographs(split: str = "train") -> tuple[Image.Image, ...]:
    """Return the installed photographs of a split, resized to 448 to 672 pixels on the shorter side."""
    photos = []
    for name in SMOL_PHOTOS[split]:
        package, _, rest = name.partition("/")
        if name.startswith(_DEBIAN):
            path = Path(os.environ.get("TOKENPRUNE_PHOTOS", "/")) / rest
        else:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                continue
            path = Path(spec.origin).parent / rest
        if path.exists():
            with Image.open(path) as file:
                photo = file.convert("RGB")
            scale = float(np.clip(min(photo.size), 448, 672)) / min(photo.size)
            photos.append(photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.LANCZOS))
    return tuple(photos)


def draw(rng: np.random.Generator, photos: Sequence[Image.Image] = (), kind_of_scene: str | None = None) -> NativeScene:
    """Draw a scene with its questions, of a sort in `SORTS` (None: random) or "crowds" (for training)."""
    sort = kind_of_scene or SORTS[int(rng.choice(len(SORTS), p=WEIGHTS))]
    return {
        "shapes": _shapes,
        "crowds": _crowds,
        "photo": _photo,
        "sparse": _sparse,
        "sign": _sign,
        "document": _document,
        "chart": _chart,
    }[sort](rng, photos)


def draw_crowd(rng: np.random.Generator, photos: Sequence[Image.Image] = ()) -> NativeScene:
    """Draw as many items of all sorts as fit, or a page, or a chart, for training the tower."""
    sort = rng.random()
    if sort < 0.2:
        return _document(rng, photos) if sort < 0.1 else _chart(rng, photos)
    canvas, background = _start(rng, photos, BACKGROUNDS[int(rng.choice(4, p=(0.15, 0.15, 0.2, 0.5)))])
    for sort in rng.choice(5, int(rng.integers(8, 32)), p=(0.24, 0.1, 0.42, 0.1, 0.14)):
        canvas.scale = float(rng.uniform(0.85, 2.0))
        if sort == 0:
            canvas.shape(_one(rng, LARGE), _one(rng, COLORS))
        elif sort == 1:
            canvas.shape(_one(rng, TINY), _one(rng, COLORS))
        elif sort == 2:
            canvas.thing(_one(rng, NAMES))
        elif sort == 3:
            canvas.text("digit", str(rng.integers(10)))
        else:
            canvas.text("sign", _one(rng, WORDS))
    return _scene(canvas, background)


def _one(rng: np.random.Generator, options) -> str:
    options = tuple(options)
    return options[int(rng.integers(len(options)))]


def _some(rng: np.random.Generator, options, count: int) -> list[str]:
    return [str(option) for option in rng.choice(tuple(options), count, replace=False)]


def _start(rng: np.random.Generator, photos, background: str) -> tuple[Canvas, str]:
    if background == "photo" and not photos:
        background = "texture"
    return Canvas(rng, backdrop(rng, background, SIZE, SIZE, photos), 1.5), background


def _scene(canvas: Canvas, background: str, questions: Sequence[SceneQuestion] = ()) -> NativeScene:
    return NativeScene(np.stack(canvas.frames), background, 1.5, canvas.items, canvas.owner, list(questions))


def _ask(kind: str, text: str, answer: str, *items: Item) -> SceneQuestion:
    return SceneQuestion(kind, text, answer, tuple(item.box for item in items))


def _clear(x: float, y: float) -> bool:
    return clear_of_middle(x, y, SIZE, SIZE)


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _read(items: Sequence[Item]) -> list[SceneQuestion]:
    """Return questions about a digit or sign that appears once."""
    out = []
    for sort, kind, text in (
        ("digit", "digits", "which digit is written?"),
        ("sign", "word", "what does the sign say?"),
    ):
        matches = [item for item in items if item.what == sort]
        if len(matches) == 1:
            out.append(_ask(kind, text, matches[0].value, matches[0]))
    return out


def _presence(rng: np.random.Generator, present: dict[str, list[Item]], absent: Sequence[str]) -> list[SceneQuestion]:
    """Return equally many questions about present and absent names."""
    count = min(len(present), len(absent), 2)
    yes = [_ask("presence", f"is there {_a(name)}?", "yes", *present[name]) for name in _some(rng, present, count)]
    return yes + [_ask("presence", f"is there {_a(name)}?", "no") for name in _some(rng, absent, count)]


def _groups(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Return the items by shape or thing name."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        if item.what in LARGE or item.what == "thing":
            groups.setdefault(item.value if item.what == "thing" else item.what, []).append(item)
    return groups


def _look_up(groups: dict[str, list[Item]]) -> list[SceneQuestion]:
    """Return color and position questions about items that appear once."""
    out = []
    for name, group in groups.items():
        if len(group) == 1:
            if group[0].what != "thing":
                out.append(_ask("colour", f"what color is the {name}?", group[0].value, group[0]))
            if _clear(*group[0].center):
                out.append(_ask("position", f"where is the {name}?", quadrant(group[0], SIZE, SIZE), group[0]))
    return out


def _shapes(rng: np.random.Generator, photos) -> NativeScene:
    """Draw three to eight large shapes on any background, a digit and a sign. One shape appears up to four times."""
    canvas, background = _start(rng, photos, BACKGROUNDS[int(rng.choice(4, p=(0.2, 0.2, 0.3, 0.3)))])
    fair = UNLIKE_PHOTOS if background == "photo" else LARGE
    crowd, count = _one(rng, fair), int(rng.integers(5))
    singles = _some(rng, [sort for sort in LARGE if sort != crowd], 3 if count == 0 else int(rng.integers(2, 4)))
    for sort in [*singles, *[crowd] * count]:
        canvas.scale = float(rng.uniform(1.2, 1.55))
        canvas.shape(sort, _one(rng, COLORS), _clear if sort != crowd or count == 1 else None)
    canvas.scale = float(rng.uniform(1.3, 1.8))
    canvas.text("digit", str(rng.integers(10)))
    canvas.text("sign", _one(rng, WORDS))
    groups = _groups(canvas.items)
    crowd_items = groups.get(crowd, [])
    questions = [*_look_up(groups), *_read(canvas.items)]
    questions.append(_ask("count", f"how many {crowd}s?", str(len(crowd_items)), *crowd_items))
    known = {sort: group for sort, group in groups.items() if sort in fair}
    questions += _presence(rng, known, [sort for sort in fair if sort not in groups])
    return _scene(canvas, background, questions)


def _crowds(rng: np.random.Generator, photos) -> NativeScene:
    """Draw one to three shapes, each up to four times, on a drawn background, with count questions for all shapes."""
    canvas, background = _start(rng, (), BACKGROUNDS[int(rng.choice(3))])
    kinds = _some(rng, LARGE, int(rng.integers(1, 4)))
    for sort in rng.permutation([sort for sort in kinds for _ in range(int(rng.integers(1, 5)))]):
        canvas.scale = float(rng.uniform(1.2, 1.55))
        canvas.shape(str(sort), _one(rng, COLORS))
    groups = _groups(canvas.items)
    by_shape = {sort: groups.get(sort, []) for sort in LARGE}
    questions = [
        _ask("count", f"how many {sort}s?", str(len(shape_items)), *shape_items)
        for sort, shape_items in by_shape.items()
    ]
    return _scene(canvas, background, [*_look_up(groups), *questions])


def _photo(rng: np.random.Generator, photos) -> NativeScene:
    """Draw two to four things and shapes of varied sizes on a photograph."""
    canvas, background = _start(rng, photos, "photo")
    things = int(rng.integers(1, 4))
    names = [*_some(rng, NAMES, things), *_some(rng, LARGE, int(rng.integers(things == 1, 3 - (things == 3))))]
    for name in names:
        if name in LARGE:
            canvas.scale = float(rng.uniform(1.1, 1.7))
            canvas.shape(name, _one(rng, COLORS), _clear)
        else:
            canvas.scale = float(rng.uniform(1.05, 1.9))
            canvas.thing(name, _clear)
    groups = _groups(canvas.items)
    present = {name: group for name, group in groups.items() if group[0].what == "thing"}
    absent = _some(rng, [name for name in NAMES if name not in present], 2)
    questions = [*_look_up(groups), *_presence(rng, present, absent)]
    corners = {name: quadrant(group[0], SIZE, SIZE) for name, group in present.items()}
    for name, corner in corners.items():
        if len(present) == 1:
            questions.append(_ask("thing", "which thing is shown?", name, *present[name]))
        elif list(corners.values()).count(corner) == 1:
            questions.append(_ask("thing", f"which thing is {corner}?", name, *present[name]))
    return _scene(canvas, background, questions)


def _sparse(rng: np.random.Generator, photos) -> NativeScene:
    """Draw one thing or shape on a photograph, covering 1 to 6 % of the image."""
    canvas, background = _start(rng, photos, "photo")
    if rng.random() < 0.5:
        canvas.scale = float(rng.uniform(0.95, 1.8))
        item = canvas.shape(_one(rng, LARGE), _one(rng, COLORS))
        text = f"what color is the {item.what}?" if item else ""
    else:
        canvas.scale = float(rng.uniform(1.05, 1.64))
        item, text = canvas.thing(_one(rng, NAMES)), "which thing is shown?"
    return _scene(canvas, background, [_ask("sparse", text, item.value, item)] if item else [])


def _sign(rng: np.random.Generator, photos) -> NativeScene:
    """Draw a word, a digit or both on a photograph."""
    canvas, background = _start(rng, photos, "photo")
    which = int(rng.integers(3))
    for index, (sort, text) in enumerate((("sign", _one(rng, WORDS)), ("digit", str(rng.integers(10))))):
        if which in (index, 2):
            canvas.scale = float(rng.uniform(1.3, 2.4))
            canvas.text(sort, text)
    return _scene(canvas, background, _read(canvas.items))


@cache
def _lines(width: int) -> tuple[str, ...]:
    words = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return tuple(textwrap.wrap(" ".join(words.split()), width))


@lru_cache(maxsize=4096)
def _line(text: str, size: int) -> np.ndarray:
    font = ImageFont.load_default(size)
    mask = Image.new("L", (SIZE, size + 4))
    ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=font)
    return np.asarray(mask)


def _blend(pixels: np.ndarray, color, mask: np.ndarray) -> None:
    """Paint a color through a mask onto pixels, in place."""
    part = np.float32(1 / 255) * mask[..., None]
    pixels[:] = (pixels + (np.asarray(color, np.float32) - pixels) * part).astype(np.uint8)


def _paper(rng: np.random.Generator, dark: bool) -> np.ndarray:
    color = rng.integers(15, 50, 3) if dark else 255 - rng.integers(0, 30, 3)
    return np.broadcast_to(color.astype(np.uint8), (SIZE, SIZE, 3)).copy()


def _print(canvas: Canvas, sort: str, text: str, size: int, ink, x: int, y: int) -> Item:
    """Write a text on the page."""
    mask, _, ends = _letters(text, size, False)
    h, w = mask.shape
    x = min(x, SIZE - w)
    _blend(canvas.frames[0][y : y + h, x : x + w], ink, mask)
    letters = tuple((a + x, b + x) for a, b in ends)
    return canvas.keep(Item(sort, text, (x, y, x + w, y + h), letters), np.full_like(mask, 255))


def _document(rng: np.random.Generator, photos) -> NativeScene:
    """Draw a page with gray lines of the license text, a title and a page number."""
    dark = bool(rng.random() < 0.2)
    canvas = Canvas(rng, _paper(rng, dark), 1.5)
    size, margin = int(rng.choice(_TEXT_SIZES)), int(rng.choice((12, 18, 24, 30)))
    grey = (int(rng.integers(110, 180)),) * 3 if dark else (int(rng.integers(70, 150)),) * 3
    ink = 255 - rng.integers(0, 30, 3) if dark else rng.integers(0, 60, 3)
    head = int(rng.integers(30, 47))
    title = _print(
        canvas, "sign", _one(rng, WORDS), head, ink, int(rng.integers(margin, 220)), int(rng.integers(10, 40))
    )
    foot = int(rng.integers(20, 29))
    column = (margin, SIZE // 2 - foot // 2, SIZE - margin - foot)[rng.integers(3)]
    page_number = _print(
        canvas, "digit", str(rng.integers(1, 10)), foot, ink, column, SIZE - foot - int(rng.integers(6, 16))
    )
    lines = _lines((SIZE - 2 * margin) * 2 // size)
    y, line_index = title.box[3] + int(rng.integers(6, 20)), int(rng.integers(len(lines)))
    while y + size + 8 < page_number.box[1]:
        if rng.random() > 0.1:  # otherwise the end of a paragraph
            strip = _line(lines[line_index % len(lines)], size)[:, : SIZE - 2 * margin]
            _blend(canvas.frames[0][y : y + strip.shape[0], margin : margin + strip.shape[1]], grey, strip)
        line_index, y = line_index + 1, y + size + 3
    questions = (
        _ask("document", "what is the title?", title.value, title),
        _ask("document", "what is the page number?", page_number.value, page_number),
    )
    return _scene(canvas, "document", questions)


def _chart(rng: np.random.Generator, photos) -> NativeScene:
    """Draw three to five colored bars of clearly different heights. Each is an item "bar" with its color."""
    dark = bool(rng.random() < 0.25)
    canvas = Canvas(rng, _paper(rng, dark), 1.5)
    count, left, top = int(rng.integers(3, 6)), int(rng.integers(24, 60)), int(rng.integers(16, 60))
    right, bottom = SIZE - int(rng.integers(10, 40)), SIZE - int(rng.integers(24, 60))
    image = Image.fromarray(canvas.frames[0])
    pen, rule, ink = ImageDraw.Draw(image), (90,) * 3 if dark else (205,) * 3, (225,) * 3 if dark else (40,) * 3
    font = ImageFont.load_default(10)
    for tick, y in enumerate(np.linspace(bottom, top, int(rng.integers(4, 7))).astype(int).tolist()):
        pen.line((left, y, right, y), fill=rule)
        pen.text((left - 18, y - 6), str(10 * tick), fill=ink, font=font)
    heights = rng.permutation(np.cumsum(rng.uniform(0.09, 0.9 / count, count)) + rng.uniform(0.02, 0.1))
    step, thick = (right - left) / count, rng.uniform(0.45, 0.85)
    bars, colors = [], _some(rng, COLORS, count)
    for index, (high, color) in enumerate(zip(heights, colors, strict=True)):
        x = int(left + step * (index + 0.5 - thick / 2))
        box = x, int(bottom - high * (bottom - top)), int(x + thick * step), bottom
        fill = np.clip(np.array(COLORS[color]) + rng.integers(-12, 13, 3), 0, 255)
        pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=tuple(fill.tolist()), outline=ink)
        bars.append(canvas.keep(Item("bar", color, box), np.full((box[3] - box[1], box[2] - box[0]), 255)))
    pen.line((left, top, left, bottom, right, bottom), fill=ink, width=2)
    canvas.frames[0] = np.asarray(image)
    ordered = sorted(bars, key=lambda bar: bar.box[1])
    questions = (
        _ask("chart", "what color is the tallest bar?", ordered[0].value, ordered[0]),
        _ask("chart", "what color is the lowest bar?", ordered[-1].value, ordered[-1]),
    )
    return _scene(canvas, "chart", questions)


def _cell(item: Item) -> str:
    """Return the row and column of an item's center on a 6 x 6 grid."""
    x, y = item.center
    return f"{'abcdef'[min(5, int(6 * y / SIZE))]}{1 + min(5, int(6 * x / SIZE))}"


def sentence(scene: NativeScene, question: SceneQuestion) -> str:
    """Return the answer as a sentence that repeats the question's noun and ends with the answer.

    The decoder can then copy the words next to the same noun in the image, as in text. It counts by listing
    positions from top to bottom: "stars: b2, d5: 2", with rows a to f and columns 1 to 6.
    """
    kind, text, answer = question.kind, question.text.rstrip("?"), question.answer
    if kind in ("colour", "position", "chart") or text.startswith(("what color is the", "where is the")):
        return f"the {text.partition(' is the ')[2]} is {answer}"
    if kind == "digits" or (kind == "document" and answer.isdigit()):
        return f"the digit is {answer}"
    if kind in ("word", "document"):
        return f"the sign says {answer}"
    if kind == "count":
        plural = text.removeprefix("how many ")
        cells = sorted(_cell(item) for item in scene.items if f"{item.what}s" == plural)
        return ": ".join([plural, ", ".join(cells) or "none", answer])
    if kind == "presence":
        return f"{text.removeprefix('is there ')}: {answer}"
    return f"{text.removeprefix('which thing is ').replace('shown', 'the thing')}: {answer}"
