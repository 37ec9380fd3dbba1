# SPDX-License-Identifier: Apache-2.0
"""Made-up results in the format of lmms-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def find_setting(papers: Any, name: str) -> Any:
    return next(candidate for candidate in papers.settings.settings() if candidate.name == name)


def write_results(papers: Any, folder: Path, name: str, numbers: dict[str, float], **changes: Any) -> Path:
    """Write a results file in the format of lmms-eval 0.7.3, with `numbers` in the papers' units."""
    results: dict[str, Any] = {}
    for key, value in numbers.items():
        task_set = papers.sets.SETS[key]
        share = value / task_set.scale / len(task_set.metrics)
        stderr = {f"{metric}_stderr,none": "N/A" for metric in task_set.metrics}
        task = changes.get("tasks", {}).get(key, task_set.tasks[0])
        results[task] = {"alias": task, **{f"{metric},none": share for metric in task_set.metrics}, **stderr}
    arguments = find_setting(papers, name).arguments("llava-hf/llava-1.5-7b-hf", "cuda", "thresholds.safetensors")
    config = {"model": "tokenprune", "model_args": arguments, "batch_size": "1", "limit": None} | changes.get(
        "config", {}
    )
    data = {"results": results, "configs": {}, "config": config, "throughput": changes.get("throughput", {})}
    path = folder / name / "llava-hf__llava-1.5-7b-hf" / f"{changes.get('date', '20260101_000000')}_results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def truncate_file(path: Path) -> None:
    path.write_text(path.read_text()[:-20])
