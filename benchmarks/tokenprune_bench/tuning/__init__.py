# SPDX-License-Identifier: Apache-2.0
"""Find the cheapest setting that keeps accuracy on your own questions, with a stated confidence
(docs/measure/tune.md)."""

from tokenprune_bench.tuning.candidates import grid
from tokenprune_bench.tuning.evaluator import Evaluator, Search
from tokenprune_bench.tuning.promise import Promise
from tokenprune_bench.tuning.trial import Trial, Tuning
from tokenprune_bench.tuning.tuner import Tuner

__all__ = ["Evaluator", "Promise", "Search", "Trial", "Tuner", "Tuning", "grid"]
