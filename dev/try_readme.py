# SPDX-License-Identifier: Apache-2.0
"""Run README's code and `tokenprune demo` in this environment, as a newcomer would; exits with 1 where one fails.

python dev/try_readme.py    # with the Python of an environment that was installed as README says, in the checkout
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    """Return what a command prints; exits where it fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{command[:2]} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    promised = code.rpartition("# prints: ")[2].strip()
    if (printed := run(sys.executable, "-c", code).strip()) != promised:
        sys.exit(f"README's code prints {printed!r}, and README says {promised!r}")
    print(printed)
    print(run(str(Path(sys.executable).with_name("tokenprune")), "demo"))


if __name__ == "__main__":
    main()
