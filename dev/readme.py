# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md and docs: numbers from the committed raw files.

python dev/readme.py            # rewrite the pages and docs/images/bench.png
python dev/readme.py --check    # exit with 1 where a page is not what this would write
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "benchmarks" / "experiments")]
import accuracy_pages  # noqa: E402
import document_pages  # noqa: E402
import front_page  # noqa: E402
import gpu_page  # noqa: E402
import kernel_page  # noqa: E402
import landing_page  # noqa: E402
import method_pages  # noqa: E402
import performance  # noqa: E402
import recover_page  # noqa: E402
import restore_page  # noqa: E402
import rows  # noqa: E402
import serving_page  # noqa: E402
import shared_budget_page  # noqa: E402
import tower_page  # noqa: E402
import trust_page  # noqa: E402
import which_method  # noqa: E402

ENCODER = ROOT / "benchmarks/results/encoder.jsonl"
LOSERS = ROOT / "benchmarks/results/losers.jsonl"
VIDEO = ROOT / "benchmarks/results/pevlm.jsonl"
DOCUMENTS = ROOT / "benchmarks/results/documents.jsonl"
ATTEND = ROOT / "benchmarks/results/attend.jsonl"
VIDEO_TOWER = ROOT / "benchmarks/results/cpu/video_tower.jsonl"


link = accuracy_pages.link


def encoder() -> str:
    """The table of the time that merging saves in a vision tower, from its raw file."""
    header, records = rows.quiet(ENCODER)
    if not records:
        return ""
    lines = [
        "| method | images at once | tokens left of them | time / unpatched, wall (CPU) | efficiency, wall (CPU) |",
        "|---|---|---|---|---|",
    ]
    for one in records:
        left = ", ".join(map(str, one["counts"][-1]))
        wall, cpu = one["wall"], one["cpu"]
        lines.append(
            f"| `{one['method']}` | {one['batch']} | {left} | {wall['ratio']:.2f} ({cpu['ratio']:.2f}) "
            f"| {wall['efficiency']:.3f} ({cpu['efficiency']:.3f}) |"
        )
    setting = (
        f"A CLIP tower of ViT-B's size, {records[0]['counts'][0][0]} tokens an image, random weights, on "
        f"{header['device']}, {header['threads']} threads, torch {header['torch']}. The oracle runs the same blocks by "
        "hand on exactly the tokens that were left, by slicing: efficiency 1.0 means that matching and merging are "
        "free. CPU time leaves out what other work on the machine took."
    )
    return "\n\n".join(
        [setting, "\n".join(lines), f"By `python benchmarks/experiments/encoder.py`; raw data: {link(ENCODER, '../')}."]
    )


def losers() -> str:
    """The table of how methods that do badly fare when their choice is made in other ways, from its raw file."""
    records = [json.loads(line) for line in LOSERS.read_text().splitlines()[1:]]
    keeps = list(dict.fromkeys(one["keep"] for one in records))
    lines = ["| method | reading | " + " | ".join(f"keep {keep:g}" for keep in keeps) + " |"]
    lines.append("|---" * (2 + len(keeps)) + "|")
    for method, reading in dict.fromkeys((one["method"], one["reading"]) for one in records):
        found = {one["keep"]: one for one in records if (one["method"], one["reading"]) == (method, reading)}
        cells = [
            f"{100 * one['right'].count('1') / len(one['right']):.1f} @{one['tokens_in_decoder']:.0f}"
            for one in found.values()
        ]
        lines.append(f"| `{method}` | {reading} | " + " | ".join(cells) + " |")
    source = f"By `python benchmarks/experiments/studies/losers.py`; raw data: {link(LOSERS, '../')}."
    note = f"Percent right @ visual tokens in the decoder. {source}"
    return "\n\n".join(["\n".join(lines), note])


def attend() -> str:
    """The table of how answers fare that read a part of a session, from its raw file."""
    header, records = rows.read(ATTEND)
    right = {(one["attend"], one["how"]): 100 * one["right"].count("1") / len(one["right"]) for one in records}
    shares = list(dict.fromkeys(share for share, _ in right))
    lines = ["| visual tokens read | " + " | ".join(f"{100 * share:g} %" for share in shares) + " |"]
    lines.append("|---" * (1 + len(shares)) + "|")
    for how, words in (("attended", "that the question attends to"), ("drawn", "drawn at random")):
        values = (right.get((share, how), right[1.0, "attended"]) for share in shares)
        lines.append(f"| {words} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    note = (
        f"Percent right of {len(records[0]['right'])} questions about {header['images']} images, {header['model']}, "
        "whose answers are sentences that end in what was asked for. By `python experiments/studies/attend.py`; raw "
        f"data: {link(ATTEND, '../')}."
    )
    return "\n\n".join(["\n".join(lines), note])


def video_tower() -> str:
    """The table of a video's time in the vision tower and to the first token, from its raw file."""
    header, records = rows.quiet(VIDEO_TOWER)
    if not records:
        return ""
    lines = ["| method | tokens kept | tower | first token |", "|---|---|---|---|"]
    for one in records[1:]:
        ratios = " | ".join(f"{one['ratio'][what]:.2f}" for what in ("tower CPU", "first token CPU"))
        lines.append(f"| `{one['method']}` | {one['visual_tokens_out']} | {ratios} |")
    share = records[0]["ms"]["tower CPU"] / records[0]["ms"]["first token CPU"]
    note = (
        f"CPU time over the unpatched model's, in turn, median of rounds: a video of {header['frames']} frames of "
        f"{header['side']} pixels, keep {header['keep']}, LLaVA-OneVision-0.5B at 1/{header['widths']} of its widths, "
        f"random weights, {header['threads']} thread; unpatched the tower takes {share:.0%} of the time to the first "
        f"token. By `python benchmarks/experiments/video_tower.py`; raw data: {link(VIDEO_TOWER, '../../')}."
    )
    return "\n\n".join(["\n".join(lines), note])


def video() -> str:
    """The table of how prefill grows with the frames of a video, from its raw file."""
    header, records = rows.read(VIDEO)
    records = [one for one in records if not (one["what"].endswith("ms") and rows.is_loaded(one, header))]
    frames = header["frames"]
    lines = ["| | attention | " + " | ".join(f"{n} frames" for n in frames) + " | exponent |"]
    lines.append("|---" * (3 + len(frames)) + "|")
    for one in records:
        values = " | ".join(_measured(one["what"], value) for value in one["values"])
        lines.append(f"| {one['what']} | {one['way']} | {values} | {one['exponent']:.2f} |")
    setting = (
        f"Prefill of a video of {header['tokens_per_frame']} tokens a frame; a small decoder with random weights on "
        f"{header['device']}, one thread, torch {header['torch']}, transformers "
        f"{header['transformers']}; `pevlm` with sink_frames={header['sink_frames']}, "
        f"block_frames={header['block_frames']} and min_frames=1, full attention beside it. Times are CPU time. The "
        "exponent is that of a power of the number of frames, fitted to all points."
    )
    return "\n\n".join(
        [setting, "\n".join(lines), f"By `python benchmarks/experiments/pevlm.py`; raw data: {link(VIDEO, '../')}."]
    )


def documents() -> str:
    """The table of methods at equal tokens on drawn documents, from its raw file."""
    from tokenprune_bench.significance import LEVEL, better_p
    from tokenprune_demo.drawn_documents import TEXT_KINDS

    header, *records = (json.loads(line) for line in DOCUMENTS.read_text().splitlines())
    results = [one for one in records if one["record"] == "result"]
    by_place = {(one["method"], one["level"]): one["right"] for one in results}
    kinds = header["kinds"]

    def share(right: str, where: list[bool]) -> str:
        chosen = [answer == "1" for answer, here in zip(right, where, strict=True) if here]
        return f"{100 * statistics.fmean(chosen):.0f}"

    about_text = [one in TEXT_KINDS for one in kinds]
    parts = []
    for level, said in (("all", "exact repetitions dropped"), ("half", "half as many tokens")):
        about = ("tokens, tower/decoder", "right, %", "text")
        lines = [f"| {' | '.join((said, *about))} |"]
        lines.append("|---" * 4 + "|")
        own = [one for one in results if one["level"] == level]
        for one in sorted(own, key=lambda one: (one["method"] != "unpatched", -one["right"].count("1"))):
            right, ours = one["right"], by_place.get(("pixelprune", level))
            known = one["method"] in ("pixelprune", "unpatched") or ours is None
            worse = "" if known or better_p(ours, right) >= LEVEL else " ▼"
            lines.append(
                f"| `{one['method']}` | {one['tokens']['tower']:.0f}/{one['tokens']['decoder']:.0f} "
                f"| {100 * right.count('1') / len(right):.1f}{worse} | {share(right, about_text)} |"
            )
        parts.append("\n".join(lines))
    setting = (
        f"{header['model']}, {header['questions']} questions about {header['documents']} drawn documents of "
        "288 to 448 pixels a side ([how they are drawn](docs/results/video.md#documents)); it was not trained on them, "
        "nor with tokens dropped. Every other method keeps of each image as many tokens as `pixelprune`; averages over "
        "images and layers. ▼: worse than that (McNemar's exact test, one-sided, 5 %)."
    )
    command = f"python benchmarks/experiments/documents.py --documents {header['documents']}"
    source = f"By `{command}`; raw data: {link(DOCUMENTS, '../../')}."
    return "\n\n".join([setting, *parts, source])


def _measured(what: str, value: float) -> str:
    scale = {"millions": 1e-6, "ms": 1e3, "MiB": 2**-20}[what.rsplit(maxsplit=1)[-1]]
    return f"{value * scale:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = {path: text for path, text in generated().items() if path.read_text() != text}
    if args.check:
        sys.exit(bool(stale))
    for path, text in stale.items():
        path.write_text(text)
    (ROOT / "docs/images/bench.png").write_bytes(accuracy_pages.plot())


def generated() -> dict[Path, str]:
    """Return what each page with generated parts must hold."""
    return {
        ROOT / page: _filled((ROOT / page).read_text(), {name: rebase(make(), page) for name, make in parts.items()})
        for page, parts in PAGES.items()
    }


LINK = re.compile(r"(?<=\]\()(?![a-z]+:)(?:\.\./)*([^)#\s]+)")


def rebase(text: str, page: str) -> str:
    """Rewrite links relative to the repository root, or to docs/, as links relative to `page`."""

    def relative(match: re.Match[str]) -> str:
        target = next((base for base in (ROOT, ROOT / "docs") if (base / match[1]).exists()), None)
        return match[0] if target is None else os.path.relpath(target / match[1], (ROOT / page).parent)

    return LINK.sub(relative, text)


def _filled(page: str, parts: dict[str, str]) -> str:
    for name, text in parts.items():
        block = re.compile(rf"(<!-- {name}:begin[^\n]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        filled = f"\n{text}\n\n" if text else ""  # where nothing is known nothing stands
        page = block.sub(lambda match, filled=filled: f"{match[1]}{filled}{match[2]}", page)
    return page


PAGES = {
    "README.md": {
        "headline": front_page.headline,
        "choice": front_page.choice,
    },
    "docs/start/choose.md": {"which": which_method.tables},
    "docs/results/advice.md": {"evidence": which_method.pieces, "rule": which_method.rule},
    "docs/serving/start.md": {"choice": which_method.served, "serving": serving_page.serving},
    "docs/results/serving.md": serving_page.PARTS,
    "docs/index.md": {
        "landing": landing_page.landing,
        "headline": landing_page.headline,
        "gallery": landing_page.gallery,
    },
    "docs/results/documents.md": {"pages": document_pages.pages},
    "docs/guides/gpu.md": {"expect": gpu_page.table},
    "docs/results/training.md": {"recover": recover_page.recover, "sft": recover_page.sft},
    "docs/methods/README.md": {"measured": method_pages.overview},
    "docs/results/methods.md": {
        "documents": documents,
        "tower-blocks": tower_page.blocks,
        "restore-gain": restore_page.gain,
        "video-tower": video_tower,
        "prumerge-blocks": method_pages.prumerge_blocks,
    },
    "docs/results/sessions.md": {"attend": attend},
    "docs/results/video.md": {
        "videos": accuracy_pages.videos,
        "few": accuracy_pages.few,
        "views": accuracy_pages.views,
    },
    "docs/results/speed.md": {
        "efficiency": performance.efficiency,
        "mixed": performance.mixed,
        "scaling": performance.scaling,
        "decode": performance.decode,
        "memory": performance.memory,
        "gpu": performance.gpu,
        "first-token": tower_page.first_token,
        "processor": tower_page.processor,
    },
    "docs/results/kernels.md": {
        "compiled": kernel_page.compiled,
        "kernels-measured": kernel_page.measured,
    },
    "docs/results/trust.md": {"trust-kinds": trust_page.kinds, "trust-order": trust_page.order},
    "docs/results/accuracy.md": {
        "summary": accuracy_pages.summary,
        "shared-budget": shared_budget_page.shares,
        "losers": losers,
        "encoder": encoder,
        "video": video,
    },
}

if __name__ == "__main__":
    main()
