# SPDX-License-Identifier: Apache-2.0
"""Run files of tables one after the other, each in a process of its own and with the minutes that plan.md gives it.

    python3 benchmarks/experiments/gpu/run.py i h --out OUT             # on the lent machine
    python3 benchmarks/experiments/gpu/run.py --tiny --out OUT          # all but h, in seconds each, on any machine

Needs nothing but Python. What the machine lacks it takes from the folder of wheels (wheels.py made it), and vLLM from
that of pieces (vllm_kit/pieces.py). Some files are run by several processes at once, each of which takes its share of
the rows. Rows are printed in short; what the files say themselves is in `run.log`. A line of `log.jsonl` says of each
file how long it took and how it ended; this command ends with 1 if one did not end with 0.
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
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]
import sheets  # noqa: E402
from vllm_kit import pieces  # noqa: E402

# plan.md says the same.
MINUTES = {
    "a_correctness": 1.7, "b_llava_next": 2.9, "c_memory": 1.6, "d_video": 1.8, "e_kernels": 2.4, "f_llava15": 1.3,
    "g_decode": 2.2, "h_vllm_answers": 2.9, "h_vllm_first_token": 3.5, "h_vllm_times": 4.4, "i_graphs": 5.0,
}  # fmt: skip
PROCESSES = {"a_correctness": 8, "h_vllm_answers": 10}
VLLM = "h_"  # of what needs vLLM, which has an environment of its own on a machine without a GPU
TINY_MINUTES = 60.0  # a file that proves the code ends by itself, also beside other work
TINY_PROCESSES = 2
LATE = 30  # seconds behind its deadline, after which a file is ended from outside
DRIVER = Path("/usr/local/nvidia/lib64")  # where containers find the driver's libraries


def environment(wheels: Path, folder: str, vllm: Path | None = None) -> dict[str, str]:
    """Return the environment of a file: this code, and what the wheels hold, unpacked into `folder`. vllm: its pieces,
    unpacked there too."""
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder)
    if vllm is not None:
        pieces.unpack(vllm, Path(folder))
        pieces.announce(ROOT, Path(folder))
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "demo"), folder, os.environ.get("PYTHONPATH", "")]
    libraries = [str(DRIVER) if DRIVER.is_dir() else "", os.environ.get("LD_LIBRARY_PATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
        "GOMP_SPINCOUNT": "0", "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
    }  # fmt: skip


def measured(name: str, out: Path, env: dict[str, str], minutes: float, more: list[str], processes: int) -> int:
    """Run a file until it ends, and return its exit status. Its rows are in `out` all the time, also those of several
    processes: whatever ends this one leaves them."""
    command = [sys.executable, str(HERE / f"{name}.py"), f"--minutes={minutes:.2f}", *more]
    end, worst = time.monotonic() + 60 * minutes + LATE, 0
    with tempfile.TemporaryDirectory() as place, (out / "run.log").open("a") as log:
        folders = [out] if processes == 1 else [Path(place, str(number)) for number in range(processes)]
        running = []
        for number, folder in enumerate(folders):
            own = ["--out", str(folder)]
            if processes > 1:
                folder.mkdir()
                if (out / f"{name}.jsonl").exists():
                    (folder / f"{name}.jsonl").write_bytes((out / f"{name}.jsonl").read_bytes())
                own += ["--part", f"{number}/{processes}"]
                env = env | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
            running.append(subprocess.Popen([*command, *own], env=env, stdout=log, stderr=subprocess.STDOUT))
        while running:
            time.sleep(0.2)
            late = time.monotonic() > end
            for one in [one for one in running if late or one.poll() is not None]:
                if one.poll() is None:
                    one.kill()
                    one.wait()
                worst = max(worst, 124 if late else abs(one.returncode))
                running.remove(one)
            if processes > 1:
                join(name, folders, out)
    return worst


def join(name: str, folders: list[Path], out: Path) -> None:
    """Write the rows of all processes into one file; of a place those of one process, and failures last."""
    first, found = None, {}
    for path in (folder / f"{name}.jsonl" for folder in folders):
        if not path.exists():
            continue
        first, *rows = map(json.loads, path.read_text().splitlines())
        places: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            places.setdefault(json.dumps(row["place"]), []).append(row)
        for place, own in places.items():
            if place not in found or "failed" in found[place][0]:
                found[place] = own
    if first is not None:
        rows = [row for own in found.values() for row in own]
        half = out / f"{name}.part"
        half.write_text("\n".join(map(json.dumps, [first, *rows])) + "\n")
        half.replace(out / f"{name}.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list("abcdefgi"), help="letters, or the begin of names")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of them")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--pieces", type=Path, default=ROOT / "pieces", help="of vLLM, for h")
    args, more = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = [name for letter in args.tables for name in MINUTES if name.startswith(letter)]
    vllm = args.pieces if any(name.startswith(VLLM) for name in files) and not args.tiny else None
    began, worst = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder, (args.out / "log.jsonl").open("a") as log:
        env = environment(args.wheels, folder, vllm)
        for name in files:
            left = args.minutes - (time.monotonic() - began) / 60
            minutes = TINY_MINUTES if args.tiny else min(MINUTES[name], left)
            processes = min(PROCESSES.get(name, 1), TINY_PROCESSES if args.tiny else 99)
            start, before = time.monotonic(), os.times()
            given = (["--tiny"] if args.tiny else []) + more
            code = measured(name, args.out, env, minutes, given, processes)
            taken = round(time.monotonic() - start, 1)
            now = os.times()
            cpu = now.children_user + now.children_system - before.children_user - before.children_system
            line = {"file": name, "rc": code, "seconds": taken, "cpu_seconds": round(cpu, 1), "of": round(60 * minutes)}
            log.write(json.dumps(line) + "\n")
            log.flush()
            path = args.out / f"{name}.jsonl"
            print(sheets.short(path) if path.exists() else f"{name}: no rows, see run.log")
            print(f"{name}: rc {code}, {taken} s of {60 * minutes:.0f}", flush=True)
            worst = max(worst, code)
    return int(worst > 0)


if __name__ == "__main__":
    raise SystemExit(main())
