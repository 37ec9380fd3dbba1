# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of docs/index.md from the committed raw files; dev/readme.py calls this module."""

from __future__ import annotations

import json
from typing import Any

import front_page
from accuracy_pages import RESULTS, link

GALLERY = RESULTS / "gallery.json"


def landing() -> str:
    """Return one sentence about the measured gain on a shipped model."""
    return front_page.speed_and_accuracy()


def headline() -> str:
    """Return the tables of README."""
    return front_page.headline()


def gallery() -> str:
    """Return each photograph before and after pruning, with the question and both answers."""
    record = json.loads(GALLERY.read_text())
    examples = sorted(record["shown"], key=lambda example: not is_right(example, "after"))
    num_wrong = {when: sum(not is_right(example, when) for example in examples) for when in ("before", "after")}
    note = (
        "Kept patches are outlined, dropped patches are dark, merged patches share one color. The images are "
        f"photographs with drawn objects that {record['model']} was not trained on. Images, questions and methods were "
        f"fixed before the run: {num_wrong['before']} of {len(examples)} answers are wrong with all tokens, "
        f"{num_wrong['after']} with a quarter. By `python dev/gallery.py`; raw data: {link(GALLERY)}."
    )
    return "\n\n".join(['<div class="gallery" markdown>', *map(draw_example, examples), "</div>", note])


def draw_example(example: dict[str, Any]) -> str:
    """Return the HTML figure of one example."""
    method = example["method"]
    images = " ".join(
        f"![{title}](images/gallery/{method}-{when}.webp){{ loading=lazy }}"
        for when, title in (("before", "The image"), ("after", f"The patches that {method} keeps"))
    )
    counts = f"{example['before']['tokens']} → {example['after']['tokens']} tokens"
    if (average := example["after"]["average"]) != example["after"]["tokens"]:  # cut inside the decoder
        counts += f", {average:.0f} averaged over layers"
    answers = f"“{example['question']}” {format_answer(example, 'before')} → {format_answer(example, 'after')}"
    caption = f"[`{method}`](methods/{method}.md), {counts}<br>{answers}"
    return f"<figure markdown>\n\n{images}\n\n<figcaption markdown>\n\n{caption}\n\n</figcaption>\n\n</figure>"


def format_answer(example: dict[str, Any], when: str) -> str:
    """Return the answer in bold; a wrong answer is marked, with the right answer beside it."""
    answer = example[when]["answer"].strip()
    return f"**{answer}**" + ("" if is_right(example, when) else f" ✗ (right: {example['right']})")


def is_right(example: dict[str, Any], when: str) -> bool:
    return example[when]["answer"].strip().lower() == example["right"]
