# SPDX-License-Identifier: Apache-2.0
"""Parts of the test suite that run on each model type, for pages, commands and session checks."""

from __future__ import annotations

from tokenprune.models.families.row import Family

# The test suite runs every method on these model types.
EVERY_METHOD = frozenset(
    "gemma3 idefics3 internvl llava llava_next llava_onevision qwen2_5_vl qwen2_vl qwen3_vl smolvlm".split()
)
# The test suite runs sessions on these model types, the second set also with sliding windows.
SESSIONS = EVERY_METHOD - {"idefics3", "smolvlm"}
SESSIONS_IN_WINDOWS = frozenset({"gemma3"})


def list_tested_sites(row: Family) -> tuple[str, ...]:
    """Return the names of the sites with tested methods, in processing order."""
    every_method = row.name in EVERY_METHOD
    tested = {
        "PRE_ENCODER": every_method,
        "IN_ENCODER": row.merges,
        "PRE_LLM": True,
        "ATTENTION": every_method and row.videos == "frames",
        "IN_LLM": True,
        "DECODE": not (row.stateful or row.vectors),
    }
    return tuple(site for site, is_tested in tested.items() if is_tested)
