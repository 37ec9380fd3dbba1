# SPDX-License-Identifier: Apache-2.0
"""Compare the library on this GPU with itself on the CPU, before any timing.

"identity": with keep=1.0, the logits of a patched prefill equal the unpatched logits bit for bit. "kept, float32" and
"kept, bfloat16": each method keeps the same tokens on GPU and CPU, for the same weights and inputs. Sums are computed
in different orders, so tokens with nearly equal scores may swap. "ties" is the maximum difference, over three runs,
between CPU runs whose inputs are perturbed by one rounding step. Verdicts: "equal" without difference, "ties" up to
that number. Greedy methods amplify near ties, so more tokens may differ. The verdict is also "ties" if the CPU selects
the same tokens from the GPU's values ("of same values" counts the tokens that differ), and these values are within
twice the effect of such a perturbation. Otherwise the verdict is "differs". "waits" is the first code line in the
prefill where the host waits for the GPU. "tests" runs the tests marked `gpu`, which include the waits of every method.
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
SHARE = 0.5  # share of kept tokens that all methods reach in four layers
COLUMNS = {
    "method": "method", "what": "what", "verdict": "verdict", "differ": "tokens that differ", "ties": "ties",
    "of_same": "of same values",
    "waits": "waits", "ms": "ms", "bound": "bound by",
}  # fmt: skip
TOWER = {"depth": BLOCKS, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "patch_size": 4,
         "window_size": 16, "fullatt_block_indexes": [BLOCKS - 1]}  # fmt: skip
PROCESSOR = SimpleNamespace(image_processor=SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3))  # for colors
MARKED = ("engine/test_syncs", "engine/test_offloaded_cache", "kernels/test_kernels_attention",
          "kernels/test_kernels_compact", "kernels/test_kernels_similarity")  # fmt: skip


def methods() -> list[str]:
    """Return the methods that act in a model, which excludes methods on pixels."""
    return [
        name for name in tokenprune.available_methods() if tokenprune.method_info(name).site is not Site.PRE_ENCODER
    ]


class Place:
    """The small image and video models on one device, in one dtype."""

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
        on_cpu = videos.inputs(model, GRID, CPU)
        model = model.to(self.device, self.dtype)
        moved = {name: tensor.to(self.device) for name, tensor in on_cpu.items()}
        return model, moved | {"pixel_values_videos": moved["pixel_values_videos"].to(self.dtype)}

    @cached_property
    def tower(self) -> tuple[Any, dict[str, Any]]:
        """The model whose vision tower merges frames, and a video."""
        model = onevision("tiny", CPU, torch.float32)
        on_cpu = videos.of_frames(model, GRID[0], CPU)
        model = model.to(self.device, self.dtype)
        moved = {name: tensor.to(self.device) for name, tensor in on_cpu.items()}
        return model, moved | {"pixel_values_videos": moved["pixel_values_videos"].to(self.dtype)}

    def prompt(self, name: str, shake: int = 0) -> tuple[Any, dict[str, Any]]:
        """Return the model that a method runs in, and its inputs. `shake` seeds a perturbation by one rounding step."""
        if name not in dropping_methods():
            model, inputs = self.tower if issubclass(tokenprune.method_info(name).cls, FrameMerger) else self.video
            return model, inputs | {"pixel_values_videos": self._shaken(inputs["pixel_values_videos"], shake)}
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
        """Thresholds of dymu, computed on the CPU in this dtype and equal for all devices."""
        pixels = torch.randn(8, 3, 336, 336, generator=torch.Generator().manual_seed(2)).to(self.dtype)
        model = llava("tiny", CPU, torch.float32, BLOCKS).to(self.dtype)
        with torch.inference_mode(False):
            return calibrate(model, pixels, keep=SHARE, batch_size=8, progress=False)


def run(model: Any, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return model(**inputs, use_cache=True, logits_to_keep=1)


def identity(gpu: Place, clocks: Clocks, name: str) -> dict[str, Any]:
    """Return the row of a method at keep=1.0."""
    model, inputs = gpu.prompt(name)
    expected = run(model, inputs).logits
    with gpu.patched(name, 1.0):
        logits = run(model, inputs).logits
        row = clocks.timed(partial(run, model, inputs), rounds=1, graph=False)
    row["verdict"] = "equal" if torch.equal(logits, expected) else "differs"
    return {"method": name, "what": "identity", **row}


def kept(gpu: Place, cpu: Place, clocks: Clocks, name: str) -> dict[str, Any]:
    """Return the row of a method's kept tokens on GPU and CPU."""
    share = 1.0 if tokenprune.method_info(name).site is Site.ATTENTION else SHARE

    def sets(device: Place, shake: int = 0) -> list[set[int]]:
        model, inputs = device.prompt(name, shake)
        run(model, inputs)
        return [set(cut.kept[0]) for cut in tokenprune.stats(model).cuts]

    with gpu.patched(name, share):
        with looking(again=True) as looked:
            mine = sets(gpu)
        model, inputs = gpu.prompt(name)
        waits = clocks.wait_in(partial(run, model, inputs))
        ms = 1000 * clocks.clock(partial(run, model, inputs))[0]
        busy = clocks.busy_ms(partial(run, model, inputs))
    with cpu.patched(name, share):
        with looking() as of_cpu:
            theirs = sets(cpu)
        ties, distance = 0, 0.0
        for shake in range(1, SHAKEN + 1):
            with looking() as shaken:
                ties = max(ties, apart(theirs, sets(cpu, shake)))
            distance = max(distance, shaken.off(of_cpu))
    differ = apart(mine, theirs)
    same_choice = bool(looked.hidden) and not looked.differ and looked.off(of_cpu) <= 2 * distance
    verdict = "equal" if not differ else "ties" if differ <= ties or same_choice else "differs"
    return {
        "method": name, "what": f"kept, {str(gpu.dtype).removeprefix('torch.')}", "verdict": verdict, "differ": differ,
        "ties": ties, "of_same": looked.differ, "waits": waits, "ms": ms, "device_ms": busy, "bound": bound(ms, busy),
    }  # fmt: skip


def apart(first: list[set[int]], other: list[set[int]]) -> int:
    """Return the number of tokens in only one of two lists of sets, or all tokens if the numbers of cuts differ."""
    if len(first) != len(other):
        return sum(map(len, first)) + sum(map(len, other))
    return sum(len(a ^ b) for a, b in zip(first, other, strict=True))


def marked(sheet: Sheet) -> dict[str, Any]:
    """Return the row of the tests marked `gpu`."""
    files = [f"tests/unit/{file}.py" for file in (MARKED[3:] if sheet.tiny else MARKED)]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--maxfail=20", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=sheet.deadline.left)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:])
        raise AssertionError(last)
    passed = re.search(r"(\d+) passed", last)
    return {"method": "all", "what": f"tests: {last.strip('= ')}", "verdict": "passed" if passed else "skipped"}


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("a_correctness", "Correctness", "tiny models", COLUMNS, __doc__, argv)
    clocks = Clocks(sheet.device, sheet.tiny)
    torch.backends.cudnn.allow_tf32 = False  # the CPU computes in float32
    names = ["fastv", "tome", "evs", "pevlm"] if sheet.tiny else methods()
    for dtype in (torch.float32, torch.bfloat16):
        gpu, cpu = Place(sheet.device, dtype), Place(CPU, dtype)
        for name in names:
            sheet.take(("kept", str(dtype), name), partial(kept, gpu, cpu, clocks, name))
    for name in names:
        sheet.take(("identity", name), partial(identity, gpu, clocks, name))
    sheet.take(("tests",), partial(marked, sheet), seconds=600)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
