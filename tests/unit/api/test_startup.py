# SPDX-License-Identifier: Apache-2.0
"""Before any work: threads that sleep while they wait, and nothing imported that is not needed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlavaConfig

import tokenprune
import zoo
from each import each
from tokenprune.cli.completion import complete_methods, list_builtin_methods
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.integrations.vllm.settings.parse import check_method
from tokenprune.methods.registry import available_methods, method_class
from tokenprune.selection.options import get_file_options
from tokenprune.settings.cost import LLAVA_7B, LLAVA_7B_LOAD, CostModel, Load

ROOT = Path(tokenprune.__file__).parents[1]
BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "experiments"
SPIN, SILENT = "GOMP_SPINCOUNT", "TRANSFORMERS_NO_ADVISORY_WARNINGS"

# Ends the process where torch is first looked for, and says what libgomp would read there.
WATCH = f"""
import os, runpy, sys, types
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("at torch:", os.environ.get({SPIN!r}), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""
ENTRIES = {
    "main": "from tokenprune.cli import main; sys.argv = ['tokenprune', 'demo']; main()",
    "tokenprune": "sys.argv = ['tokenprune', 'bench']; runpy.run_module('tokenprune', run_name='__main__')",
    "app": "sys.modules['gradio'] = types.ModuleType('gradio')\n"
    "from tokenprune.cli import main; sys.argv = ['tokenprune', 'app']; main()",
    "benchmarks": f"sys.path.insert(0, {str(BENCHMARKS)!r}); runpy.run_path({str(BENCHMARKS / 'scaling.py')!r})",
    "lmms-eval": "fake = types.ModuleType('lmms_eval.models.registry_v2'); fake.ModelManifest = dict\n"
    "sys.modules |= {name: fake for name in ('lmms_eval', 'lmms_eval.models', fake.__name__)}\n"
    "from tokenprune_bench.lmms_eval import manifest; manifest(); import torch",
}
# Prints which of some modules a command imported; torch stands for its compiled part, for `import torch` may wait.
COUNT = """
import sys
from tokenprune.cli import main
try: main()
except SystemExit as end: assert not end.code, end.code
print("imported:", *sorted(({} | {{"torch._C"}}) & set(sys.modules)))
"""
NUMBERS = {"numpy", "scipy", "sklearn", "pandas", "PIL"}


def run(code: str, *arguments: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in (SPIN, SILENT)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True,
        env=kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@each("entry", ENTRIES)
def test_threads_sleep_before_torch_is_imported(entry: str) -> None:
    assert run(WATCH + ENTRIES[entry]) == "at torch: 0\n"


def test_a_users_own_spinning_stays() -> None:
    assert run(WATCH + ENTRIES["main"], **{SPIN: "7"}) == "at torch: 7\n"


def test_every_benchmark_calms_its_threads_first() -> None:
    late, light = [], ("tokenprune.cli", "tokenprune.errors", "tokenprune_bench.cli")
    heavy = ("torch", "transformers", "common", "asking", "serving", "tokenprune")
    for path in BENCHMARKS.rglob("*.py"):
        text = path.read_text()
        if "training" in path.parts or path.stem == "calm_threads" or ("__main__" not in text and path.stem != "kit"):
            continue
        names = []
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append(node.module)
        others = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
        loads = [name for name in others if name.startswith(heavy) and not name.startswith(light)]
        if loads and others[0] not in ("calm_threads", "kit"):  # which calms them first itself
            late.append(path.name)
    assert not late, f"import calm_threads first, in {late}"


@pytest.mark.parametrize("command", ["methods", "families", "--version", "--help"])
def test_lists_import_neither_torch_nor_transformers(command: str) -> None:
    """A method that loads torch when it is imported writes `from torch import ...` outside `if TYPE_CHECKING`."""
    heavy = NUMBERS | {"transformers"} | ({"matplotlib", "rich.progress"} if command == "--help" else set())
    output = run(COUNT.format(heavy), command)
    assert output.splitlines()[-1] == "imported:"
    listed = {"methods": available_methods(), "--help": "methods families demo bench report show".split()}
    assert all(re.search(rf"^\W*{name} ", output, re.MULTILINE) for name in listed.get(command, ()))


def test_completion_imports_neither_torch_nor_transformers() -> None:
    output = run(
        "import sys\nsys.argv = ['tokenprune']\n" + COUNT.format(NUMBERS | {"transformers"}),
        _TOKENPRUNE_COMPLETE="complete_bash", COMP_WORDS="tokenprune bench --methods divprune+fastv", COMP_CWORD="3",
    )  # fmt: skip
    assert output.split()[:2] == ["divprune+fastv", "divprune+fastvid"] and output.splitlines()[-1] == "imported:"
    assert list_builtin_methods() == available_methods()
    assert complete_methods("dart,unif") == ["dart,uniform"]


@pytest.mark.parametrize(
    "command",
    [("recommend", "demo_vlm"), ("recommend", "demo_qwen"), ("profile", "--config-only", "--method", "fastv")],
)
def test_a_config_is_read_without_torch(command: tuple[str, ...]) -> None:
    output = run(COUNT.format({"scipy", "sklearn", "pandas", "transformers.generation.utils"}), *command)
    assert output.splitlines()[-1] == "imported:" and "not found" not in output
    assert ("start from" if command[0] == "recommend" else "by FLOPs of tower and decoder") in output


@pytest.mark.parametrize(
    "use",
    [
        "import torch; assert 'torch._C' not in sys.modules; assert torch.ones(2).sum() == 2",
        "import torch.nn.functional as F; import torch; assert F.relu(torch.tensor([-1.0])) == 0",
        "from torch import Tensor; import torch; assert isinstance(torch.ones(1), Tensor)",
        "from transformers import BertConfig, BertModel; BertModel(BertConfig(num_hidden_layers=1))",
    ],
)
def test_deferred_torch_is_torch(use: str) -> None:
    code = f"import sys\nfrom tokenprune.models.torch_import import defer_torch\ndefer_torch()\n{use}\nimport torch._C"
    assert run(code) == ""


def test_the_listed_cost_is_that_of_llava() -> None:
    config = LlavaConfig()
    assert CostModel.from_config(config) == LLAVA_7B and Load.from_config(config) == LLAVA_7B_LOAD


def test_what_a_method_says_of_itself_is_what_running_it_says() -> None:
    """Of those that run without a file of their own: `recommend` names no others."""
    for name in available_methods():
        method = method_class(name)()
        if get_file_options(type(method)):
            continue
        tried = None
        try:
            check_method(method)
        except TokenPruneError as error:
            tried = str(error)
        assert find_unserved_reason(method) == tried


# The add-ons, and what else of the core is loaded where it is asked for alone.
ASIDE = (
    "tokenprune.integrations.hf.attention.",
    "tokenprune.integrations.hf.drafting",
    "tokenprune.integrations.hf.feature_cache.part",
    "tokenprune.integrations.hf.graphs.decoder",
    "tokenprune.integrations.hf.pixels",
    "tokenprune.integrations.hf.sessions",
    "tokenprune.integrations.vllm.gateway",
)


@pytest.mark.parametrize("method", ["divprune", "fastv", "dart"])
def test_a_plain_patch_loads_nothing_that_is_not_asked_for(method: str) -> None:
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(zoo.__file__).parent)!r})
        import tokenprune
        print(*(name for name in sys.modules if name.startswith("tokenprune")), sep="\\n")
        from zoo import FAMILIES
        model = tokenprune.patch(FAMILIES["llava"].build(), {method!r}, keep=0.5)
        model(**FAMILIES["llava"].make_inputs())
        print(*(name for name in sys.modules if name.startswith("tokenprune")), sep="\\n")
    """
    names = set(run(code).split())
    assert "tokenprune.integrations.hf.engine.engine" in names
    assert {name for name in names if name.startswith(ASIDE)} == set()
