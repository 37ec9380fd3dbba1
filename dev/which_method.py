# SPDX-License-Identifier: Apache-2.0
"""Write the table of docs/guide/which-method.md: what `tokenprune recommend` says of two well-known models.

python dev/which_method.py            # rewrite the page
python dev/which_method.py --check    # exit with 1 where the page is not what this would write
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs/guide/which-method.md"
_BLOCK = re.compile(r"(<!-- which:begin[^\n]*-->\n).*?(<!-- which:end -->)", re.DOTALL)
_TASKS = {
    "chat": "questions about photographs",
    "documents": "documents, signs, charts",
    "video": "video",
    "grounding": "where things are",
}
_GOALS = {"ttft": "time to the first token", "memory": "memory of the cache", "quality": "quality"}


def models() -> dict[str, Any]:
    """Return configs of the shapes of well-known models, by what the page calls them."""
    from transformers import LlavaConfig, Qwen2_5_VLConfig

    # The widths and depths of Qwen2.5-VL-7B; transformers' default is another one.
    text = dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    tower = dict(hidden_size=1280, intermediate_size=3420, depth=32, num_heads=16, out_hidden_size=3584)
    return {"LLaVA-1.5-7B": LlavaConfig(), "Qwen2.5-VL-7B": Qwen2_5_VLConfig(text_config=text, vision_config=tower)}


def table() -> str:
    from tokenprune.recommendation import GOALS, TASKS, recommend

    lines = ["| you ask about | you care for | start from | because |", "|---|---|---|---|"]
    for task in TASKS:
        rows: dict[tuple[str, str], list[str]] = {}  # goals by what is said of them
        for goal in GOALS:
            found = {name: recommend(config, task=task, goal=goal) for name, config in models().items()}
            settings = {_setting(one): one for one in found.values()}
            told = next(iter(settings))
            if len(settings) > 1:
                told = ", ".join(f"{_setting(one)} on {name}" for name, one in found.items())
            rows.setdefault((told, "; ".join(map(_because, settings.values()))), []).append(_GOALS[goal])
        lines += [f"| {_TASKS[task]} | {', '.join(goals)} | {' | '.join(row)} |" for row, goals in rows.items()]
    return "\n".join(lines)


def _setting(one: Any) -> str:
    served = "" if one.served else " (not in vLLM)"
    return f"[`{one.method}`](../methods/{one.method}.md) at {one.setting['keep']}{served}"


def _because(one: Any) -> str:
    """Say in short what speaks for a setting: the first number of it, of accuracy."""
    first = one.evidence[0]
    return f"{first.short} ({_source(first.source)})"


def _source(source: str) -> str:
    return f"[ours](../../{source})" if source.startswith("benchmarks/") else source


def page(text: str) -> str:
    """Return the page with its table made anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    old = PAGE.read_text()
    new = page(old)
    if parser.parse_args().check:
        sys.exit(old != new)
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
