# SPDX-License-Identifier: Apache-2.0
"""Let waiting OpenMP threads sleep, and put the modules in benchmarks/experiments on the path of the studies."""

import sys
from pathlib import Path

from tokenprune.models.torch_import import set_passive_threads

sys.path.append(str(Path(__file__).parents[1]))
set_passive_threads()
