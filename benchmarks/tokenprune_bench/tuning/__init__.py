# SPDX-License-Identifier: Apache-2.0
"""Search for the cheapest setting that keeps accuracy on your own questions (docs/measure/tune.md)."""

from tokenprune_bench.tuning.candidates import build_grid
from tokenprune_bench.tuning.evaluator import Evaluator, Search
from tokenprune_bench.tuning.promise import Promise
from tokenprune_bench.tuning.trial import Trial, Tuning
from tokenprune_bench.tuning.tuner import Tuner

__all__ = ["Evaluator", "Promise", "Search", "Trial", "Tuner", "Tuning", "build_grid"]
