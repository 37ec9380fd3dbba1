# SPDX-License-Identifier: Apache-2.0
"""Print the folder of the tasks: `--include_path "$(python -m tokenprune_bench.lmms_eval)"`."""

from __future__ import annotations

from tokenprune_bench.lmms_eval import get_tasks_folder

print(get_tasks_folder())
