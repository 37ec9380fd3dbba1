# SPDX-License-Identifier: Apache-2.0
"""Fits of the methods that are calibrated to a model, on images without labels."""

from __future__ import annotations

from tokenprune.methods.encoder.thresholds import Thresholds
from tokenprune_bench.calibration.attention_fitting import fit_d2pruner, fit_fitprune
from tokenprune_bench.calibration.head_fitting import fit_hawk
from tokenprune_bench.calibration.rate_fitting import fit_dyrate
from tokenprune_bench.calibration.run import calibrate
from tokenprune_bench.calibration.selector_fitting import fit_learned

__all__ = ["Thresholds", "calibrate", "fit_d2pruner", "fit_dyrate", "fit_fitprune", "fit_hawk", "fit_learned"]
