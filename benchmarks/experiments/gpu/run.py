# SPDX-License-Identifier: Apache-2.0
"""Run table files one after the other, each in a separate process with the minutes of plan.md.

    python3 benchmarks/experiments/gpu/run.py i h --out OUT             # on the lent machine
    python3 benchmarks/experiments/gpu/run.py --tiny --out OUT          # all but h and j, seconds each, on any machine

This script needs only Python. Packages that the machine lacks come from the folder of wheels (wheels.py), and vLLM from
the folder of pieces (vllm_kit/pieces.py). Some files run in several processes that share the rows. The script prints
the rows in short form; the output of the files goes to `run.log`. `log.jsonl` has a line with time and exit status of
each file. The script exits with 1 if a file did not exit with 0.
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
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent)]
import sheets  # noqa: E402
from vllm_kit import pieces  # noqa: E402

# Keep equal to plan.md.
MINUTES = {
    "a_correctness": 1.7, "b_llava_next": 2.9, "c_memory": 1.6, "d_video": 1.8, "e_kernels": 2.4, "f_llava15": 1.3,
    "g_decode": 2.2, "h_vllm_answers": 2.9, "h_vllm_first_token": 3.5, "h_vllm_times": 4.4, "i_graphs": 5.0,
    "j_peers": 9.0,
}  # fmt: skip
PROCESSES = {"a_correctness": 8, "h_vllm_answers": 10}
VLLM = ("h_", "j_")  # prefixes of files that need vLLM, which has a separate environment on machines without a GPU
TINY_MINUTES = 60.0  # a tiny run ends long before, even on a loaded machine
TINY_PROCESSES = 2
LATE = 30  # seconds from the deadline until a file is killed
DRIVER = Path("/usr/local/nvidia/lib64")  # the driver's libraries in containers


def environment(wheels: Path, folder: str, vllm: Path | None = None) -> dict[str, str]:
    """Return a file's environment: this code, the wheels, and vLLM's pieces if given, unpacked into `folder`."""
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
    """Run a file and return its exit status.

    Rows of all processes are always in `out`, even if this process is killed.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), f"--minutes={minutes:.2f}", *more]
    end, worst = time.monotonic() + 60 * minutes + LATE, 0
    with tempfile.TemporaryDirectory() as temporary, (out / "run.log").open("a") as log:
        folders = [out] if processes == 1 else [Path(temporary, str(index)) for index in range(processes)]
        running = []
        for index, folder in enumerate(folders):
            options = ["--out", str(folder)]
            if processes > 1:
                folder.mkdir()
                if (out / f"{name}.jsonl").exists():
                    (folder / f"{name}.jsonl").write_bytes((out / f"{name}.jsonl").read_bytes())
                options += ["--part", f"{index}/{processes}"]
                env = env | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
            running.append(subprocess.Popen([*command, *options], env=env, stdout=log, stderr=subprocess.STDOUT))
        while running:
            time.sleep(0.2)
            late = time.monotonic() > end
            for process in [process for process in running if late or process.poll() is not None]:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                worst = max(worst, 124 if late else abs(process.returncode))
                running.remove(process)
            if processes > 1:
                join(name, folders, out)
    return worst


def join(name: str, folders: list[Path], out: Path) -> None:
    """Join the rows of all processes in one file, with one process's rows per key, preferably without failure."""
    first, rows_by_key = None, {}
    for path in (folder / f"{name}.jsonl" for folder in folders):
        if not path.exists():
            continue
        first, *rows = map(json.loads, path.read_text().splitlines())
        by_key: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_key.setdefault(json.dumps(row["place"]), []).append(row)
        for key, key_rows in by_key.items():
            if key not in rows_by_key or "failed" in rows_by_key[key][0]:
                rows_by_key[key] = key_rows
    if first is not None:
        rows = [row for key_rows in rows_by_key.values() for row in key_rows]
        half = out / f"{name}.part"
        half.write_text("\n".join(map(json.dumps, [first, *rows])) + "\n")
        half.replace(out / f"{name}.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list("abcdefgi"), help="letters, or prefixes of names")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu")
    parser.add_argument("--minutes", type=float, default=9.5, help="maximum minutes for all files")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    parser.add_argument("--pieces", type=Path, default=ROOT / "pieces", help="folder of vLLM's pieces, for h and j")
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
            options = (["--tiny"] if args.tiny else []) + more
            code = measured(name, args.out, env, minutes, options, processes)
            seconds = round(time.monotonic() - start, 1)
            now = os.times()
            cpu = now.children_user + now.children_system - before.children_user - before.children_system
            line = {
                "file": name,
                "rc": code,
                "seconds": seconds,
                "cpu_seconds": round(cpu, 1),
                "of": round(60 * minutes),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            path = args.out / f"{name}.jsonl"
            print(sheets.short(path) if path.exists() else f"{name}: no rows, see run.log")
            print(f"{name}: rc {code}, {seconds} s of {60 * minutes:.0f}", flush=True)
            worst = max(worst, code)
    return int(worst > 0)


if __name__ == "__main__":
    raise SystemExit(main())
