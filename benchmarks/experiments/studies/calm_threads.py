# SPDX-License-Identifier: Apache-2.0
"""Let OpenMP's threads sleep while they wait, as experiments/calm_threads.py does; and let the studies import what the
scripts beside them share."""

import sys
from pathlib import Path

from tokenprune.models.torch_import import set_passive_threads

sys.path.append(str(Path(__file__).parents[1]))
set_passive_threads()
