# SPDX-License-Identifier: Apache-2.0
"""Run the README's first code on the model and an image that ship with the package, keep what it prints, and take the
time to its first token.

    python benchmarks/first_run.py    # writes benchmarks/results/first_run.json; then dev/readme.py

The time runs from the image to the first token, processor and vision tower included, of the setting that the code
patches with, in turn with the unpatched model. It is the speed that the site's front page states, beside the accuracy
of the same model at the same setting (benchmarks/results/bench.jsonl). On a loaded machine the time is left as it was,
and the run ends with what `rows.Load` says.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from rows import Load, add_options

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks/results/first_run.json"
PHOTO = ROOT / "demo/tokenprune_demo/heldout/pictures/002.jpg"  # which the README's first code opens
MODEL = "demo_vlm"
PATCHED = re.compile(r'tokenprune\.patch\(model, "(\w+)", keep=([\d.]+)\)')


def code() -> str:
    """Return the README's first code, which runs as it stands in the root of a checkout."""
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def run() -> list[str]:
    """Return the lines that the code prints."""
    out = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
        exec(compile(code(), "README.md", "exec"), {})
    return out.getvalue().splitlines()


def first_token(repeats: int, threads: int, allow_load: bool) -> dict[str, Any]:
    """Return the time from the image to the first token, patched as the README's first code patches, and unpatched."""
    import torch
    from PIL import Image

    import tokenprune
    from tokenprune.profiling.model import load
    from tokenprune.profiling.timing import compare

    load_of_machine = Load(allow_load)
    torch.set_num_threads(threads)
    method, keep = PATCHED.search(code()).groups()
    subject, image = load(MODEL, device="cpu"), Image.open(PHOTO).convert("RGB")
    patched = partial(tokenprune.patched, subject.model, method, keep=float(keep), guard="off")
    ask = partial(subject.inputs, [image], ["what does the sign say?"])
    found = compare(subject, patched, ask, repeats, new_tokens=2, processor=True)
    ratio = found["ttft_ratio"]
    return {
        "model": f"{MODEL} (shipped)", "method": method, "keep": float(keep), "repeats": repeats, "threads": threads,
        "ms": found["ttft_ms"], "ms_unpatched": found["ttft_ms_unpatched"], "ratio": ratio,
        "speedup": {"p20": 1 / ratio["p80"], "p50": 1 / ratio["p50"], "p80": 1 / ratio["p20"]},
        "torch": torch.__version__, "date": datetime.date.today().isoformat(), **load_of_machine.record(),
    }  # fmt: skip


def main() -> None:
    from tokenprune.startup import calm_threads

    calm_threads()
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--threads", type=int, default=1)
    add_options(parser, resume=False)
    args = parser.parse_args()
    known = json.loads(OUT.read_text()) if OUT.is_file() else {}
    record = {"torch": torch.__version__, "transformers": transformers.__version__}
    record["printed"] = run()
    if "first_token" in known:
        record["first_token"] = known["first_token"]
    write(record)
    write(record | {"first_token": first_token(args.repeats, args.threads, args.allow_load)})


def write(record: dict[str, Any]) -> None:
    OUT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
