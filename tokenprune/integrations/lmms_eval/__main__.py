# SPDX-License-Identifier: Apache-2.0
"""Print the folder of the tasks, as `python -m tokenprune.lmms_eval` does."""

import runpy

runpy.run_module("tokenprune.lmms_eval", run_name="__main__")
