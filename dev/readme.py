# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md and docs: numbers from the committed raw files.

python dev/readme.py            # rewrite the pages and docs/images/bench.png
python dev/readme.py --check    # exit with 1 if a page is stale
"""

from __future__ import annotations

import argparse
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
import pixels_page  # noqa: E402
import recover_page  # noqa: E402
import restore_page  # noqa: E402
import rows  # noqa: E402
import serving_page  # noqa: E402
import shared_budget_page  # noqa: E402
import tower_page  # noqa: E402
import trust_page  # noqa: E402
import which_method  # noqa: E402
from tables import format_share, format_table  # noqa: E402

VIDEO = ROOT / "benchmarks/results/pevlm.jsonl"
DOCUMENTS = ROOT / "benchmarks/results/documents.jsonl"
ATTEND = ROOT / "benchmarks/results/attend.jsonl"
VIDEO_TOWER = ROOT / "benchmarks/results/cpu/video_tower.jsonl"


def attend() -> str:
    """Return accuracy by the share of a session's visual tokens that is read."""
    header, records = rows.read(ATTEND)
    right = {
        (record["attend"], record["how"]): 100 * record["right"].count("1") / len(record["right"]) for record in records
    }
    shares = list(dict.fromkeys(share for share, _ in right))
    lines = [
        [words, *(f"{right.get((share, how), right[1.0, 'attended']):.1f}" for share in shares)]
        for how, words in (("attended", "most attended by the question"), ("drawn", "random"))
    ]
    note = (
        f"Correct answers in %, of {len(records[0]['right'])} questions about {header['images']} images, "
        f"{header['model']}. By `python benchmarks/experiments/studies/attend.py`; "
        f"[raw data]({ATTEND.relative_to(ROOT)})."
    )
    return f"{format_table(['visual tokens read', *(f'{100 * share:g} %' for share in shares)], lines)}\n\n{note}"


def video_tower() -> str:
    """Return time in the vision tower and to the first token for a video."""
    header, records = rows.quiet(VIDEO_TOWER)
    if not records:
        return ""
    lines = []
    for record in records[1:]:
        ratios = (f"{record['ratio'][part]:.2f}" for part in ("tower CPU", "first token CPU"))
        lines.append([f"`{record['method']}`", str(record["visual_tokens_out"]), *ratios])
    share = records[0]["ms"]["tower CPU"] / records[0]["ms"]["first token CPU"]
    note = (
        f"CPU time relative to the unpatched model (median): {header['frames']} frames of {header['side']} pixels, "
        f"keep {header['keep']}, LLaVA-OneVision-0.5B at 1/{header['widths']} of its widths, random weights, "
        f"{header['threads']} thread. The tower takes {share:.0%} of the unpatched time to the first token. By `python "
        f"benchmarks/experiments/video_tower.py`; [raw data]({VIDEO_TOWER.relative_to(ROOT)})."
    )
    return f"{format_table(['method', 'tokens kept', 'tower', 'first token'], lines)}\n\n{note}"


def video() -> str:
    """Return prefill and attention time by the number of video frames, with and without `pevlm`."""
    header, records = rows.read(VIDEO)
    records = [row for row in records if row["what"].endswith(", ms") and not rows.is_loaded(row, header)]
    frames = header["frames"]
    titles = ["CPU time", "attention", *(f"{count} frames" for count in frames), "exponent"]
    lines = [
        [row["what"], row["way"], *(f"{1e3 * value:.0f}" for value in row["values"]), f"{row['exponent']:.2f}"]
        for row in records
    ]
    setup = (
        f"{header['tokens_per_frame']} tokens per frame, a small decoder with random weights, {header['device']}, one "
        f"thread, torch {header['torch']}; `pevlm` with sink_frames={header['sink_frames']}, "
        f"block_frames={header['block_frames']} and min_frames=1."
    )
    source = f"By `python benchmarks/experiments/pevlm.py`; [raw data]({VIDEO.relative_to(ROOT)})."
    return "\n\n".join([setup, format_table(titles, lines, left=2), source])


def documents() -> str:
    """Return accuracy at equal tokens on drawn documents."""
    from tokenprune_bench.significance import LEVEL, better_p
    from tokenprune_demo.drawn_documents import TEXT_KINDS

    header, records = rows.read(DOCUMENTS)
    results = [row for row in records if row["record"] == "result"]
    by_setting = {(row["method"], row["level"]): row["right"] for row in results}
    is_text = [kind in TEXT_KINDS for kind in header["kinds"]]
    parts = []
    for level, title in (("all", "exact repetitions dropped"), ("half", "half as many tokens")):
        lines = []
        shown = [row for row in results if row["level"] == level]
        for row in sorted(shown, key=lambda row: (row["method"] != "unpatched", -row["right"].count("1"))):
            right, ours = row["right"], by_setting.get(("pixelprune", level))
            is_reference = row["method"] in ("pixelprune", "unpatched") or ours is None
            mark = "" if is_reference or better_p(ours, right) >= LEVEL else " ▼"
            text_answers = [answer == "1" for answer, chosen in zip(right, is_text, strict=True) if chosen]
            tokens = f"{row['tokens']['tower']:.0f}/{row['tokens']['decoder']:.0f}"
            text_share = f"{100 * statistics.fmean(text_answers):.0f}"
            lines.append([f"`{row['method']}`", tokens, f"{format_share(right)}{mark}", text_share])
        parts.append(format_table([title, "tokens, tower/decoder", "correct, %", "text, %"], lines, left=1))
    setup = (
        f"{header['model'].removesuffix(' (shipped)')}, {header['questions']} questions about {header['documents']} "
        "[drawn documents](docs/results/video.md#documents), which are not in its training set. Other methods keep as "
        "many tokens per image as `pixelprune`. Tokens are averages over images and layers. ▼: significantly worse "
        "than `pixelprune`."
    )
    command = f"python benchmarks/experiments/documents.py --documents {header['documents']}"
    return "\n\n".join([setup, *parts, f"By `{command}`; [raw data]({DOCUMENTS.relative_to(ROOT)})."])


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
    """Return the current text of each page with generated parts."""
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
        filled = f"\n{text}\n\n" if text else ""
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
        "scaling": performance.scaling,
        "memory": performance.memory,
        "gpu": performance.gpu,
        "pixels": pixels_page.pixels,
        "first-token": tower_page.first_token,
    },
    "docs/results/kernels.md": {
        "compiled": kernel_page.compiled,
        "kernels-measured": kernel_page.measured,
    },
    "docs/results/trust.md": {"trust-kinds": trust_page.kinds, "trust-order": trust_page.order},
    "docs/results/accuracy.md": {
        "summary": accuracy_pages.summary,
        "shared-budget": shared_budget_page.shares,
        "video": video,
    },
}

if __name__ == "__main__":
    main()
