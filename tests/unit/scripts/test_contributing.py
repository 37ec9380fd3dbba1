# SPDX-License-Identifier: Apache-2.0
"""Check the promise of CONTRIBUTING.md that a new method changes no other file, on a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("tokenprune", "tests", "docs", "dev")
METHOD = '''# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.selection.method import Pruner, Site
from tokenprune.methods.registry import register
from tokenprune.selection.tokens import VisualTokens


@register("largest_norm", site=Site.PRE_LLM, paper="none")
@dataclass(frozen=True)
class LargestNorm(Pruner):
    """Keep the visual tokens with the largest norm.

    Source: none.
    """

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return torch.linalg.vector_norm(tokens.hidden, dim=-1)
'''
ROW = """# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from greedy import next_pick
from method_rows import Picks


def naive(x, z, a, keep, kept=(), slack=0.0, t=None):
    picks = []
    for _ in range(keep):
        picks.append(next_pick(x.norm(dim=-1), picks, kept, slack))
    return picks


ROWS = {"largest_norm": Picks(naive=naive, unchanged=("unit of tokens", "turn of tokens", "text"))}
"""
PAGE = """# largest_norm

Keeps the visual tokens with the largest norm. It reads only the tokens, once, and compares no token with another.

```python
tokenprune.patch(model, "largest_norm", keep=0.25)
```

**Use it when** you want to see how a method is added.

**Avoid it when** tokens with a small norm matter.

**Cost** One norm per token.

**Differences from the paper** None. The method exists only in a test of the contributing guide.
"""
NEWS = "- **Method `largest_norm`**: the largest norm ([page](../../docs/methods/largest_norm.md)).\n"
FILES = {
    "tokenprune/methods/pre_llm/largest_norm.py": METHOD,
    "tests/unit/methods/naive/largest_norm.py": ROW,
    "docs/methods/largest_norm.md": PAGE,
    "dev/news/largest_norm.md": NEWS,
}
# Tests that count, list or read every method, and the comparison of the new method with its loop.
TESTS = (
    "scripts/test_sizes.py", "scripts/test_house.py", "docs/test_length.py", "docs/test_site.py", "docs/test_words.py",
    "docs/test_figure_sites.py", "docs/test_docs.py", "methods/test_naive.py", "api/test_registry.py",
    "api/test_methods_command.py",
)  # fmt: skip
CHOICE = "largest_norm or not (test_equals_naive_loop or test_generated_parts_are_current)"


def test_new_method_passes_every_check_without_changing_another_file(tmp_path: Path) -> None:
    copy = tmp_path / "tokenprune"
    copy.mkdir()
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not entry.name.startswith((".venv", ".git/", ".pytest", ".ruff", ".mypy")) and entry.name != ".git":
            (copy / entry.name).symlink_to(entry)
    for name, text in FILES.items():
        (copy / name).write_text(text)
    for kind in ("json", "webp"):  # the image of its page
        shutil.copyfile(copy / f"docs/images/kept/divprune.{kind}", copy / f"docs/images/kept/largest_norm.{kind}")
    paths = os.pathsep.join(map(str, (copy, copy / "demo", copy / "benchmarks")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ("-q", "-p", "no:cacheprovider", "-k", CHOICE)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/unit/{name}" for name in TESTS)],
        cwd=copy, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
