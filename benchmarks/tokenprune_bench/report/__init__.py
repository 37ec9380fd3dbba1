# SPDX-License-Identifier: Apache-2.0
"""Report of one or several benchmark runs: one self-contained page.

runs.py reads runs, verdict.py finds the best settings, warnings.py lists limits of the results, compare.py compares
runs, plots.py and layers.py compute plots, drawing.py draws kept tokens at the end of a run, samples.py reads these
drawings, and page.py fills the templates.
"""
