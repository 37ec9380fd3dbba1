# SPDX-License-Identifier: Apache-2.0
"""Create the parts of vLLM for a machine without network (about 47 MiB), and unpack them there.

    python experiments/gpu/vllm_kit/pieces.py pieces     # needs network, Python 3.12 and xz; five minutes on one core

The wheel of vLLM's CUDA build is ten times as large. This script removes libraries that the tables do not load. In the
two remaining libraries, it zeroes the code of GPUs other than `ARCH`, which then compresses well. requirements.txt
lists vLLM's dependencies that the machine lacks (it has torch 2.11).
"""

from __future__ import annotations

import argparse
import lzma
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

VLLM, ARCH = "vllm==0.32.0", 90  # H100, H200
LIBRARIES = {"C.xz": "vllm/_C_stable_libtorch.abi3.so", "fa3.xz": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"}
SITE = "site.tar.xz"
_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/include", "vllm/third_party/fmha_sm100")
_GLIBC = (17, 24, 27, 28, 31, 34)
_FATBIN, _PTX, _ELF = struct.pack("<I", 0xBA55ED50), 1, 2  # magic number of a container, kinds of its programs


def make(to: Path) -> None:
    """Download, slim and compress the pieces into a folder."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheels, site = Path(temporary, "wheels"), Path(temporary, "site")
        _download(wheels, VLLM)
        _download(wheels, "-r", str(Path(__file__).with_name("requirements.txt")))
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
        for piece, library in LIBRARIES.items():
            path = shutil.move(site / library, Path(temporary, piece).with_suffix(".so"))
            zero_other_code(Path(path))
            _compress(Path(path).read_bytes(), to / piece)
        for other in (*site.glob("vllm/**/*.so"), *(site / path_of_part for path_of_part in _OUT)):
            shutil.rmtree(other) if other.is_dir() else other.unlink(missing_ok=True)
        with tarfile.open(Path(temporary, "site.tar"), "w") as tar:
            tar.add(site, ".")
        _compress(Path(temporary, "site.tar").read_bytes(), to / SITE)


def _download(to: Path, *requirements: str) -> None:
    names = ["manylinux1_x86_64", "manylinux2014_x86_64", "any", *(f"manylinux_2_{n}_x86_64" for n in _GLIBC)]
    target = ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    platforms = [part for name in names for part in ("--platform", name)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(to),
    ]
    subprocess.run([*command, *target, *platforms, *requirements], check=True)


def _compress(data: bytes, to: Path) -> None:
    filters = "--lzma2=preset=6,dict=192MiB"
    with to.open("wb") as out:
        subprocess.run(["xz", "--threads=2", filters, "--stdout"], input=data, stdout=out, check=True)


def zero_other_code(path: Path, arch: int = ARCH) -> None:
    """Zero the programs in a library that a GPU of `arch` never uses.

    If a container has binaries for `arch`, all other programs are zeroed. Otherwise only the newest PTX that the GPU
    can compile is kept.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        offset = data.find(_FATBIN)
        while offset >= 0:
            _, version, header, size = struct.unpack_from("<IHHQ", data, offset)
            end = offset + header + size
            if version != 1 or header != 16 or end > len(data):  # not a container
                offset = data.find(_FATBIN, offset + 4)
                continue
            entries, position = [], offset + header
            while position < end:
                kind, _, header_size, length = struct.unpack_from("<HHIQ", data, position)
                entries.append((kind, struct.unpack_from("<I", data, position + 28)[0], position + header_size, length))
                position += header_size + length
            has_binary = any(kind == _ELF and program_arch == arch for kind, program_arch, _, _ in entries)
            newest = max(
                (program_arch for kind, program_arch, _, _ in entries if kind == _PTX and program_arch <= arch),
                default=None,
            )
            for kind, program_arch, start, length in entries:
                used = (kind == _ELF and program_arch == arch) or (
                    kind == _PTX and not has_binary and program_arch == newest
                )
                if kind in (_PTX, _ELF) and not used:
                    data[start : start + length] = bytes(length)
            offset = data.find(_FATBIN, end)


def unpack(pieces: Path, to: Path) -> None:
    """Unpack the pieces into a folder of packages. Raises SystemExit if a piece is missing."""
    if missing := [name for name in (SITE, *LIBRARIES) if not (pieces / name).exists()]:
        raise SystemExit(
            f"{pieces} has no {', '.join(missing)}. Create them with network (see benchmarks/experiments/gpu/plan.md)."
        )
    with ProcessPoolExecutor(len(LIBRARIES) + 1) as pool:
        list(pool.map(partial(_unpacked, pieces, to), (SITE, *LIBRARIES)))


def _unpacked(pieces: Path, to: Path, name: str) -> None:
    if name == SITE:
        with tarfile.open(pieces / name) as tar:
            tar.extractall(to, filter="data")
        return
    path = to / LIBRARIES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(pieces / name) as source, path.open("wb") as out:
        shutil.copyfileobj(source, out, 2**22)


def announce(root: Path, to: Path) -> None:
    """Write package metadata of tokenprune, so that vLLM finds its plugin in the sources at `root`."""
    import tomllib

    with (root / "pyproject.toml").open("rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]
    folder = to / "tokenprune-0.0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenprune\nVersion: 0.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in points.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=Path)
    args = parser.parse_args()
    make(args.to)
    for path in sorted(args.to.glob("*.xz")):
        print(f"{path.name}: {os.path.getsize(path) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
