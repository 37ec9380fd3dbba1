# SPDX-License-Identifier: Apache-2.0
"""Naive loop of CLSE (arXiv 2606.24165)."""

from __future__ import annotations

import cmath
import math
import statistics
from typing import Any

from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best


def high_frequencies(features: Tensor, height: int, width: int, cutoff: float) -> list[float]:
    """Return the mean magnitude of each token after a Gaussian high-pass filter, with an explicit Fourier sum."""
    cells = [(row, column) for row in range(height) for column in range(width)]

    def gain(row: int, column: int) -> float:
        # Frequencies above half of the sampling rate are negative.
        y, x = ((f + side // 2) % side - side // 2 for f, side in ((row, height), (column, width)))
        return 1 - math.exp(-(y * y + x * x) / (2 * (min(height // 2, width // 2) * cutoff) ** 2))

    def phase(sign: int, a: tuple[int, int], b: tuple[int, int]) -> complex:
        return cmath.exp(sign * 2j * math.pi * (a[0] * b[0] / height + a[1] * b[1] / width))

    total = [0.0] * len(cells)
    for channel in features.double().T.tolist():
        spectrum = [sum(value * phase(-1, f, cell) for value, cell in zip(channel, cells, strict=True)) for f in cells]
        filtered = [gain(*f) * value for f, value in zip(cells, spectrum, strict=True)]
        for index, cell in enumerate(cells):
            total[index] += abs(
                sum(value * phase(1, f, cell) for f, value in zip(cells, filtered, strict=True)) / len(cells)
            )
    return [value / features.shape[1] for value in total]


def naive(arrived: Arrived, decoder: Any, cutoff: float = 0.1, temperature: float = 0.1) -> list[int]:
    """Score by the last token's attention. The first cut weighs it by the change of high frequencies."""
    attention = arrived.before.double().mean(0)[arrived.last]
    score = [float(attention[index]) for index in arrived.places]
    if arrived.number == 0:
        side = math.isqrt(len(arrived.places))
        magnitude_before = high_frequencies(arrived.entered[arrived.places], side, side, cutoff)
        magnitude_after = high_frequencies(arrived.hidden[arrived.places], side, side, cutoff)
        mean = statistics.fmean(magnitude_before)
        change = [
            min(1, abs(b - a) / (mean + a + 1e-6)) for a, b in zip(magnitude_before, magnitude_after, strict=True)
        ]
        mean_change, deviation = statistics.fmean(change), statistics.stdev(change)
        weight = [1 / (1 + math.exp(-(value - mean_change) / (deviation + 1e-6) / temperature)) for value in change]
        score = [a * b for a, b in zip(score, weight, strict=True)]
    return [arrived.places[index] for index in best(score, arrived.keep)]


ROWS = {
    "clse": Cuts(
        naive=naive,
        tried=({}, {"cutoff": 0.4, "temperature": 1.0}),
        refused=({"cutoff": 0.0}, {"temperature": -1.0}, {"layers": (1, 2)}),
        layers=(1, 2, 3),
    )
}
