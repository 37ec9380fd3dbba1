# SPDX-License-Identifier: Apache-2.0
"""The time to the first token of a single request in vLLM, split by stage.

LLaVA-1.5-7B's shape with vLLM's dummy weights, bfloat16, one image: compiled as vLLM does by default, and eagerly;
unpatched and with divprune. "front end": reading the prompt, processing the image and making the request; "encoder",
"model" and "sampling": with the GPU synchronized around each; "scheduler and output": the rest of the engine. The rows
also hold the stages without waits, and the functions of one request that took longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit import Sheet  # isort: skip
from children import rows_of

SECONDS = 170.0
ENGINES = ("llava7b.eager", "llava7b.default", "llava7b.graphs")
COLUMNS = {
    "engine": "engine", "setting": "setting", "first_ms": "first token ms", "front_ms": "front end ms",
    "encoder_ms": "encoder ms", "model_ms": "model ms", "sample_ms": "sampling ms",
    "rest_ms": "scheduler and output ms",
}  # fmt: skip
GROUPS = {
    "front_ms": ("read the prompt and its images", "process images", "make the request"),
    "encoder_ms": ("encode images",),
    "model_ms": ("run the model",),
    "sample_ms": ("sample",),
    "rest_ms": ("schedule", "update the scheduler", "make the output", "other"),
}


def measure(name: str, tiny: bool) -> list[dict[str, Any]]:
    """Return the rows of an engine."""
    rows = []
    for row in rows_of("first_token", name, tiny):
        stages = row["stages_with_waits_ms"]
        split = {key: sum(stages.get(label, 0.0) for label in labels) for key, labels in GROUPS.items()}
        rows.append({"engine": name} | row | split)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("h_vllm_first_token", "First token in vLLM", "LLaVA-1.5-7B", COLUMNS, __doc__, argv)
    for name in ENGINES[:1] if sheet.tiny else ENGINES:
        sheet.take((name,), lambda name=name: measure(name, sheet.tiny), SECONDS)
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())
