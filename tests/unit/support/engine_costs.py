# SPDX-License-Identifier: Apache-2.0
"""Count the cost that a patch adds to a forward, without a clock: library calls, ATen operations, launches.

python tests/unit/support/engine_costs.py           # print the counts of a prefill and a step, and the table's
python tests/unit/support/engine_costs.py --update  # write lower counts into the table; raise counts by hand

A call is a call of a function in tokenprune/. Comprehensions and generators are left out, because Python versions count
them differently. Operations are counted by name beyond the unpatched model's; a negative difference, from a shorter
sequence, counts as zero. Launches are operations that start work on the simulated device; views, empty tensors and host
operations do not count. A kernel of the library is one launch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tokenprune
from far_device import Far, Syncs, counting, far_inputs, to_far
from tokenprune.kernels.dispatch import Operation
from zoo import FAMILIES

TABLE = Path(__file__).resolve().parents[1] / "engine" / "engine_costs.json"
PACKAGE = os.path.dirname(tokenprune.__file__) + os.sep
# The methods of each site: a family, the arguments of `make_inputs`, and the arguments of `patch`. Some decoder methods
# get a single request with one image, where latency matters.
IMAGES: dict[str, Any] = {"images": (1, 2)}
IMAGE: dict[str, Any] = {"images": (1,)}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "pixelprune": ("qwen2_vl", IMAGES, {}),
    "tome": ("llava", IMAGES, {"keep": 0.5}),
    "divprune": ("llava", IMAGES, {"keep": 0.25}),
    "visionzip": ("llava", IMAGES, {"keep": 0.25}),
    "pevlm": ("qwen2_vl", {"video": 4, "images": (0, 0)}, {"keep": 1.0, "sink_frames": 1, "block_frames": 1}),
    "fastv": ("llava", IMAGES, {"keep": 0.25}),
    "random": ("llava", IMAGE, {"keep": 0.25}),
    "dart": ("llava", IMAGE, {"keep": 0.25}),
    "cdpruner": ("llava", IMAGE, {"keep": 0.25}),
    "scope": ("llava", IMAGE, {"keep": 0.25}),
    "sparsevlm": ("llava", IMAGE, {"keep": 0.6}),
    "dyrate": ("llava", IMAGES, {"keep": 0.5, "layer": 2, "warmup": 0, "update_every": 1}),
}
# Its attention uses masks of a tensor class that cannot be created while operations are counted.
CALLS_ALONE = {"pevlm"}
Counts = dict[str, Counter[str]]  # keys: "calls", "ops" and "launches"
# Operations that launch no kernel, besides views, which their schema marks.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"}


def versions() -> str:
    """Return the versions that the counts depend on. Operations differ between versions."""
    return ", ".join(
        f"{module.__name__} {'.'.join(module.__version__.split('.')[:2])}" for module in (torch, transformers)
    )


@contextmanager
def counted_calls(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of the library's functions within this context, by name."""

    def note(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            counts[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += 1

    gc.collect()  # finalizers run at arbitrary times
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


class CountedOperations(TorchDispatchMode):
    """Counts ATen operations within this context, by name."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_launches(counts: Counter[str]) -> Iterator[None]:
    """Count launches on the simulated device within this context, by name."""
    dispatch, call_kernel = Syncs.__torch_dispatch__, Operation.__call__
    inside = False  # whether a kernel is running

    def dispatched(self: Syncs, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(self, func, types, args, kwargs)
        read = any(isinstance(x, Far) for x in tree_leaves((args, kwargs)))
        view = any(
            returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns
        )
        if (read or isinstance(result, Far)) and not (inside or view or func.overloadpacket.__name__ in _FREE):
            counts[str(func)] += 1
        return result

    def called(self: Operation, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not isinstance(args[0], Far) or not self.accepts(*args, **kwargs):
            return call_kernel(self, *args, **kwargs)
        counts[f"kernel {self.name}"] += 1
        inside = True
        try:
            return call_kernel(self, *args, **kwargs)
        finally:
            inside = False

    with mock.patch.object(Syncs, "__torch_dispatch__", dispatched), mock.patch.object(Operation, "__call__", called):
        yield


_COUNTED = {"calls": counted_calls, "ops": CountedOperations, "launches": counted_launches}


def counted(run: Callable[[], Any], kinds: Sequence[str]) -> Counts:
    """Return the counts of `run`, which repeats the same work. A first run warms caches up."""
    counts: Counts = {kind: Counter() for kind in kinds}
    run()
    for kind, counter in counts.items():
        with _COUNTED[kind](counter):
            run()
    return counts


def count_forwards(model: Any, inputs: dict[str, Any], kinds: Sequence[str]) -> dict[str, Counts]:
    """Return the counts of a prefill and of the decode step after it."""

    @torch.no_grad()
    def prefill() -> Any:
        return model(**inputs, use_cache=True, logits_to_keep=1)

    counts = {"prefill": counted(prefill, kinds)}
    outputs: list[Any] = []

    @torch.no_grad()
    def step() -> None:
        # Each step needs a fresh cache: the cache grows, and dropped tokens stay dropped.
        out = outputs.pop()
        token = out.logits[:, -1:].argmax(-1)
        model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)

    outputs += [prefill() for _ in range(3)]
    counts["step"] = counted(step, kinds)
    return counts


def added(method: str) -> dict[str, Counts]:
    """Return the cost that a patch with `method` adds to each forward of its family's tiny model."""
    name, input_options, options = CASES[method]
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(**input_options)
    kinds = ["calls"] if method in CALLS_ALONE else ["calls", "ops"]
    plain = count_forwards(model, inputs, kinds)
    with tokenprune.patched(model, method, **options):
        patched = count_forwards(model, inputs, kinds)
    if method not in CALLS_ALONE:
        for forwards, far_model in (
            (plain, family.build()),
            (patched, tokenprune.patch(family.build(), method, **options)),
        ):
            to_far(far_model)
            with counting():
                launches = count_forwards(far_model, far_inputs(inputs), ["launches"])
            for forward, counts in forwards.items():
                counts |= launches[forward]
    return {
        forward: {kind: counter - plain[forward][kind] for kind, counter in counts.items()}
        for forward, counts in patched.items()
    }


def sums(costs: dict[str, Counts]) -> dict[str, int]:
    """Return the totals of `added` as a row of the table."""
    return {
        f"{forward} {kind}": counter.total() for forward, counts in costs.items() for kind, counter in counts.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write lower counts")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="METHOD")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="print the N most frequent names of each")
    options = parser.parse_args()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"versions": versions(), "added": {}}
    if table["versions"] != versions():
        parser.error(f"the table is of {table['versions']}, and this is {versions()}")
    rose = []
    for method in options.only:
        costs = added(method)
        old, new = table["added"].get(method, {}), sums(costs)
        print(f"{method:12}" + "  ".join(f"{name} {old.get(name, '-')} -> {new[name]}" for name in new))
        for forward, counts in costs.items():
            for kind, counter in counts.items():
                print(
                    "".join(
                        f"  {forward} {kind} {times:4} {name}\n" for name, times in counter.most_common(options.most)
                    ),
                    end="",
                )
        rose += [f"{method} {name}" for name in new if new[name] > old.get(name, new[name])]
        table["added"][method] = {name: min(new[name], old.get(name, new[name])) for name in new}
    if rose:
        print(f"higher than in the table. Raise it by hand, with the reason: {', '.join(rose)}")
    if options.update:
        rows = ",\n".join(f"  {json.dumps(method)}: {json.dumps(row)}" for method, row in table["added"].items())
        TABLE.write_text(f'{{"versions": {json.dumps(table["versions"])}, "added": {{\n{rows}\n}}}}\n')
    return bool(rose)


if __name__ == "__main__":
    sys.exit(main())
