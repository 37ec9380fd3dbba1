# SPDX-License-Identifier: Apache-2.0
"""Measure the files and functions that run during one PRE_LLM cut, and print the counts as JSON.

python dev/one_cut.py           # counts only; dev/house.py prints them with their targets
python dev/one_cut.py --names   # the functions of each file, too

A tiny LLaVA is patched with `divprune`, and one prefill with one image runs under `sys.setprofile`. The window begins
when the engine receives the features of the encoder (`Engine._match_features`) and ends when it returns the inputs of
the decoder's first layer after the cut (`Engine._enter_decoder`). The script counts the files of
tokenprune/integrations with a function that runs in the window, hooks and checks included, and all lines of these
files. Imports and files outside tokenprune/integrations (methods, selection, kernels) do not count.

A stay is a function of tokenprune with an argument other than `self` that is the `Call` (while `Engine._activate`
runs) or the method (while `patch` runs). Comprehensions and lambdas do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tokenprune

PACKAGE = Path(tokenprune.__file__).parent


def profile(run: Callable[[], Any], on_event: Callable[[FrameType, str], None]) -> Any:
    """Return `run()`. `on_event` gets each call and return of a named Python function in tokenprune."""

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(str(PACKAGE)) and code.co_name[0] != "<":
            on_event(frame, event)

    sys.setprofile(note)
    try:
        return run()
    finally:
        sys.setprofile(None)


def gets(frame: FrameType, value: Any) -> bool:
    """Return True if a function that begins has `value` as an argument other than `self`."""
    return any(argument is value for name, argument in frame.f_locals.items() if name != "self")


def trace_cut() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the functions that one cut runs through, by file, and the stays of `_activate` and `patch`."""
    from tokenprune.integrations.hf.engine.engine import Engine
    from zoo import FAMILIES

    family, method = FAMILIES["llava"], tokenprune.method("divprune")
    model, inputs = family.build(), family.make_inputs(images=(1,))
    functions: defaultdict[str, set[str]] = defaultdict(set)
    stays: dict[str, set[str]] = {"_activate": set(), "patch": set()}

    def on_patch(frame: FrameType, event: str) -> None:
        if event == "call" and gets(frame, method):
            stays["patch"].add(frame.f_code.co_qualname)

    profile(lambda: tokenprune.patch(model, method, keep=0.25), on_patch)
    begin, end = Engine._match_features.__code__, Engine._enter_decoder.__code__
    in_window, call = False, None

    def on_forward(frame: FrameType, event: str) -> None:
        nonlocal in_window, call
        code = frame.f_code
        in_window = (in_window or code is begin) and not (code is end and event == "return")
        if code is Engine._activate.__code__:
            call = frame.f_locals["call"] if event == "call" else None
        elif event == "call" and call is not None and gets(frame, call):
            stays["_activate"].add(code.co_qualname)
        file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        if event == "call" and in_window and file.startswith("integrations/"):
            functions[file].add(code.co_qualname)

    with torch.no_grad():
        profile(lambda: model(**inputs, use_cache=True), on_forward)
    return dict(functions), stays


def count(functions: dict[str, set[str]], stays: dict[str, set[str]]) -> dict[str, int]:
    """Return the measures of `trace_cut`."""
    return {
        "files of one cut": len(functions),
        "lines of the files of one cut": sum(len((PACKAGE / file).read_text().splitlines()) for file in functions),
        "stays of the call in _activate": len(stays["_activate"]),
        "stays of the method in patch": len(stays["patch"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the functions of each file to stderr")
    functions, stays = trace_cut()
    if parser.parse_args().names:
        for name, names in sorted(functions.items()) + sorted(stays.items()):
            print(f"{name}: {', '.join(sorted(names))}", file=sys.stderr)
    print(json.dumps(count(functions, stays)))


if __name__ == "__main__":
    main()
