# SPDX-License-Identifier: Apache-2.0
"""The report of one or several benchmark runs: a single page that loads nothing from anywhere.

runs.py reads runs, verdict.py says what to take, warnings.py what to beware of, compare.py lays runs side by side,
plots.py and layers.py draw, samples.py draws what methods keep (at the end of a run) and reads that back, page.py fills
the templates.
"""
