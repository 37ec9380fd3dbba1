# SPDX-License-Identifier: Apache-2.0
"""Build the three wheels from their sdists, and try them in a clean environment.

python dev/try_wheel.py                              # builds in a temporary folder
python dev/try_wheel.py --out dist --extras app      # as in .github/workflows/release.yml
python dev/try_wheel.py --out dist --tag v0.2.0      # exits with 1 if the version differs from the tag

With the core only, it tries the version, `methods`, `reduce`, the messages of commands of missing packages, and a
`new-method` package with its test. With all three it tries `recommend`, `demo`, `show` and `bench`. --extras app tries
`app`. It needs hatchling and a package index. With twine, it also checks the descriptions for the index.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT, ROOT / "demo", ROOT / "benchmarks")  # the core first
MOST = 1_500_000  # bytes of its wheel
BENCH = "tokenprune-bench"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")  # of 22.3 or newer, for --python
PATIENCE = 900  # seconds that a command may take: an environment has a gigabyte to download
APP_PATIENCE = 600  # a machine may be busy
# A visit of the page: an image, a question, and a click on "Compare".
ASK = """
import sys
from gradio_client import Client, handle_file
page = Client(sys.argv[1], download_files=False, verbose=False)
asked = handle_file(sys.argv[2]), "is there a star?", "divprune", "", 0.5
print(page.predict(*asked, api_name="/compare")[0])
"""


class Failed(Exception):
    """A step failed."""


def run(command: Sequence[str | Path], cwd: Path, env: dict[str, str] | None = None) -> str:
    """Return the output of a command. Raises Failed with the end of the output if it fails."""
    try:
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(map(str, command))} took more than {PATIENCE} s") from error
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def require(condition: object, message: str) -> None:
    if not condition:
        raise Failed(message)


def build(out: Path) -> list[Path]:
    """Build sdists and wheels into an empty folder, and return the wheels, the core's first."""
    require(importlib.util.find_spec("hatchling"), "hatchling builds the package: pip install 'hatchling>=1.27'")
    out.mkdir(parents=True, exist_ok=True)
    require(not any(out.iterdir()), f"{out} is not empty: all files there would be published")
    wheels: list[Path] = []
    for folder in FOLDERS:
        before = {*out.iterdir()}
        run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out], folder)
        (sdist,) = {*out.iterdir()} - before
        run([*PIP, "wheel", "--no-deps", "-w", out, sdist], out)
        (wheel,) = {*out.iterdir()} - before - {sdist}
        wheels.append(wheel)
    if importlib.util.find_spec("twine"):
        run([sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir())], out)
    require(wheels[0].stat().st_size < MOST, f"{wheels[0].name} has {MOST} bytes or more")
    require(len({version_of(wheel) for wheel in wheels}) == 1, "the three wheels have several versions")
    return wheels


def version_of(wheel: Path) -> str:
    """Return the version in the name of a wheel."""
    return wheel.name.split("-")[1]


def check_tag(version: str, tag: str) -> None:
    """Raise Failed if the version does not match the tag. "" skips the check."""
    require(tag in ("", f"v{version}"), f"the tag {tag} is not v{version}, which the wheel has")


class Environment:
    """An empty virtual environment, and a working folder for its commands."""

    def __init__(self, folder: Path, constraints: Path | None) -> None:
        self.folder = folder / "away"  # from the checkout, which must not be imported
        self.folder.mkdir(parents=True)
        self._bin = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self._constraints = ["-c", str(constraints.resolve())] if constraints else []
        venv.create(folder / "env", symlinks=os.name != "nt")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.temporary = folder / "tmp"  # temporary files of commands, checked at the end
        self.temporary.mkdir()
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        self.env = kept | {"HF_HUB_OFFLINE": "1", "PATH": path, "TMPDIR": str(self.temporary)}

    def command(self, name: str, *arguments: str | Path) -> list[str | Path]:
        return [self._bin / name, *arguments]

    def run(self, name: str, *arguments: str | Path) -> str:
        return run(self.command(name, *arguments), self.folder, self.env)

    def install(self, *what: str | Path, compiled: bool = False) -> None:
        """Install packages. `compiled` writes bytecode at once, as pip does by default."""
        pip = [*PIP, "--python", self._bin / "python", "install", "--quiet", *self._constraints]
        run([*pip, *(() if compiled else ("--no-compile",)), *what], self.folder)

    def has(self, module: str) -> bool:
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
        return self.run("python", "-c", code).strip() == "True"


def try_version(env: Environment, version: str) -> None:
    told = env.run("tokenprune", "--version").strip()
    require(told == f"tokenprune {version}", f"--version says {told!r}")
    where = env.run("python", "-c", "import tokenprune; print(tokenprune.__file__)").strip()
    require("site-packages" in where, f"another tokenprune is imported, {where}")


def try_lists(env: Environment) -> None:
    require("divprune" in env.run("tokenprune", "methods"), "`tokenprune methods` does not list divprune")


def try_reduce(env: Environment) -> None:
    """Check that features are reduced without transformers, and that `patch` names it."""
    require(not env.has("transformers"), "the core brings transformers")
    code = "import torch, tokenprune; print(len(tokenprune.reduce(torch.randn(64, 8), keep=0.25).kept))"
    require(env.run("python", "-c", code).strip() == "16", "`tokenprune.reduce` does not keep a quarter")


def try_alone(env: Environment) -> None:
    """Check that a missing package is named in one line."""
    for name in ("bench", "recommend", "demo", "show"):
        done = subprocess.run(
            list(map(str, env.command("tokenprune", name))),
            cwd=env.folder,
            env=env.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        require(
            done.returncode == 2 and done.stderr.endswith(f"pip install {BENCH}\n") and done.stderr.count("\n") == 1,
            f"`tokenprune {name}` without {BENCH} says {done.stdout + done.stderr}",
        )


def try_recommend(env: Environment) -> None:
    require("patch(" in env.run("tokenprune", "recommend", "demo_vlm"), "`tokenprune recommend` names no setting")


def try_demo(env: Environment) -> None:
    models = ("demo_vlm", "demo_qwen") if env.has("torchvision") else ("demo_vlm",)  # Qwen's processors need it
    for model in models:
        require(
            "KV cache" in env.run("tokenprune", "demo", "--model", model), f"`demo --model {model}` shows no KV cache"
        )


def held_out(env: Environment) -> str:
    """Return an image that ships with the package."""
    code = "from tokenprune_demo.heldout import FOLDER; print(min(FOLDER.rglob('*.jpg')))"
    return env.run("python", "-c", code).strip()


def try_show(env: Environment) -> None:
    env.run("tokenprune", "show", held_out(env), "--methods", "divprune,tome", "--out", "shown.png")
    signature = (env.folder / "shown.png").read_bytes()[:8]
    require(signature == b"\x89PNG\r\n\x1a\n", "`tokenprune show` wrote no PNG")


def try_bench(env: Environment) -> None:
    asked = env.run("tokenprune", "bench", "--methods", "divprune", "--keep", "0.5", "--images", "2", "--repeats", "0")
    require("divprune" in asked, "`tokenprune bench` shows no row of divprune")


def try_new_method(env: Environment) -> None:
    env.run("tokenprune", "new-method", "tried_out")
    env.install("./tokenprune-tried-out[test]")
    told = env.run("python", "-m", "pytest", "-q", "tokenprune-tried-out")
    require("2 passed" in told, f"the test of a new method failed:\n{told}")
    require("tried_out" in env.run("tokenprune", "methods"), "`tokenprune methods` does not list a method of a package")


def try_app(env: Environment) -> float:
    """Return the seconds until the page of `tokenprune app` answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    image, log, url = held_out(env), env.folder / "app.log", f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with log.open("w") as said:
        command = list(map(str, env.command("tokenprune", "app", "--no-open", "--port", str(port))))
        server = subprocess.Popen(command, cwd=env.folder, env=env.env, stdout=said, stderr=subprocess.STDOUT)
        try:
            told = answer(f"{url}/config", server)
            took = time.monotonic() - began
            compared = env.run("python", "-c", ASK, url, image)  # waits for the model
        except Failed as error:
            raise Failed(f"{error}:\n{log.read_text()[-4000:]}") from error
        finally:
            server.terminate()
            server.wait(timeout=PATIENCE)
    require(json.loads(told).get("components"), "`tokenprune app` answers, and its page is empty")
    require("divprune 0.5" in compared, f"`tokenprune app` did not compare: {compared[-1000:]}")
    left = sorted(path.name for path in env.temporary.iterdir() if path.name.startswith(("tokenprune", "gradio")))
    require(not left, f"`tokenprune app` leaves files behind: {', '.join(left)}")
    return took


def answer(url: str, server: subprocess.Popen) -> bytes:
    """Return the response of a server that starts. Raises Failed if it ends or does not answer in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for localhost
    end = time.monotonic() + APP_PATIENCE
    while time.monotonic() < end:
        if server.poll() is not None:
            raise Failed(f"`tokenprune app` ended with {server.returncode}")
        try:
            return opener.open(url, timeout=10).read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise Failed(f"`tokenprune app` did not answer in {APP_PATIENCE} s")


def parser() -> argparse.ArgumentParser:
    new_parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new_parser.add_argument("--out", type=Path, help="empty folder for sdists and wheels; default: a temporary one")
    new_parser.add_argument(
        "--extras", default="", help="extras of tokenprune-bench to try behind that, with commas: app"
    )
    new_parser.add_argument("--tag", default="", help="of git; the wheel must have its version")
    new_parser.add_argument("--constraints", type=Path, help="versions for pip, such as requirements/dev.txt")
    return new_parser


def main() -> None:
    args, began = parser().parse_args(), time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)

    try:
        with tempfile.TemporaryDirectory(prefix="try-wheel-") as scratch:
            core, demo, bench = wheels = build((args.out or Path(scratch) / "dist").resolve())
            version = version_of(core)
            check_tag(version, args.tag)
            for wheel in wheels:
                say(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB")
            env = Environment(Path(scratch), args.constraints)
            env.install("torch")  # first: other packages may install another build
            env.install(core)
            say("installed the core package only")
            try_version(env, version)
            for check in (try_lists, try_reduce, try_alone, try_new_method):
                check(env)
                say(f"{check.__name__.removeprefix('try_')}: as it should be")
            env.install(demo, bench)
            say("installed, all three")
            for check in (try_lists, try_recommend, try_demo, try_show, try_bench):
                check(env)
                say(f"{check.__name__.removeprefix('try_')}: as it should be")
            if args.extras:
                env.install(f"{BENCH}[{args.extras}] @ {bench.as_uri()}", compiled=True)
                say(f"installed, with {args.extras}")
            if env.has("gradio"):
                say(f"app: as it should be, its page answers after {try_app(env):.1f} s")
            else:
                say("app: not tried, gradio is not installed (--extras app)")
    except Failed as error:
        sys.exit(f"failed: {error}")


if __name__ == "__main__":
    main()
