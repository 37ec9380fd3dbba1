# SPDX-License-Identifier: Apache-2.0
"""Time each step of image processors: decode, resize, normalise and cut into patches.

    python benchmarks/experiments/preprocessing.py --resume
    python dev/readme.py

The images are JPEG files of 1, 4 and 12 megapixels, drawn with detail of all sizes. The processors are those of
Qwen2.5-VL (up to 16,384 tokens, as in its checkpoints), InternVL3 (up to 12 tiles) and LLaVA-1.5, with torchvision and
with Pillow. Qwen2.5-VL also runs with `downsample` and `dynres` at `keep=0.25`, and with two variants that estimate the
savings of a selection by pixels. The variants normalise only a quarter of the units: every fourth unit, which costs
no selection, or the units that `towerdrop` selects with `score="detail"`.

The time of a step excludes the steps inside it; "other" is the remaining time. All processors run in turn in one
process. The results are medians over rounds of the process's CPU time and of wall time. times: the median ratio of the
total CPU time, including decoding, to the total of the unchanged Qwen2.5-VL processor. equal: whether the rows of a
quarter are bit-equal to the same rows of all units.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
from common import Rows, add_options, code_version, header, results_path
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import tokenprune
from tokenprune.integrations.hf.pixels.marker import find_patch
from tokenprune.kernels.take import top_mask
from tokenprune.methods.encoder.towerdrop import TowerDrop

CPU = torch.device("cpu")
SIZES = {1: (864, 1152), 4: (1728, 2304), 12: (3000, 4000)}  # height and width by megapixels
SMALL = {0.1: (288, 384)}
QWEN = dict(size={"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28})
TILES = dict(size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12)
SQUARE = dict(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
KEEP, EVERY = 0.25, 4
BLOCK = 256  # units scored at once, so that they fit into the cache
STEPS = {
    "process_image": "tensor", "resize": "resize", "rescale_and_normalize": "normalise", "rescale": "normalise",
    "normalize": "normalise", "patchify": "patchify", "crop_image_to_patches": "patchify", "center_crop": "patchify",
}  # fmt: skip
ORDER = ("decode", "method", "tensor", "resize", "normalise", "patchify", "other")
COLUMNS = {"way": "way", "megapixels": "MP", "ms": "CPU ms", **{step: step for step in ORDER}, "times": "of the first"}


class QuarterOfUnits(Qwen2VLImageProcessor):
    """Cuts the image into patches first, then normalises and returns only a quarter of the units."""

    def rescale_and_normalize(self, images: torch.Tensor, *args: Any) -> torch.Tensor:
        self.options = args
        return images

    def patchify(self, images: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int, int]:
        patches, height, width = super().patchify(images, *args, **kwargs)
        units = patches.view(-1, self.merge_size**2 * patches.shape[-1])
        kept = units[self.select_units(units)].view(-1, 3, self.temporal_patch_size * self.patch_size, self.patch_size)
        return super().rescale_and_normalize(kept, *self.options).view(1, -1, patches.shape[-1]), height, width

    def select_units(self, units: torch.Tensor) -> torch.Tensor:
        """Return the indices of the kept units, or a mask. units: uint8 `[N, P]`."""
        return torch.arange(0, len(units), EVERY)


class QuarterByDetail(QuarterOfUnits):
    """Selects the units like `towerdrop` with `score="detail"`."""

    def select_units(self, units: torch.Tensor) -> torch.Tensor:
        steps = torch.cat([self.steps(block) for block in units.split(BLOCK)])[None].float()
        num_kept = len(units) // EVERY
        return top_mask(steps, torch.ones_like(steps, dtype=torch.bool), torch.tensor([num_kept]), num_kept)[0]

    @staticmethod
    def steps(units: torch.Tensor) -> torch.Tensor:
        values, next_values = units[:, :-1], units[:, 1:]
        return values.maximum(next_values).sub_(values.minimum(next_values)).sum(1, dtype=torch.int32)


def build_with_method(name: str) -> Callable[[], Any]:
    return lambda: tokenprune.patch_processor(Qwen2VLImageProcessor(**QWEN), name, keep=KEEP)


WAYS: dict[str, Callable[[], Any]] = {
    "Qwen2.5-VL": lambda: Qwen2VLImageProcessor(**QWEN),
    "Qwen2.5-VL, a quarter": lambda: QuarterOfUnits(**QWEN),
    "Qwen2.5-VL, a quarter by detail": lambda: QuarterByDetail(**QWEN),
    "Qwen2.5-VL, downsample": build_with_method("downsample"),
    "Qwen2.5-VL, dynres": build_with_method("dynres"),
    "Qwen2.5-VL, Pillow": lambda: Qwen2VLImageProcessorPil(**QWEN),
    "InternVL3": lambda: GotOcr2ImageProcessor(**TILES),
    "InternVL3, Pillow": lambda: GotOcr2ImageProcessorPil(**TILES),
    "LLaVA-1.5": lambda: CLIPImageProcessor(**SQUARE),
    "LLaVA-1.5, Pillow": lambda: CLIPImageProcessorPil(**SQUARE),
}
FIRST = next(iter(WAYS))


class Steps:
    """CPU and wall seconds of each step of a processor's call."""

    def __init__(self, processor: Any) -> None:
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._inner: list[list[float]] = []  # for each active step, the time of the steps inside it
        for name, step in STEPS.items():
            if hasattr(processor, name):
                setattr(processor, name, self._timed(step, getattr(processor, name)))
        if (patch := find_patch(processor)) is not None:
            patch.resizer.resize = self._timed("method", patch.resizer.resize)

    def _timed(self, step: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.take(step, lambda: run(*args, **kwargs))

        return timed

    def take(self, step: str, run: Callable[[], Any]) -> Any:
        self._inner.append([0.0, 0.0])
        start = (time.process_time(), time.perf_counter())
        result = run()
        elapsed = [time.process_time() - start[0], time.perf_counter() - start[1]]
        inner = self._inner.pop()
        for clock in (0, 1):
            self.spent[step][clock] += elapsed[clock] - inner[clock]
            if self._inner:
                self._inner[-1][clock] += elapsed[clock]
        return result


def photograph(height: int, width: int) -> bytes:
    """Return a JPEG of noise at several scales. Coarser noise has a larger amplitude."""
    generator = torch.Generator().manual_seed(0)
    image = torch.zeros(1, 3, height, width)
    for side in (3, 12, 48, 192, 768):
        coarse = torch.randn(1, 3, side, side * width // height, generator=generator) * 3 / side**0.5
        image += torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    pixels = ((image[0] * 0.3 + 0.5).clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(file: bytes) -> Image.Image:
    with Image.open(io.BytesIO(file)) as image:
        return image.convert("RGB")


def run_once(name: str, file: bytes) -> tuple[dict[str, list[float]], torch.Tensor]:
    """Return the CPU and wall seconds of each step of a processor, and its pixel values."""
    processor = WAYS[name]()
    steps = Steps(processor)
    with torch.inference_mode():
        image = steps.take("decode", lambda: decoded(file))
        outputs = steps.take("other", lambda: processor(images=[image], return_tensors="pt"))
    return dict(steps.spent), outputs["pixel_values"]


def compare_rows(file: bytes) -> dict[str, bool]:
    """Return whether the rows of each quarter are bit-equal to the rows of the full processor."""

    def build_units(name: str) -> torch.Tensor:
        return run_once(name, file)[1].unflatten(0, (-1, 4))

    expected = build_units(FIRST)
    processor = WAYS[FIRST]()
    mean, std = (torch.tensor(constants)[:, None] for constants in (processor.image_mean, processor.image_std))
    colours = torch.addcmul(mean, expected.unflatten(2, (3, -1)), std).flatten(1)[None, None]
    kept = TowerDrop(layer=0, score="detail").keep_units(colours, len(expected) // EVERY).flatten()
    return {
        "Qwen2.5-VL, a quarter": torch.equal(expected[::EVERY], build_units("Qwen2.5-VL, a quarter")),
        "Qwen2.5-VL, a quarter by detail": torch.equal(expected[kept], build_units("Qwen2.5-VL, a quarter by detail")),
    }


def measure(megapixels: float, size: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """Return one row per processor."""
    file = photograph(*size)
    equal = compare_rows(file)
    runs: dict[str, list[dict[str, list[float]]]] = {name: [] for name in WAYS}
    shapes = {}
    for round_index in range(rounds):
        offset = round_index % len(WAYS)
        for name in [*WAYS][offset:] + [*WAYS][:offset]:
            spent, pixels = run_once(name, file)
            runs[name].append(spent)
            shapes[name] = list(pixels.shape)

    def total(name: str, clock: int = 0) -> list[float]:
        return [sum(seconds[clock] for seconds in run.values()) for run in runs[name]]

    def medians(name: str, clock: int) -> dict[str, float]:
        times_by_step = {step: [run[step][clock] for run in runs[name]] for step in ORDER if step in runs[name][0]}
        return {step: round(1e3 * statistics.median(times), 3) for step, times in times_by_step.items()}

    rows = []
    for name in WAYS:
        ratios = [seconds / first_total for seconds, first_total in zip(total(name), total(FIRST), strict=True)]
        rows.append({
            "way": name, "megapixels": megapixels, "ms": round(1e3 * statistics.median(total(name)), 3),
            "wall_ms": round(1e3 * statistics.median(total(name, 1)), 3), "times": round(statistics.median(ratios), 4),
            "cpu": medians(name, 0), "wall": medians(name, 1), "pixels": shapes[name], "jpeg": len(file),
            **({"equal": equal[name]} if name in equal else {}),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="run a small image twice as a check")
    parser.add_argument("--json", type=Path, default=results_path(CPU, "preprocessing"))
    add_options(parser)
    args = parser.parse_args()
    args.tiny = args.quick
    rounds, sizes = (2, SMALL) if args.quick else (args.rounds, SIZES)
    file = Rows(args.json, header(CPU, columns=COLUMNS), args, code=code_version(), rounds=rounds)
    table = Table(title="A processor's work on one image, CPU time")
    for column in COLUMNS.values():
        table.add_column(column)
    for size in sizes.items():
        for row in file.measure(size[0], lambda size=size: measure(*size, rounds)):
            cells = [(row | row["cpu"]).get(key, "") for key in COLUMNS]
            table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
