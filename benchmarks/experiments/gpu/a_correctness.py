# SPDX-License-Identifier: Apache-2.0
"""The library on this GPU against itself on its CPU, before anything is timed.

"identity": with keep=1.0 a patched prefill has the logits of the unpatched one, to the last bit. "kept, float32" and
"kept, bfloat16": each method keeps the same tokens on GPU and CPU, of the same weights and inputs. Where sums are taken
in another order, tokens that all but tie change places: "ties" is the most that differ between CPU runs whose inputs
are changed by one rounding of their dtype, of three; "equal" is no difference, "ties" no more than that. A greedy
method goes on from each near tie, so that more may differ: that is "ties" too where the CPU chooses the same as the
GPU from the values that the GPU looked at ("of same values", the tokens that differ then), and these are no farther
from the CPU's than two such changes bring them. All else "differs". "waits": where the host waits for the GPU within
the prefill. "tests": those marked `gpu`, which count waits of every method, among others.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from kit import ROOT, Sheet  # isort: skip
import torch
import video_inputs as videos
from clocks import Clocks, bound
from common import Clock, llava, onevision, qwen
from efficiency import BLOCKS, Case, dropping_methods
from same_values import looking

import tokenprune
from tokenprune import Site
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune_bench.calibration import calibrate

CPU, VISUAL, KEEP, GRID, SHAKEN = torch.device("cpu"), 576, 64, (12, 4, 4), 3
SHARE = 0.5  # that stays: all methods reach it in four layers
COLUMNS = {
    "method": "method", "what": "what", "verdict": "verdict", "differ": "tokens that differ", "ties": "ties",
    "of_same": "of same values",
    "waits": "waits", "ms": "ms", "bound": "bound by",
}  # fmt: skip
TOWER = {"depth": BLOCKS, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "patch_size": 4,
         "window_size": 16, "fullatt_block_indexes": [BLOCKS - 1]}  # fmt: skip
PROCESSOR = SimpleNamespace(image_processor=SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3))  # for colours
MARKED = ("engine/test_syncs", "engine/test_offloaded_cache", "kernels/test_kernels_attention",
          "kernels/test_kernels_compact", "kernels/test_kernels_similarity")  # fmt: skip


def methods() -> list[str]:
    """Return the methods that act in a model; those on pixels act in the processor."""
    return [one for one in tokenprune.available_methods() if tokenprune.method_info(one).site is not Site.PRE_ENCODER]


class Place:
    """The small models, of images and of videos, on one device and in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    @cached_property
    def image(self) -> Case:
        model = copy.deepcopy(llava("tiny", CPU, torch.float32, BLOCKS)).to(self.device, self.dtype)
        torch.manual_seed(0)
        case = Case(model, VISUAL, KEEP, Clock(self.device))
        case.ids = torch.randint(16, 256, case.ids.shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        case.ids[:, 32:-32] = model.config.image_token_id
        return case

    @cached_property
    def video(self) -> tuple[Any, dict[str, Any]]:
        model = copy.deepcopy(qwen("tiny", CPU, torch.float32, TOWER))
        given = videos.inputs(model, GRID, CPU)
        model = model.to(self.device, self.dtype)
        made = {name: one.to(self.device) for name, one in given.items()}
        return model, made | {"pixel_values_videos": made["pixel_values_videos"].to(self.dtype)}

    @cached_property
    def tower(self) -> tuple[Any, dict[str, Any]]:
        """The model in whose vision tower frames merge, and a video."""
        model = onevision("tiny", CPU, torch.float32)
        given = videos.of_frames(model, GRID[0], CPU)
        model = model.to(self.device, self.dtype)
        made = {name: one.to(self.device) for name, one in given.items()}
        return model, made | {"pixel_values_videos": made["pixel_values_videos"].to(self.dtype)}

    def prompt(self, name: str, shake: int = 0) -> tuple[Any, dict[str, Any]]:
        """Return the model that a method runs in, and its arguments. shake: the seed of a change by one rounding."""
        if name not in dropping_methods():
            model, given = self.tower if issubclass(tokenprune.method_info(name).cls, FrameMerger) else self.video
            return model, given | {"pixel_values_videos": self._shaken(given["pixel_values_videos"], shake)}
        g = torch.Generator().manual_seed(1)
        pixels = torch.randn(1, 3, 336, 336, generator=g).to(self.device, self.dtype)
        return self.image.model, {"input_ids": self.image.ids, "pixel_values": self._shaken(pixels, shake)}

    def _shaken(self, x: torch.Tensor, shake: int) -> torch.Tensor:
        if not shake:
            return x
        sign = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(shake)).to(x.device, x.dtype)
        return x * (1 + (2 * sign - 1) * torch.finfo(x.dtype).eps)

    def patched(self, name: str, keep: float) -> Any:
        options: dict[str, Any] = {"thresholds": self.thresholds} if name == "dymu" else {}
        options |= {"keep": keep, "guard": "off", "record": True, "processor": PROCESSOR}
        return tokenprune.patched(self.prompt(name)[0], name, **options)

    @cached_property
    def thresholds(self) -> Any:
        """Return those of dymu, the same on every device; they are of a tower in this dtype."""
        pixels = torch.randn(8, 3, 336, 336, generator=torch.Generator().manual_seed(2)).to(self.dtype)
        model = llava("tiny", CPU, torch.float32, BLOCKS).to(self.dtype)
        with torch.inference_mode(False):
            return calibrate(model, pixels, keep=SHARE, batch_size=8, progress=False)


def run(model: Any, given: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return model(**given, use_cache=True, logits_to_keep=1)


def identity(here: Place, clocks: Clocks, name: str) -> dict[str, Any]:
    """Return the row of a method at keep=1.0."""
    model, given = here.prompt(name)
    want = run(model, given).logits
    with here.patched(name, 1.0):
        got = run(model, given).logits
        row = clocks.timed(partial(run, model, given), rounds=1, graph=False)
    row["verdict"] = "equal" if torch.equal(got, want) else "differs"
    return {"method": name, "what": "identity", **row}


def kept(here: Place, there: Place, clocks: Clocks, name: str) -> dict[str, Any]:
    """Return the row of a method's kept sets, on the GPU (`here`) and on the CPU (`there`)."""
    share = 1.0 if tokenprune.method_info(name).site is Site.ATTENTION else SHARE

    def sets(place: Place, shake: int = 0) -> list[set[int]]:
        model, given = place.prompt(name, shake)
        run(model, given)
        return [set(cut.kept[0]) for cut in tokenprune.stats(model).cuts]

    with here.patched(name, share):
        with looking(again=True) as looked:
            mine = sets(here)
        model, given = here.prompt(name)
        waits = clocks.wait_in(partial(run, model, given))
        ms = 1000 * clocks.clock(partial(run, model, given))[0]
        busy = clocks.busy_ms(partial(run, model, given))
    with there.patched(name, share):
        with looking() as of_cpu:
            theirs = sets(there)
        ties, off = 0, 0.0
        for shake in range(1, SHAKEN + 1):
            with looking() as shaken:
                ties = max(ties, apart(theirs, sets(there, shake)))
            off = max(off, shaken.off(of_cpu))
    differ = apart(mine, theirs)
    same_choice = bool(looked.hidden) and not looked.differ and looked.off(of_cpu) <= 2 * off
    verdict = "equal" if not differ else "ties" if differ <= ties or same_choice else "differs"
    return {
        "method": name, "what": f"kept, {str(here.dtype).removeprefix('torch.')}", "verdict": verdict, "differ": differ,
        "ties": ties, "of_same": looked.differ, "waits": waits, "ms": ms, "device_ms": busy, "bound": bound(ms, busy),
    }  # fmt: skip


def apart(one: list[set[int]], other: list[set[int]]) -> int:
    """Return the tokens that are in one list of sets and not in the other; all, where cuts differ in number."""
    if len(one) != len(other):
        return sum(map(len, one)) + sum(map(len, other))
    return sum(len(a ^ b) for a, b in zip(one, other, strict=True))


def marked(sheet: Sheet) -> dict[str, Any]:
    """Return the row of the tests that are marked `gpu`."""
    files = [f"tests/unit/{one}.py" for one in (MARKED[3:] if sheet.tiny else MARKED)]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--maxfail=20", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=sheet.deadline.left)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:])
        raise AssertionError(last)
    passed = re.search(r"(\d+) passed", last)
    return {"method": "all", "what": f"tests: {last.strip('= ')}", "verdict": "passed" if passed else "skipped"}


def main(given: Sequence[str] | None = None) -> int:
    sheet = Sheet("a_correctness", "Correctness", "tiny models", COLUMNS, __doc__, given)
    clocks = Clocks(sheet.device, sheet.tiny)
    torch.backends.cudnn.allow_tf32 = False  # the CPU has float32 alone
    names = ["fastv", "tome", "evs", "pevlm"] if sheet.tiny else methods()
    for dtype in (torch.float32, torch.bfloat16):
        here, there = Place(sheet.device, dtype), Place(CPU, dtype)
        for name in names:
            sheet.take(("kept", str(dtype), name), partial(kept, here, there, clocks, name))
    for name in names:
        sheet.take(("identity", name), partial(identity, here, clocks, name))
    sheet.take(("tests",), partial(marked, sheet), seconds=600)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
