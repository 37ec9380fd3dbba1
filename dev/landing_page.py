# SPDX-License-Identifier: Apache-2.0
"""The generated parts of docs/index.md, from the committed raw files; dev/readme.py writes them."""

from __future__ import annotations

import json
from typing import Any

import front_page
from accuracy_pages import RESULTS, link

GALLERY = RESULTS / "gallery.json"


def landing() -> str:
    """Return what the library is, and what it gave on the pretrained model that ships."""
    return (
        "**Drop three quarters of the image tokens of a Hugging Face vision-language model in one line, without "
        "training: faster prefill, a smaller KV cache, and a report of what it costs.**"
        f"\n\n{front_page.speed_and_accuracy()}"
    )


def headline() -> str:
    """Return the README's table."""
    return front_page.headline(up="../")


def gallery() -> str:
    """Each photograph before and after, with what was asked and answered."""
    told = json.loads(GALLERY.read_text())
    figures = [_figure(one) for one in told["shown"]]
    before, after = (sum(not _is_right(one, when) for one in told["shown"]) for when in ("before", "after"))
    note = (
        f"Outlined tokens stay, dark ones are dropped, those of one flat colour became one. Photographs with drawn "
        f"things on them, which {told['model']} had not seen; images, questions and methods were fixed before it was "
        f"asked, and of these {len(figures)} answers {before} {'is' if before == 1 else 'are'} wrong with all tokens, "
        f"{after} with a quarter. By `python dev/gallery.py`; raw data: {link(GALLERY, '../')}."
    )
    return "\n\n".join(['<div class="gallery" markdown>', *figures, "</div>", note])


def _figure(one: dict[str, Any]) -> str:
    method = one["method"]
    images = " ".join(
        f"![{said}](images/gallery/{method}-{when}.webp){{ loading=lazy }}"
        for when, said in (("before", "The image"), ("after", f"What {method} keeps of it"))
    )
    counts = f"{one['before']['tokens']} → {one['after']['tokens']} tokens"
    if (average := one["after"]["average"]) != one["after"]["tokens"]:  # cut inside the decoder
        counts += f", {average:.0f} averaged over layers"
    asked = f"“{one['question']}” {_answer(one, 'before')} → {_answer(one, 'after')}"
    said = f"[`{method}`](methods/{method}.md), {counts}<br>{asked}"
    return f"<figure markdown>\n\n{images}\n\n<figcaption markdown>\n\n{said}\n\n</figcaption>\n\n</figure>"


def _answer(one: dict[str, Any], when: str) -> str:
    answer = one[when]["answer"].strip()
    return f"**{answer}**" + ("" if _is_right(one, when) else f" ✗ (right: {one['right']})")


def _is_right(one: dict[str, Any], when: str) -> bool:
    return one[when]["answer"].strip().lower() == one["right"]
