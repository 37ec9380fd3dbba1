# SPDX-License-Identifier: Apache-2.0
"""Draw what methods keep of one held-out image, for their pages, with the shipped model.

python dev/kept_images.py visionzip hiprune   # writes docs/images/kept/visionzip.png, ...; a page shows its own

The image on the left is what the model sees; on the right, a quarter of its 256 tokens: clear ones stay, dark ones
are dropped, and those of one colour become one. Every method is drawn on the same image and question, which no
method was tried on before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenprune.profiling.model import load
from tokenprune.show import side_by_side
from tokenprune_demo.heldout import load_heldout

FOLDER = Path(__file__).parent.parent / "docs/images/kept"
KEEP, WIDTH, COLOURS = 0.25, 520, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    methods = parser.parse_args().methods
    subject = load(None)
    example = load_heldout(limit=1, folder=subject.heldout)[0]
    FOLDER.mkdir(exist_ok=True)
    for method in methods:
        setting = {"method": method, "keep": KEEP}
        drawing = side_by_side.show(subject, [example.image], example.question, [setting]).pair(0)
        drawing.thumbnail((WIDTH, WIDTH))
        drawing.quantize(COLOURS).save(FOLDER / f"{method}.png", optimize=True)


if __name__ == "__main__":
    main()
