# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/sites.svg, the six sites where a method may act.

The site of the documentation also lists the methods of each site (dev/mkdocs_hooks.py).

python dev/figure_sites.py            # draw it
python dev/figure_sites.py --check    # exit with 1 if the file is stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import tokenprune
from tokenprune.selection.method import Site

FIGURE = Path(__file__).parent.parent / "docs/images/sites.svg"
# The change at each site, in three lines.
CHANGES = {
    Site.PRE_ENCODER: ("the image itself:", "fewer pixels,", "fewer views"),
    Site.IN_ENCODER: ("tower tokens merge", "between blocks, or", "leave before them"),
    Site.PRE_LLM: ("visual tokens", "at the entry of", "the decoder"),
    Site.ATTENTION: ("who attends to", "whom in prefill;", "none is removed"),
    Site.IN_LLM: ("hidden states", "before a decoder", "layer K"),
    Site.DECODE: ("the KV cache,", "while the answer", "is written"),
}
# The components: (first column, columns, title).
STAGES = ((0, 1, "processor"), (1, 1, "vision tower"), (2, 3, "language model, prefill"), (5, 1, "decoding"))

COLUMN, GAP, MARGIN = 178, 14, 24
WIDTH = 2 * MARGIN + 6 * COLUMN + 5 * GAP
DRAWING = 62  # where the drawings begin
CARD = 246  # where the cards begin
INK, SOFT, PALE = "#1f2937", "#4b5563", "#e5e7eb"
VISUAL, MERGED, TEXT, STAGE = "#3b6fd4", "#7c4dbe", "#e08a1e", "#f1f4f9"


def left(column: float) -> float:
    return MARGIN + column * (COLUMN + GAP)


def rectangle(x: float, y: float, width: float, height: float, fill: str, more: str = 'rx="2"') -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {more}/>'


def token(x: float, y: float, kind: str, size: float = 14) -> str:
    """A token: v(isual), m(erged), t(ext), or a removed one."""
    fill = {"v": VISUAL, "m": MERGED, "t": TEXT}.get(kind)
    if fill is None:
        return rectangle(
            x + 0.75, y + 0.75, size - 1.5, size - 1.5, "none", 'rx="2" stroke="#9ca3af" stroke-dasharray="3 2"'
        )
    return rectangle(x, y, size, size, fill)


def row(x: float, y: float, kinds: str, step: float = 18, size: float = 14) -> str:
    return "".join(token(x + step * column, y, kind, size) for column, kind in enumerate(kinds) if kind != " ")


def words(x: float, y: float, text: str, size: float = 15, fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" {more}>{text}</text>'


MIDDLE = 'text-anchor="middle"'
MONO = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{SOFT}" stroke-width="2" marker-end="url(#head)"/>'


def image(x: float, y: float, cells: int, size: float) -> str:
    """A landscape under the grid of its patches."""
    step = size / cells
    lines = "".join(
        f'<path d="M{x + step * i:g} {y:g}v{size:g}M{x:g} {y + step * i:g}h{size:g}" stroke="#fff" stroke-width="1.5"/>'
        for i in range(1, cells)
    )
    hill = f'<path d="M{x:g} {y + size:g}v{-0.3 * size:g}l{0.35 * size:g} {-0.3 * size:g}l{0.3 * size:g} {0.3 * size:g}'
    hill += f'l{0.15 * size:g} {-0.12 * size:g}l{0.2 * size:g} {0.2 * size:g}v{0.22 * size:g}z" fill="#5b8c5a"/>'
    sun = f'<circle cx="{x + 0.74 * size:g}" cy="{y + 0.24 * size:g}" r="{0.12 * size:g}" fill="#f4c542"/>'
    return rectangle(x, y, size, size, "#bcd7f5") + hill + sun + lines


def draw_pre_encoder(x: float, y: float) -> str:
    return image(x + 8, y + 16, 6, 84) + arrow(x + 97, y + 58, x + 114, y + 58) + image(x + 121, y + 34, 3, 48)


def draw_in_encoder(x: float, y: float) -> str:
    parts = []
    for line, kinds in enumerate(("vvvvvvvv", "vvmvv", "mvm")):
        top = y + 8 + 42 * line
        parts.append(row(x + COLUMN / 2 - 9 * len(kinds) + 2, top, kinds))
        if line < 2:
            parts.append(rectangle(x + 22, top + 18, COLUMN - 44, 20, "#dbe3ef", 'rx="4"'))
            parts.append(words(x + COLUMN / 2, top + 32.5, "block", 14, SOFT, MIDDLE))
    return "".join(parts)


def draw_pre_llm(x: float, y: float) -> str:
    entry = rectangle(x + 8, y + 88, COLUMN - 16, 34, "#dbe3ef", 'rx="4"')
    name = words(x + COLUMN / 2, y + 110, "decoder", 15, SOFT, MIDDLE)
    above = row(x + 12, y + 18, "tvvvvvvtt", 17.5)
    below = row(x + 12, y + 58, "tv-v--vtt".replace("-", "."), 17.5)
    return above + arrow(x + COLUMN / 2, y + 38, x + COLUMN / 2, y + 51) + below + entry + name


def draw_attention(x: float, y: float) -> str:
    """A causal mask: three blocks attend to the start and to themselves, the text attends to everything."""
    size, start = 12.5, x + 33
    kinds = "tvvvvvvtt"
    of_block = (None, 0, 0, 1, 1, 2, 2, None, None)
    parts = [row(start, y - 2, kinds, size, 10.5)]
    for line in range(9):
        parts.append(token(start - 15, y + 13 + size * line, kinds[line], 10.5))
        for column in range(line + 1):
            is_visible = of_block[line] is None or column == 0 or of_block[line] == of_block[column]
            fill = "#64748b" if is_visible else PALE
            parts.append(rectangle(start + size * column, y + 13 + size * line, 10.5, 10.5, fill, 'rx="1.5"'))
    return "".join(parts)


def draw_in_llm(x: float, y: float) -> str:
    parts = []
    for line, (name, kinds) in enumerate(
        (("layer 0", "tvvvvvvtt"), ("layer K-1", "tvvvvvvtt"), ("layer K", "tv..v..tt"))
    ):
        top = y + 2 + 44 * line
        parts.append(row(x + 12, top, kinds, 17.5))
        parts.append(rectangle(x + 8, top + 17, COLUMN - 16, 20, "#dbe3ef", 'rx="4"'))
        parts.append(words(x + COLUMN / 2, top + 31.5, name, 14, SOFT, MIDDLE))
    return "".join(parts)


def draw_decode(x: float, y: float) -> str:
    parts = []
    for line, kinds in enumerate(("tvvvvtt", "tv.vvttt", "tv..vtttt", "t...vttttt")):
        parts.append(row(x + 6, y + 8 + 31 * line, kinds, 16.8))
    return "".join(parts)


DRAWINGS = (draw_pre_encoder, draw_in_encoder, draw_pre_llm, draw_attention, draw_in_llm, draw_decode)


def lines_of(names: list[str], width: float, size: float) -> list[str]:
    """Names in lines that fit `width`, in a font whose characters are 0.6 of its size wide."""
    lines: list[str] = []
    for name in names:
        if lines and len(f"{lines[-1]} · {name}") * 0.6 * size <= width:
            lines[-1] += f" · {name}"
        else:
            lines.append(name)
    return lines


def figure(names: bool = False) -> str:
    """Return the figure as SVG text. `names` adds the methods of each site."""
    size = 16
    methods: dict[Site, list[str]] = {site: [] for site in Site}
    if names:
        infos = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
        methods = {
            site: lines_of([info.name for info in infos if info.site == site], COLUMN - 24, size) for site in Site
        }
    card = 120 + 23 * max(map(len, methods.values()))
    legend = CARD + card + 30
    parts = []
    for column, columns, title in STAGES:
        width = columns * COLUMN + (columns - 1) * GAP
        parts.append(rectangle(left(column), 18, width, CARD - 34, STAGE, 'rx="8"'))
        parts.append(words(left(column) + width / 2, 43, title, 18, INK, f'{MIDDLE} font-weight="600"'))
    for column in range(1, 6):
        parts.append(arrow(left(column) - GAP - 2, 130, left(column) - 1, 130))
    for column, (site, draw) in enumerate(zip(Site, DRAWINGS, strict=True)):
        x = left(column)
        parts.append(draw(x, DRAWING + 16))
        parts.append(rectangle(x, CARD, COLUMN, card, "#ffffff", f'rx="8" stroke="{VISUAL}" stroke-width="1.5"'))
        parts.append(f'<circle cx="{x + 22:g}" cy="{CARD + 24:g}" r="12" fill="{VISUAL}"/>')
        parts.append(words(x + 22, CARD + 29.5, str(column + 1), 15, "#fff", f'{MIDDLE} font-weight="700"'))
        parts.append(words(x + 42, CARD + 29.5, site, 17, INK, f'font-weight="700" {MONO}'))
        for line, text in enumerate(CHANGES[site]):
            parts.append(words(x + 12, CARD + 56 + 20 * line, text, 15.5, SOFT))
        for line, text in enumerate(methods[site]):
            parts.append(words(x + 12, CARD + 126 + 23 * line, text, size, VISUAL, MONO))
    x = MARGIN
    for kind, text in (("v", "visual token"), ("m", "merged token"), (".", "removed"), ("t", "text token")):
        parts.append(token(x, legend - 12, kind))
        parts.append(words(x + 21, legend, text, 16, SOFT))
        x += 165
    parts.append(words(WIDTH - MARGIN, legend, "data flows from left to right", 16, SOFT, 'text-anchor="end"'))
    height = legend + 22
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="4.5" markerHeight="4.5" '
        'orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" role="img">\n'
        "<title>The six sites where a method may act</title>\n"
        + "\n".join([head, rectangle(0, 0, WIDTH, height, "#ffffff", 'rx="10"'), *parts])
        + "\n</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the figure is stale; writes no file")
    if not parser.parse_args().check:
        FIGURE.write_text(figure())
    elif FIGURE.read_text() != figure():
        print(f"{FIGURE.name} is out of date: run python dev/figure_sites.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
