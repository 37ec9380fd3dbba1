# SPDX-License-Identifier: Apache-2.0
"""Run files of tables one after the other, each in a process of its own and with the minutes that plan.md gives it.

    python3 experiments/gpu/run.py a b --out OUT             # on the lent machine
    python3 experiments/gpu/run.py --tiny --out OUT          # all, in seconds each, on any machine

Needs nothing but Python. What the machine lacks it takes from the folder of wheels (wheels.py made it). A line of
`log.jsonl` says of each file how long it took and how it ended; this command ends with 1 if one did not end with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# plan.md says the same; 24 minutes, to which come those in which machine and files start.
MINUTES = {
    "a_correctness": 4.0, "b_llava_next": 5.0, "c_memory": 2.0, "d_video": 4.0, "e_kernels": 3.0, "f_llava15": 3.0,
    "g_decode": 3.0,
}  # fmt: skip
TINY_MINUTES = 60.0  # a file that proves the code ends by itself, also beside other work
LATE = 30  # seconds behind its deadline, after which a file is ended from outside


def environment(wheels: Path, folder: str) -> dict[str, str]:
    """Return the environment of a file: this code, and what the wheels hold, unpacked into `folder`."""
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder)
    paths = [str(ROOT), str(ROOT / "bench"), str(ROOT / "demo"), folder, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
        "GOMP_SPINCOUNT": "0", "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list("abcdefg"), help="letters")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of them")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    args, more = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = [name for letter in args.tables for name in MINUTES if name.startswith(letter)]
    began, worst = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder, (args.out / "log.jsonl").open("a") as log:
        env = environment(args.wheels, folder)
        for name in files:
            left = args.minutes - (time.monotonic() - began) / 60
            minutes = TINY_MINUTES if args.tiny else min(MINUTES[name], left)
            command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(args.out), f"--minutes={minutes:.2f}"]
            command += (["--tiny"] if args.tiny else []) + more
            start, before = time.monotonic(), os.times()
            try:
                code = subprocess.run(command, env=env, timeout=60 * minutes + LATE).returncode
            except subprocess.TimeoutExpired:
                code = 124
            taken = round(time.monotonic() - start, 1)
            now = os.times()
            cpu = now.children_user + now.children_system - before.children_user - before.children_system
            line = {"file": name, "rc": code, "seconds": taken, "cpu_seconds": round(cpu, 1), "of": round(60 * minutes)}
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(f"{name}: rc {code}, {taken} s of {60 * minutes:.0f}", flush=True)
            worst = max(worst, code)
    return int(worst > 0)


if __name__ == "__main__":
    raise SystemExit(main())
