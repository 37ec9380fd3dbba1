# SPDX-License-Identifier: Apache-2.0
"""Choose training questions about a drawn image: the benchmark's kinds, and easier helper questions.

Helpers are ordinary questions ("list all stars from left to right.") whose answers contain intermediate steps of the
benchmark's kinds. No loss guides the attention.
"""

from __future__ import annotations

import numpy as np

from native_scenes import MANY, NAMES, NativeScene, clear_of_middle, quadrant
from packing import Asked
from qwen_model import CELL
from tokenprune_demo.scenes import KINDS, LARGE, TINY

MAIN = (*KINDS, "thing")
HELPERS = ("list", "where", "where thing", "there thing", "many tiny", "side", "things", "row", "rows")
IMAGE_KINDS = (*MAIN, *HELPERS)
MIX = {
    "colour": 1,
    "presence": 2,
    "count": 2,
    "position": 2,
    "small": 2,
    "digits": 1,
    "word": 1,
    "grounding": 2,
    "thing": 2,
    "list": 2,
    "where": 1,
    "where thing": 1,
    "there thing": 1,
    "many tiny": 1,
    "side": 2,
    "things": 1,
    "row": 4,
    "rows": 1,
}
COUNT_WEIGHT = {"0": 1.0, "1": 1.0, "2": 1.3, "3": 3.5, "4": 3.5}


def helpers(rng: np.random.Generator, scene: NativeScene) -> list[Asked]:
    """Return the questions of `HELPERS` with one clear answer in a scene."""
    width, height = scene.size
    out = []
    for sort in (*LARGE, *TINY):
        group = [i for i in scene.items if i.what == sort]
        name = f"tiny {MANY[sort]}" if sort in TINY else MANY[sort]
        if sort in TINY and len(group) < 5:
            out.append(Asked("many tiny", f"how many {name}?", str(len(group))))
        if 1 <= len(group) <= 4:
            for axis, way in enumerate(("from left to right", "from top to bottom")):
                line = sorted(group, key=lambda i: i.center[axis])
                steps = np.diff([i.center[axis] for i in line])
                if not len(steps) or steps.min() > 0.06 * (width, height)[axis]:
                    out.append(Asked("list", f"list all {name} {way}.", " ".join(i.value for i in line), 0.5))
        if len(group) == 1:
            tiny = "tiny " if sort in TINY else ""
            for axis, word in ((1, "row"), (0, "column")):
                index = int(group[0].center[axis]) // CELL
                out.append(Asked("row", f"which {word} is the {tiny}{sort}?", " ".join(str(index)), 0.7))
        if len(group) == 1 and clear_of_middle(*group[0].center, width, height):
            tiny = "tiny " if sort in TINY else ""
            x, y = group[0].center
            out.append(Asked("side", f"is the {tiny}{sort} left or right?", "left" if x < width / 2 else "right"))
            out.append(Asked("side", f"is the {tiny}{sort} upper or lower?", "upper" if y < height / 2 else "lower"))
        values = [i.value for i in group]
        for item in group:
            if values.count(item.value) == 1 and clear_of_middle(*item.center, width, height):
                tiny = "tiny " if sort in TINY else ""
                answer = quadrant(item, width, height)
                out.append(Asked("where", f"where is the {tiny}{item.value} {sort}?", answer))
    for side, word in ((height, "rows"), (width, "columns")):
        out.append(Asked("rows", f"how many {word}?", " ".join(str(side // CELL)), 0.5))
    things = {i.value: i for i in scene.items if i.what == "thing"}
    if things:
        line = sorted(things.values(), key=lambda i: i.center[0])
        out.append(Asked("things", "list all things from left to right.", " ".join(i.value for i in line), 0.5))
    for name, item in things.items():
        out.append(Asked("there thing", f"is there a {name}?", "yes"))
        if clear_of_middle(*item.center, width, height):
            out.append(Asked("where thing", f"where is the {name}?", quadrant(item, width, height)))
    for name in rng.choice(NAMES, max(1, len(things)), replace=False):
        if name not in things:
            out.append(Asked("there thing", f"is there a {name}?", "no"))
    return out


def choose(rng: np.random.Generator, scene: NativeScene, mix: dict[str, int]) -> list[Asked]:
    """Choose up to `mix[kind]` questions of each kind, with balanced answers for presence and count."""
    pools: dict[str, list[Asked]] = {}
    for q in scene.questions:
        pools.setdefault(q.kind, []).append(Asked(q.kind, q.text, q.answer))
    for q in helpers(rng, scene):
        pools.setdefault(q.kind, []).append(q)
    chosen = []
    for kind, pool in pools.items():
        n = min(mix.get(kind, 0), len(pool))
        if not n:
            continue
        weight = np.ones(len(pool))
        if kind in ("presence", "there thing"):
            yes = np.array([q.answer == "yes" for q in pool])
            weight = np.where(yes, 0.5 / max(yes.sum(), 1), 0.5 / max((~yes).sum(), 1))
        elif kind in ("count", "many tiny"):
            weight = np.array([COUNT_WEIGHT[q.answer] for q in pool])
        elif kind == "list":
            weight = np.array([float(q.answer.count(" ") + 0.5) for q in pool])
        picks = rng.choice(len(pool), n, replace=False, p=weight / weight.sum())
        chosen += [pool[i] for i in picks]
    return [chosen[i] for i in rng.permutation(len(chosen))]
