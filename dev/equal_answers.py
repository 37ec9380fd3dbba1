# SPDX-License-Identifier: Apache-2.0
"""Record the outputs of every method on ten tiny families and the shipped models, and compare two commits.

python dev/equal_answers.py record OLD.json                         # in a checkout of the earlier commit
python dev/equal_answers.py compare OLD.json [--checkout OTHER]     # exits with 1 if a cell differs
python dev/equal_answers.py compare OLD.json --only 'llava/.*fastv' # regular expression for the names of cells

A cell is one setting on one batch (dev/equal_cells.py). It has digests of the logits of prefill and of each step, the
generated tokens, the statistics and the kept positions. If the setting raises an error, the cell has its class and
message instead; a different message is listed, not counted as a difference. Outputs are compared bit by bit: record
and compare on one machine. The script uses public names only, so that it runs on commits with another layout.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers

Cell = dict[str, Any]


def cells(checkout: Path, is_wanted: Callable[[str], Any]) -> Iterator[tuple[str, Cell]]:
    """Compute the cells selected by name. `checkout` contains the shipped models and is on `sys.path`."""
    from equal_cells import KEEPS, KINDS, WAYS, Shipped, answered, settings

    from zoo import FAMILIES

    every = settings()
    few = {
        name: patch
        for name, patch in every.items()
        if name in {f"{kind} keep={KEEPS[0]}" for kind in KINDS} or not patch
    }
    for name, family in FAMILIES.items():
        build = cache(family.build)
        for way, (input_options, patch, options) in WAYS.items():
            if way == "video" and family.video is None:
                continue
            ask, attention = partial(family.make_inputs, **input_options), "eager" if way == "eager" else "sdpa"
            for setting, patch_options in (every if way in ("images", "video") else few).items():
                if is_wanted(cell := f"{name}/{way}/{setting}"):
                    yield cell, answered(build(attention), ask, options, patch_options and {**patch_options, **patch})
    shipped = {file.parent.name: file.parent for file in sorted(checkout.glob("[!.]*/**/demo_*/model.safetensors"))}
    for name, model_folder in shipped.items():
        if not any(is_wanted(f"{name}/shipped/{setting}") for setting in every):
            continue
        shipped_model = Shipped(model_folder)
        with tempfile.TemporaryDirectory() as folder:
            for setting, patch in (every | shipped_model.fitted(Path(folder))).items():
                if is_wanted(cell := f"{name}/shipped/{setting}"):
                    both = patch and {**patch, "processor": shipped_model.processor}
                    yield cell, answered(shipped_model.model, shipped_model.ask, {"min_new_tokens": 3}, both)


def computed(checkout: Path, only: str) -> dict[str, Cell]:
    """Return the cells whose names match `only`. Progress goes to stderr."""
    computed_cells, begin, shown = {}, time.monotonic(), ""
    for name, cell in cells(checkout, re.compile(only).search):
        computed_cells[name] = json.loads(json.dumps(cell))
        if shown != (shown := name.rpartition("/")[0]):
            print(
                f"{time.monotonic() - begin:5.0f} s {len(computed_cells):5} cells, {shown}", file=sys.stderr, flush=True
            )
    print(f"{time.monotonic() - begin:5.0f} s {len(computed_cells):5} cells", file=sys.stderr)
    return computed_cells


def compare(old: dict[str, Cell], new: dict[str, Cell], but: Collection[str] = ()) -> bool:
    """Print how cells compare, and return True if all are equal. but: statistics that are not compared."""
    counts, different, words = Counter(), [], []
    for name in sorted(old.keys() | new.keys()):
        before, other = ({**side.get(name, {})} for side in (old, new))
        messages = [cell.pop("message", "") for cell in (before, other)]
        parts = [part for part in before | other if before.get(part) != other.get(part) and part.split()[-1] not in but]
        kind = "gone" if not other else "new" if not before else "different" if parts else "equal"
        counts[name.split("/")[0], kind] += 1
        counts["all", kind] += 1
        if parts:
            different.append(f"{name}: {kind}, {', '.join(parts[:8])} {' -> '.join(filter(None, messages))}")
        elif messages[0] != messages[1]:
            words.append(f"{name}:\n    {messages[0]}\n    {messages[1]}")
    kinds = ("equal", "different", "gone", "new")
    for family in ("", *dict.fromkeys(family for family, _ in sorted(counts, key=lambda key: key[0] == "all"))):
        print(f"{family:18}" + "".join(f"{counts[family, kind] if family else kind:>11}" for kind in kinds))
    for title, lines in (("no longer equal", different), ("refused in other words, no difference", words)):
        if lines:
            print(f"\n{title}: {len(lines)}; the first 20:", *lines[:20], sep="\n  ")
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("record", "compare"):
        command_parser = commands.add_parser(command)
        command_parser.add_argument("file", type=Path)
        command_parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parent.parent)
        command_parser.add_argument("--only", default="", help="a regular expression that names of cells have to hold")
    command_parser.add_argument("--but", default="", help="statistics that are not compared, with commas between them")
    asked = parser.parse_args()
    checkout = asked.checkout.resolve()
    zoos = [file.parent for file in checkout.glob("tests/**/zoo.py")]
    sys.path[:0] = map(str, filter(Path.is_dir, [checkout, checkout / "demo", checkout / "benchmarks", *zoos]))
    import tokenprune

    if not Path(tokenprune.__file__).is_relative_to(checkout):
        parser.error(f"tokenprune comes from {tokenprune.__file__}, not from {checkout}")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    machine = [torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability()]
    if asked.command == "record":
        asked.file.write_text(json.dumps({"machine": machine, "cells": computed(checkout, asked.only)}, indent=0))
        return 0
    record = json.loads(asked.file.read_text())
    if record["machine"] != machine:
        print(f"recorded with {record['machine']}, here are {machine}: bits may differ", file=sys.stderr)
    old = {name: cell for name, cell in record["cells"].items() if re.search(asked.only, name)}
    return 0 if compare(old, computed(checkout, asked.only), asked.but.split(",")) else 1


if __name__ == "__main__":
    sys.exit(main())
