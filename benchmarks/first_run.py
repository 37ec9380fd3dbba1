# SPDX-License-Identifier: Apache-2.0
"""Run the README's first code on the model and an image that ship with the package, and keep what it prints.

python benchmarks/first_run.py    # writes benchmarks/results/first_run.json; then python dev/readme.py
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks/results/first_run.json"
# What the README names, and what stands in for it here.
STAND_INS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": "tokenprune/assets/demo_vlm",
    "photo.jpg": "tokenprune/assets/heldout/pictures/002.jpg",
}


def code() -> str:
    """Return the README's first code with the shipped model and image in it."""
    text = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    for name, other in STAND_INS.items():
        if text.count(f'"{name}"') != 1:
            raise ValueError(f"the README's first code must name {name} once")
        text = text.replace(f'"{name}"', repr(str(ROOT / other)))
    return text


def run() -> list[str]:
    """Return the lines that the code prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code(), "README.md", "exec"), {})
    return out.getvalue().splitlines()


def main() -> None:
    from tokenprune.startup import calm_threads

    calm_threads()
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record = versions | {"stand_ins": STAND_INS, "printed": run()}
    OUT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
